"""What S1 claims about heads and layers: its Figures 1, 2, 3 and 5, which give few numbers.

Each claim has a strict reading and a weak one, both true or false in a seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.papers.protocol import numbers as s1
from nearsight.report.claims import Claim, shared_seeds
from nearsight.report.responses import EARLY_LAYERS
from nearsight.report.rules import EVERY_SEED, Finding, judge_every_seed
from nearsight.report.tables import rounded, share, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import energy_distance, layer_responses, mean_interval

PROTOCOL, PARTS = "protocol", "parts"
"""Families of claims: about Modern against Baseline (S1 §4 and §5), and about the parts of Modern (S1 §6)."""
ORDERED = 0.5
"""A rank correlation of depth and distance from which there is an order."""
# Of the gap in the first layer: what may be left in the last one for the protocols to have come together.
_LEFT_OVER = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class _Heads:
    """The heads of one run that exist, in the order of the table."""

    layer: NDArray[np.int64]
    mad: NDArray[np.float64]
    entropy: NDArray[np.float64]
    mean_mad: NDArray[np.float64]
    """Over the heads of a layer, from the first layer to the last; likewise of the entropy."""
    mean_entropy: NDArray[np.float64]


def _heads_of(results: StudyResults, condition: str, seed: int) -> _Heads:
    found = _heads_by_run(results)[condition, seed]
    if not found.mad.size:
        raise InputError(f"no head of {condition}, seed {seed}, could be measured")
    return found


@lru_cache(maxsize=1)  # one study after the other is judged, by many claims each
def _heads_by_run(results: StudyResults) -> dict[tuple[str, int], _Heads]:
    heads = results.heads.dropna(subset=["mad", "entropy"])
    layers = layer_responses(heads).sort_values("layer", kind="stable")
    columns = [
        (frame[name].to_numpy(), name, frame.groupby("run").indices)
        for frame, names in ((heads, ("layer", "mad", "entropy")), (layers, ("mean_mad", "mean_entropy")))
        for name in names
    ]
    none, runs = np.empty(0, dtype=np.intp), results.runs
    return {
        (condition, int(seed)): _Heads(**{name: values[rows.get(run, none)] for values, name, rows in columns})
        for run, condition, seed in zip(runs["run"], runs["condition"], runs["seed"], strict=True)
    }


def _in_words(values: Sequence[float], digits: int = 3) -> str:
    return with_interval(mean_interval(values), digits=digits)


Reading = tuple[str, Callable[..., bool]]
"""In words, and of the numbers of a seed."""
Measure = Callable[..., tuple[float, ...]]
"""Some numbers of a seed, from the heads of the conditions that a claim needs."""


def _in_every_seed(
    id: str,
    text: str,
    source: str,
    *,
    strict: Reading,
    weak: Reading,
    words: str,
    describe: Callable[[Sequence[float]], str] = _in_words,
    paper: str = "shown in a figure, no number",
    needs: tuple[str, ...] = (s1.BASELINE, s1.MODERN),
    family: str = PROTOCOL,
) -> Callable[[Measure], Claim]:
    """Makes a measure the claim that it is of. `words`: our numbers in words, with a place for each, which
    `describe` fills from its values over the seeds."""

    def claim(measure: Measure) -> Claim:
        def judge(results: StudyResults) -> Finding:
            seeds = shared_seeds(results.runs, *needs)
            found = [measure(*(_heads_of(results, label, seed) for label in needs)) for seed in seeds]
            holds, holds_weakly = ([bool(reading(*each)) for each in found] for _, reading in (strict, weak))
            return judge_every_seed(holds, holds_weakly, words.format(*map(describe, zip(*found, strict=True))))

        return Claim(
            id=id,
            text=text,
            source=source,
            paper=paper,
            rule=EVERY_SEED,
            readings=(strict[0], weak[0]),
            needs=needs,
            family=family,
            judge=judge,
        )

    return claim


@_in_every_seed(
    "early-layers",
    "The Modern protocol gives lower distance and lower entropy in early layers",
    "S1 abstract, §5.4, §7",
    strict=(
        "the mean over the heads of L1 and L2 is lower than with Baseline, in distance and in entropy",
        lambda far, near, blurred, focused: near < far and focused < blurred,
    ),
    weak=("it is lower in distance", lambda far, near, *_: near < far),
    words="distance {} to {}; entropy {} to {}",
)
def _early_layers(base: _Heads, full: _Heads) -> tuple[float, ...]:
    means = (base.mean_mad, full.mean_mad, base.mean_entropy, full.mean_entropy)
    return tuple(float(mean[:EARLY_LAYERS].mean()) for mean in means)


_BASELINE, _MODERN = (s1.PUBLISHED["protocol-cifar100"].conditions[label] for label in (s1.BASELINE, s1.MODERN))


@_in_every_seed(
    "in-layer-1",
    "Under the Modern protocol the most local head of the model lies in layer 1",
    "S1 §5.1, Figure 1b",
    strict=("it lies in L1", lambda layer: layer == 0),
    weak=("it lies in L1 or L2", lambda layer: layer < EARLY_LAYERS),
    words="in {}, counted from 1 as in the paper",
    describe=lambda layers: ", ".join(f"L{layer + 1}" for layer in layers),
    paper=f"in L1 (min MAD {rounded(_MODERN.min_mad)})",
)
def _most_local_layer(base: _Heads, full: _Heads) -> tuple[float, ...]:
    return (int(full.layer[full.mad.argmin()]),)


@_in_every_seed(
    "first-layer",
    "All heads of Modern's first layer restrict their attention",
    "S1 §5.3, Figure 3b",
    strict=(
        "every head of Modern's L1 has a smaller distance than every head of Baseline's",
        lambda farthest, nearest, *_: farthest < nearest,
    ),
    weak=("their mean is smaller", lambda _, __, ours, theirs: ours < theirs),
    words="Modern's first layer up to {}, Baseline's from {}",
)
def _first_layers(base: _Heads, full: _Heads) -> tuple[float, ...]:
    theirs, ours = (heads.mad[heads.layer == heads.layer.min()] for heads in (base, full))
    return ours.max(), theirs.min(), ours.mean(), theirs.mean()


@_in_every_seed(
    "depth-order",
    "Under the Modern protocol distance grows with depth; Baseline shows no such order",
    "S1 §5.2, §5.3, Figure 3",
    strict=(
        f"the rank correlation of depth and mean distance over layers is at least {ORDERED} with Modern and below "
        "that with Baseline",
        lambda base, full: full >= ORDERED > base,
    ),
    weak=("it is higher with Modern than with Baseline", lambda base, full: full > base),
    words="rank correlation {1}, Baseline's {0}",
    describe=partial(_in_words, digits=2),
)
def _depth_order(base: _Heads, full: _Heads) -> tuple[float, ...]:
    from scipy import stats  # here, because it takes most of a second

    def correlation(values: NDArray[np.float64]) -> float:
        """With the place in the row; 0 where all values are equal, or there is only one."""
        if len(values) < 2 or np.ptp(values) == 0:
            return 0.0
        return float(stats.spearmanr(np.arange(len(values)), values).statistic)

    return correlation(base.mean_mad), correlation(full.mean_mad)


@_in_every_seed(
    "convergence",
    "With depth, Modern's heads converge with Baseline's",
    "S1 §5.2, Figure 2",
    strict=(
        f"Modern's mean distance is below Baseline's in L1, and at most {share(_LEFT_OVER)} of that gap is left, on "
        "either side, in the last layer",
        lambda first, last: first > 0 and abs(last) <= _LEFT_OVER * first,
    ),
    weak=(
        "it is below in L1, and the gap in the last layer is smaller",
        lambda first, last: first > 0 and abs(last) < first,
    ),
    words="Baseline minus Modern {} in the first layer, {} in the last",
)
def _convergence(base: _Heads, full: _Heads) -> tuple[float, ...]:
    gap = base.mean_mad - full.mean_mad
    return float(gap[0]), float(gap[-1])


@_in_every_seed(
    "own-region",
    "Modern has heads in a region of low distance and low entropy where Baseline has none",
    "S1 §1, §5.2, Figure 2",
    strict=(
        "at least one head of Modern is below every head of Baseline in distance and in entropy at once",
        lambda _, both: both > 0,
    ),
    weak=("at least one is below every head of Baseline in distance", lambda nearer, _: nearer > 0),
    words="heads a seed below all of Baseline's: {1} in both, {0} in distance",
    describe=partial(_in_words, digits=1),
    paper=f"Modern down to {rounded(_MODERN.min_mad)} and {rounded(_MODERN.min_entropy)}, Baseline to "
    f"{rounded(_BASELINE.min_mad)} and {rounded(_BASELINE.min_entropy)}",
)
def _own_region(base: _Heads, full: _Heads) -> tuple[float, ...]:
    nearer = full.mad < base.mad.min()
    return int(nearer.sum()), int((nearer & (full.entropy < base.entropy.min())).sum())


@_in_every_seed(
    "plane",
    "In the plane of distance and entropy +CutMix clusters with Modern, −CutMix with Baseline",
    "S1 §6.2, Figure 5",
    strict=(
        "by the energy distance between their clouds of heads, +CutMix is closer to Modern than to Baseline and "
        "−CutMix closer to Baseline than to Modern",
        lambda added, removed: min(added, removed) > 0,
    ),
    weak=("one of the two holds", lambda added, removed: max(added, removed) > 0),
    words="+CutMix closer to Modern by {}, −CutMix closer to Baseline by {}",
    needs=(s1.BASELINE, s1.MODERN, s1.ONLY_CUTMIX, s1.WITHOUT_CUTMIX),
    family=PARTS,
)
def _plane(base: _Heads, full: _Heads, only: _Heads, without: _Heads) -> tuple[float, ...]:
    def apart(a: _Heads, b: _Heads) -> float:
        return energy_distance(*(np.column_stack([heads.mad, heads.entropy]) for heads in (a, b)))

    return apart(only, base) - apart(only, full), apart(without, full) - apart(without, base)


ON_ALL_DATA_SETS = (_early_layers,)
ON_CIFAR100 = (_early_layers, _most_local_layer, _first_layers, _depth_order, _convergence, _own_region)
OF_ABLATION = _plane
"""Which it claims where, and which of the parts of Modern."""
