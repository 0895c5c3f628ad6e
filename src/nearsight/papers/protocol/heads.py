"""What the claims about heads are judged by, seed by seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.papers.protocol import numbers as s1
from nearsight.report.claims import shared_seeds
from nearsight.report.responses import EARLY_LAYERS
from nearsight.report.rules import Finding, judge_every_seed
from nearsight.report.tables import rounded, share, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import energy_distance, layer_responses, mean_interval


@dataclass(frozen=True, kw_only=True, eq=False)
class RunHeads:
    """The heads of one run that exist, in the order of the table."""

    layer: NDArray[np.int64]
    mad: NDArray[np.float64]
    entropy: NDArray[np.float64]
    by_layer: Mapping[str, NDArray[np.float64]]
    """Columns of `layer_responses`, from the first layer to the last."""


def heads_of(results: StudyResults, condition: str, seed: int) -> RunHeads:
    found = _heads_by_run(results)[condition, seed]
    if not found.mad.size:
        raise InputError(f"no head of {condition}, seed {seed}, could be measured")
    return found


@lru_cache(maxsize=1)  # one study after the other is judged, by many claims each
def _heads_by_run(results: StudyResults) -> dict[tuple[str, int], RunHeads]:
    heads = results.heads.dropna(subset=["mad", "entropy"])
    of_layers = layer_responses(heads).sort_values("layer", kind="stable")
    columns = {name: heads[name].to_numpy() for name in ("layer", "mad", "entropy")}
    means = {name: of_layers[name].to_numpy(dtype=np.float64) for name in ("mean_mad", "mean_entropy")}
    rows, rows_of_layers = (frame.groupby("run").indices for frame in (heads, of_layers))
    none = np.empty(0, dtype=np.intp)
    runs = results.runs
    return {
        (condition, int(seed)): RunHeads(
            **{name: values[rows.get(run, none)] for name, values in columns.items()},
            by_layer={name: values[rows_of_layers.get(run, none)] for name, values in means.items()},
        )
        for run, condition, seed in zip(runs["run"], runs["condition"], runs["seed"], strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The heads of two conditions at one seed."""

    base: RunHeads
    full: RunHeads

    def early(self, column: str) -> tuple[float, float]:
        """The mean over the first layers, of the base and of the full protocol."""
        base, full = (float(heads.by_layer[column][:EARLY_LAYERS].mean()) for heads in (self.base, self.full))
        return base, full

    @property
    def most_local_layer(self) -> int:
        """The layer of the full protocol's most local head, from 0."""
        return int(self.full.layer[self.full.mad.argmin()])

    @property
    def first_layers(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The distances of the first layer's heads, of the base and of the full protocol."""
        base, full = (heads.mad[heads.layer == heads.layer.min()] for heads in (self.base, self.full))
        return base, full

    @property
    def depth_correlations(self) -> tuple[float, float]:
        """Spearman's correlation of depth and mean distance over layers, of the base and of the full protocol."""
        return _rank_correlation(self.base.by_layer["mean_mad"]), _rank_correlation(self.full.by_layer["mean_mad"])

    @property
    def gaps(self) -> tuple[float, float]:
        """How far the full protocol's mean distance is below the base's, in the first and in the last layer."""
        gap = self.base.by_layer["mean_mad"] - self.full.by_layer["mean_mad"]
        return float(gap[0]), float(gap[-1])

    @property
    def heads_below_the_base(self) -> tuple[int, int]:
        """Heads of the full protocol below every head of the base: in distance, and in distance and entropy at once."""
        nearer = self.full.mad < self.base.mad.min()
        return int(nearer.sum()), int((nearer & (self.full.entropy < self.base.entropy.min())).sum())


def _rank_correlation(values: NDArray[np.float64]) -> float:
    """With the place in the row; 0 where all values are alike, or there is only one."""
    from scipy import stats  # here, because it takes most of a second

    if len(values) < 2 or np.ptp(values) == 0:
        return 0.0
    return float(stats.spearmanr(np.arange(len(values)), values).statistic)


def cloud_distance(a: RunHeads, b: RunHeads) -> float:
    """How far apart two models lie in the plane of distance and entropy."""
    return energy_distance(*(np.column_stack([heads.mad, heads.entropy]) for heads in (a, b)))


# What the paper claims about heads and layers: its Figures 1, 2, 3 and 5, which give few numbers.
#
# Each has a strict reading and a weak one, both true or false in a seed.


# A rank correlation of depth and distance from which there is an order.
ORDERED = 0.5
# Of the gap in the first layer: what may be left in the last one for the protocols to have come together.
LEFT_OVER = 0.5

_BASELINE, _MODERN = (s1.PUBLISHED["protocol-cifar100"].conditions[label] for label in (s1.BASELINE, s1.MODERN))


@dataclass(frozen=True, kw_only=True)
class HeadClaim:
    id: str
    text: str
    source: str
    strict: str
    weak: str
    paper: str = "shown in a figure, no number"
    judge: Callable[[StudyResults], Finding]
    needs: tuple[str, ...] = (s1.BASELINE, s1.MODERN)
    every_dataset: bool = False
    """The paper claims it of all its data sets, not of CIFAR-100 alone."""


def _pairs(results: StudyResults) -> list[Pair]:
    return [
        Pair(base=heads_of(results, s1.BASELINE, seed), full=heads_of(results, s1.MODERN, seed))
        for seed in shared_seeds(results.runs, s1.BASELINE, s1.MODERN)
    ]


def _in_words(values: Sequence[float], digits: int = 3) -> str:
    return with_interval(mean_interval(values), digits=digits)


def _early_layers(results: StudyResults) -> Finding:
    pairs = _pairs(results)
    mad, entropy = ([pair.early(column) for pair in pairs] for column in ("mean_mad", "mean_entropy"))
    nearer, focused = ([full < base for base, full in numbers] for numbers in (mad, entropy))
    words = "; ".join(
        f"{name} {_in_words([base for base, _ in numbers])} to {_in_words([full for _, full in numbers])}"
        for name, numbers in (("distance", mad), ("entropy", entropy))
    )
    return judge_every_seed([all(both) for both in zip(nearer, focused, strict=True)], nearer, words)


def _first_layer_has_it(results: StudyResults) -> Finding:
    layers = [pair.most_local_layer for pair in _pairs(results)]
    words = "in " + ", ".join(f"L{layer + 1}" for layer in layers)
    return judge_every_seed([layer == 0 for layer in layers], [layer < EARLY_LAYERS for layer in layers], words)


def _first_layer_as_a_whole(results: StudyResults) -> Finding:
    firsts = [pair.first_layers for pair in _pairs(results)]
    words = (
        f"Modern's L1 up to {_in_words([full.max() for _, full in firsts])}, "
        f"Baseline's from {_in_words([base.min() for base, _ in firsts])}"
    )
    return judge_every_seed(
        [bool(full.max() < base.min()) for base, full in firsts],
        [bool(full.mean() < base.mean()) for base, full in firsts],
        words,
    )


def _depth_order(results: StudyResults) -> Finding:
    numbers = [pair.depth_correlations for pair in _pairs(results)]
    base, full = (_in_words([pair[place] for pair in numbers], 2) for place in (0, 1))
    return judge_every_seed(
        [full >= ORDERED > base for base, full in numbers],
        [full > base for base, full in numbers],
        f"rank correlation {full}, Baseline's {base}",
    )


def _come_together(results: StudyResults) -> Finding:
    gaps = [pair.gaps for pair in _pairs(results)]
    first, last = (_in_words([gap[place] for gap in gaps]) for place in (0, 1))
    return judge_every_seed(
        [first > 0 and abs(last) <= LEFT_OVER * first for first, last in gaps],
        [first > 0 and abs(last) < first for first, last in gaps],
        f"Baseline minus Modern {first} in L1, {last} in the last",
    )


def _own_region(results: StudyResults) -> Finding:
    counts = [pair.heads_below_the_base for pair in _pairs(results)]
    nearer, both = (_in_words([count[place] for count in counts], 1) for place in (0, 1))
    words = f"heads a seed below all of Baseline's: {both} in both, {nearer} in distance"
    return judge_every_seed([both > 0 for _, both in counts], [nearer > 0 for nearer, _ in counts], words)


HEAD_CLAIMS = (
    HeadClaim(
        id="early-layers",
        text="The Modern protocol gives lower distance and lower entropy in early layers",
        source="S1 abstract, §5.4, §7",
        strict="the mean over the heads of L1 and L2 is lower than with Baseline, in distance and in entropy",
        weak="it is lower in distance",
        judge=_early_layers,
        every_dataset=True,
    ),
    HeadClaim(
        id="in-layer-1",
        text="Under the Modern protocol the most local head of the model lies in layer 1",
        source="S1 §5.1, Figure 1b",
        strict="it lies in L1",
        weak="it lies in L1 or L2",
        paper=f"in L1 (min MAD {rounded(_MODERN.min_mad)})",
        judge=_first_layer_has_it,
    ),
    HeadClaim(
        id="first-layer",
        text="All heads of Modern's first layer restrict their attention",
        source="S1 §5.3, Figure 3b",
        strict="every head of Modern's L1 has a smaller distance than every head of Baseline's",
        weak="their mean is smaller",
        judge=_first_layer_as_a_whole,
    ),
    HeadClaim(
        id="depth-order",
        text="Under the Modern protocol distance grows with depth; Baseline shows no such order",
        source="S1 §5.2, §5.3, Figure 3",
        strict=f"the rank correlation of depth and mean distance over layers is at least {ORDERED} with Modern and "
        "below that with Baseline",
        weak="it is higher with Modern than with Baseline",
        judge=_depth_order,
    ),
    HeadClaim(
        id="convergence",
        text="With depth, Modern's heads converge with Baseline's",
        source="S1 §5.2, Figure 2",
        strict=f"Modern's mean distance is below Baseline's in L1, and at most {share(LEFT_OVER)} of that gap is left, "
        "on either side, in the last layer",
        weak="it is below in L1, and the gap in the last layer is smaller",
        judge=_come_together,
    ),
    HeadClaim(
        id="own-region",
        text="Modern has heads in a region of low distance and low entropy where Baseline has none",
        source="S1 §1, §5.2, Figure 2",
        strict="at least one head of Modern is below every head of Baseline in distance and in entropy at once",
        weak="at least one is below every head of Baseline in distance",
        paper=f"Modern down to {rounded(_MODERN.min_mad)} and {rounded(_MODERN.min_entropy)}, Baseline to "
        f"{rounded(_BASELINE.min_mad)} and {rounded(_BASELINE.min_entropy)}",
        judge=_own_region,
    ),
)


def _in_the_plane(results: StudyResults) -> Finding:
    nearer = []
    for seed in shared_seeds(results.runs, *PLANE.needs):
        base, full, only, without = (heads_of(results, label, seed) for label in PLANE.needs)
        added = cloud_distance(only, base) - cloud_distance(only, full)
        removed = cloud_distance(without, full) - cloud_distance(without, base)
        nearer.append((added, removed))
    words = (
        f"+CutMix nearer to Modern by {_in_words([added for added, _ in nearer])}, "
        f"−CutMix nearer to Baseline by {_in_words([removed for _, removed in nearer])}"
    )
    return judge_every_seed([min(both) > 0 for both in nearer], [max(both) > 0 for both in nearer], words)


PLANE = HeadClaim(
    id="plane",
    text="In the plane of distance and entropy +CutMix clusters with Modern, −CutMix with Baseline",
    source="S1 §6.2, Figure 5",
    strict="by the energy distance between their clouds of heads, +CutMix is nearer to Modern than to Baseline and "
    "−CutMix nearer to Baseline than to Modern",
    weak="one of the two holds",
    judge=_in_the_plane,
    needs=(s1.BASELINE, s1.MODERN, s1.ONLY_CUTMIX, s1.WITHOUT_CUTMIX),
)
