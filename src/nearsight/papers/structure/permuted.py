"""S3 on real images: do networks mind where pixels are, and does attention need to see more than positions?

How S3 trained its networks is assumed. Here all networks of a study are trained alike, for a fixed number of epochs
that fits into minutes on a GPU, so that accuracies lie below the paper's: what is compared is how they change. Networks
of different shapes do not train as one stack, but their seeds do: hence `--stack-by all`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.papers.locat.rules import judge_order
from nearsight.papers.structure import numbers as s3
from nearsight.papers.structure.rules import AS_LITTLE, KEEPS, ORDER, judge_as_little, judge_keeps
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import missing_notes, scale_notes
from nearsight.report.figures.style import MUTED, ModelStyle, add_legend, house_style, light_grid, model_style
from nearsight.report.fits import LeastSquares, condition_means, least_squares
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.rules import Finding
from nearsight.report.tables import Table, percent, rounded, seeds_in_words, with_interval
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval
from nearsight.study.statistics.intervals import LEVEL
from nearsight.train import DataConfig, RunConfig, modern
from nearsight.train.recipes import compact_cifar10, compact_cifar100, trained_for

_PERMUTED_EPOCHS = 12
_POSITIONAL_EPOCHS = 60
_POSITIONAL: Mapping[str, Any] = {"model.name": "compact_vit_positional"}


@recipe("permuted-cifar100")
def permuted_cifar100(*, seeds: int = 2) -> Study:
    """Which networks mind that the tiles of all images are shuffled in one fixed way? (S3, permuted CIFAR-100)

    The paper: a ViT with patches of 2 pixels stays near 64 %, a ResNet falls from 80 % to 57 %. To a ViT, 4×4 tiles are
    no change: its patches come in another order. 32×32 tiles are single pixels, which also takes its patches apart.

    Run     nearsight study run permuted-cifar100 --stack-by all
    Cost    18 cells of at most 12 epochs of 40,000 images (8 M); needs a GPU
    Result  a ViT minds pixels, not tiles; a ResNet both, more: see results/spatial-structure/permuted-cifar100
    """
    # Larger batches than S1's: patches of 2 are four times as many, and convolutions run one cell at a time.
    protocol = dataclasses.replace(compact_cifar100("baseline").protocol, batch_size=256, warmup_epochs=2)
    base = dataclasses.replace(compact_cifar100("baseline"), protocol=protocol, num_measured=1000)
    factors: dict[str, Any] = {
        "model": {
            "ViT": {"patch_size": 2},
            "Positional ViT": {"patch_size": 2, **_POSITIONAL},
            "ResNet-18": {"model.name": "compact_resnet18"},
        },
        "tiles": {"1×1": OFF, "4×4": {"shuffled_tiles": 4}, "32×32": {"shuffled_tiles": 32}},
    }
    ends = ("ViT", "ResNet-18, tiles 32×32")
    return Study(trained_for(base, _PERMUTED_EPOCHS), factors=factors, seeds=seeds, ends=ends)


@recipe("positional-cifar10")
def positional_cifar10(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on CIFAR-10? (S3, positional attention; the paper: 90.2 and 90.5 %)

    Run     nearsight study run positional-cifar10 --stack-by all
    Cost    10 cells of at most 60 epochs of 40,000 images (24 M); needs a GPU
    Result  see results/spatial-structure/positional-cifar10
    """
    return _against_positional(compact_cifar10("modern"), seeds)


@recipe("positional-cifar100")
def positional_cifar100(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on CIFAR-100? (S3, positional attention; the paper: 68 and 68 %)

    Run     nearsight study run positional-cifar100 --stack-by all
    Cost    10 cells of at most 60 epochs of 40,000 images (24 M); needs a GPU
    Result  see results/spatial-structure/positional-cifar100
    """
    return _against_positional(compact_cifar100("modern"), seeds)


@recipe("positional-svhn")
def positional_svhn(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on SVHN? (S3, positional attention; the paper: 98.2 and 97.3 %)

    Without flips, since digits do not come mirrored, and without AutoAugment, whose policy is that of CIFAR.

    Run     nearsight study run positional-svhn --stack-by all
    Cost    10 cells of at most 60 epochs of 58,606 images (35 M); needs a GPU
    Result  not run yet
    """
    protocol = modern().without("flip").without("autoaugment")
    return _against_positional(RunConfig(data=DataConfig(name="svhn"), protocol=protocol), seeds)


def _against_positional(run: RunConfig, seeds: int) -> Study:
    models = {"ViT": OFF, "Positional ViT": _POSITIONAL}
    return Study(trained_for(run, _POSITIONAL_EPOCHS), factors={"model": models}, seeds=seeds)


# What a fixed shuffling of tiles does to each network's accuracy, seed by seed and with intervals.
#
# Of two seeds alone no interval is worth having. So the spread over seeds is taken to be the same everywhere, and
# learned from all of them: for accuracies the spread within conditions, for changes what is left of it within seeds.


POOLED = (
    "± is half the 95 % interval of the mean over seeds (Student's t). The spread over seeds is taken to be the same "
    "in all conditions and learned from all runs, for changes after taking out what a seed does to all of them; with "
    "one seed there is none."
)


def num_tiles(level: str) -> int:
    """Along a side: 4 of "4×4"."""
    return int(level.partition("×")[0])


def accuracy_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Of the seeds that have such a run."""
    runs = results.runs
    here = runs[(runs["model"] == network) & (runs["tiles"] == tiles)]
    return here.set_index("seed")["test_acc"].astype("float64")


def change_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Accuracy with shuffled tiles minus that of the same seed without. No such seed is an `InputError`."""
    after, before = (accuracy_by_seed(results, network, level) for level in (tiles, s3.UNSHUFFLED))
    change = (after - before).dropna()
    if change.empty:
        raise InputError(f"no seed of {network} has a run with {tiles} tiles and one without shuffling")
    return change


def excess_by_seed(results: StudyResults, network: str, reference: str, tiles: str) -> "pd.Series[float]":
    """How much more a network changes than another, seed by seed. No such seed is an `InputError`."""
    excess = (change_by_seed(results, network, tiles) - change_by_seed(results, reference, tiles)).dropna()
    if excess.empty:
        raise InputError(f"no seed of which both {network} and {reference} have runs with {tiles} tiles and without")
    return excess


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of a run over seeds, as all conditions together tell it."""

    variance: float
    df: int

    def interval(self, values: "pd.Series[float]", *, runs_in_each: int) -> MeanInterval:
        """Of the mean of values, one per seed, that are each a sum or difference of so many runs."""
        from scipy import stats  # here, because it takes most of a second

        plain = mean_interval(values)
        if not self.df or not plain.n:
            return MeanInterval(n=plain.n, mean=plain.mean, std=plain.std, low=float("nan"), high=float("nan"))
        error = float(np.sqrt(runs_in_each * self.variance / plain.n))
        half = float(stats.t.ppf((1 + LEVEL) / 2, self.df)) * error
        return MeanInterval(n=plain.n, mean=plain.mean, std=plain.std, low=plain.mean - half, high=plain.mean + half)


def accuracy_of(results: StudyResults, network: str, tiles: str) -> MeanInterval:
    """The mean over seeds; of nothing where there is no such run."""
    return _spread(results, _within_conditions).interval(accuracy_by_seed(results, network, tiles), runs_in_each=1)


def change_of(results: StudyResults, network: str, tiles: str) -> MeanInterval:
    """What shuffling changes, within seeds. No such seed is an `InputError`."""
    return _spread(results, _within_seeds).interval(change_by_seed(results, network, tiles), runs_in_each=2)


def excess_of(results: StudyResults, network: str, reference: str, tiles: str) -> MeanInterval:
    """How much more it changes in one network than in another. No such seed is an `InputError`."""
    values = excess_by_seed(results, network, reference, tiles)
    return _spread(results, _within_seeds).interval(values, runs_in_each=4)


def _spread(results: StudyResults, fitted: Callable[[pd.DataFrame], LeastSquares]) -> Spread:
    try:
        fit = fitted(results.runs.astype({"test_acc": "float64"}))
    except InputError:  # seeds that have no condition in common tell nothing of what is left within them
        return Spread(variance=float("nan"), df=0)
    return Spread(variance=fit.noise, df=fit.residual_df)


def _within_conditions(runs: pd.DataFrame) -> LeastSquares:
    return least_squares(pd.get_dummies(runs["condition"], dtype=float), runs["test_acc"])


def _within_seeds(runs: pd.DataFrame) -> LeastSquares:
    return condition_means(runs, "test_acc")


# The table of `permuted-cifar100`: what a fixed shuffling of tiles costs each network, beside the paper's.


def permutation_table(results: StudyResults) -> Table:
    """A row per network and number of tiles: accuracy, what shuffling changes, and how much more than in the ViT."""
    rows, shown = [], []
    for network in results.factors["model"]:
        for tiles in results.factors["tiles"]:
            accuracy = accuracy_of(results, network, tiles)
            if not accuracy.n:
                continue
            is_shuffled = tiles != s3.UNSHUFFLED
            change = _interval(partial(change_of, results, network, tiles), wanted=is_shuffled)
            beside = is_shuffled and network != s3.VIT
            excess = _interval(partial(excess_of, results, network, s3.VIT, tiles), wanted=beside)
            papers, papers_change = _papers(network, tiles)
            named: dict[str, object] = {"network": network, "tiles": tiles, "seeds": accuracy.n}
            numbers = {"test_acc": accuracy, "change": change, "change_beyond_vit": excess}
            published = {"paper_test_acc": papers, "paper_change": papers_change}
            rows.append({**named, "scale": results.scale, **_flat(numbers), **published})
            shown.append(
                {
                    **named,
                    "test accuracy, %": with_interval(accuracy, scale=100, digits=2),
                    "paper's accuracy": _whole(papers),
                    f"change from {s3.UNSHUFFLED}, points": points(change),
                    "paper's change": _whole(papers_change, signed=True),
                    f"change beyond that of {s3.VIT}, points": points(excess),
                }
            )
    if not rows:
        raise InputError("none of its networks has a run yet")
    first = f"{s3.FIRST_TILES}×{s3.FIRST_TILES}"
    return Table(
        name="permutation",
        title=f"{results.name}: what a fixed shuffling of tiles costs each network",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).astype(str),
        notes=(
            f"{POOLED} The table of conditions takes each by itself, which few seeds hardly allow.",
            "Changes are taken within seeds, of those that have both runs.",
            f"The paper's numbers are the ends of its curves, read off: {first} tiles, which stand here beside "
            f"{s3.UNSHUFFLED}, and {s3.LAST_TILES}×{s3.LAST_TILES}. How long its networks trained is not "
            "known to us; ours train for few epochs, so that the sign of a change can be compared, its size cannot. "
            f"Its third network, VGG, goes from {ends(s3.CURVES['VGG'])}.",
            f"{s3.PIXELS} tiles are single pixels, finer than patches: there heads have no distances to measure.",
            *missing_notes(results),
        ),
    )


def _papers(network: str, tiles: str) -> tuple[float | None, float | None]:
    """Its accuracy and its change, where its curve has an end there."""
    curve = s3.CURVES.get(network)
    if curve is None:
        return None, None
    if num_tiles(tiles) == s3.LAST_TILES:
        return curve.last, curve.change
    return (curve.first if tiles == s3.UNSHUFFLED else None), None


def _interval(measure: Callable[[], MeanInterval], *, wanted: bool) -> MeanInterval:
    """Of nothing where it is not wanted, or where no seed tells."""
    try:
        return measure() if wanted else mean_interval([])
    except InputError:
        return mean_interval([])


def _flat(numbers: Mapping[str, MeanInterval]) -> dict[str, float]:
    return {f"{name}_{part}": value for name, interval in numbers.items() for part, value in asdict(interval).items()}


def points(change: MeanInterval) -> str:
    return with_interval(change, scale=100, digits=2, signed=True)


def _whole(papers: float | None, *, signed: bool = False) -> str:
    """As exact as what was read off a figure."""
    return rounded(None if papers is None else 100 * papers, 0, signed=signed)


def ends(curve: s3.PublishedCurve) -> str:
    """ "80 to 57 %"."""
    return f"{100 * curve.first:.0f} to {100 * curve.last:.0f} %"


# What S3 says about shuffled tiles, what we ask beyond it, and how the runs of `permuted-cifar100` answer.


SIZES = {s3.LARGE_TILES: f"tiles larger than a patch ({s3.LARGE_TILES})", s3.PIXELS: f"single pixels ({s3.PIXELS})"}
"""Tiles → in words."""


def permuted_claims() -> tuple[Claim, ...]:
    """Per size of tiles the paper's claims, then our questions."""
    return (
        *(claim for tiles, size in SIZES.items() for claim in _claims_about(tiles, size)),
        *(
            Claim(
                id=f"positional-{tiles}",
                text=f"Does positional attention mind a fixed shuffling of {size} as little as the usual one?",
                source=OURS,
                rule=AS_LITTLE,
                judge=partial(_judge_as_little, s3.POSITIONAL_VIT, s3.VIT, tiles),
            )
            for tiles, size in SIZES.items()
        ),
    )


def _claims_about(tiles: str, size: str) -> tuple[Claim, ...]:
    vit, resnet = s3.CURVES[s3.VIT], s3.CURVES[s3.RESNET]
    # Its curves have a point at 4×4 tiles, too, but only their ends are known to us.
    over = f"from {s3.FIRST_TILES}×{s3.FIRST_TILES} to {s3.LAST_TILES}×{s3.LAST_TILES} tiles"
    return (
        Claim(
            id=f"vit-{tiles}",
            text=f"A ViT does not mind a fixed shuffling of {size}",
            source=s3.SHUFFLED,
            paper=f"stays near {100 * vit.first:.0f} % {over}",
            rule=KEEPS,
            judge=partial(_judge_kept, s3.VIT, tiles),
        ),
        Claim(
            id=f"resnet-{tiles}",
            text=f"A ResNet loses accuracy by a fixed shuffling of {size}",
            source=s3.SHUFFLED,
            paper=f"{ends(resnet)} {over}",
            rule=ORDER,
            judge=partial(_judge_lost, s3.RESNET, tiles),
        ),
        Claim(
            id=f"resnet-beside-vit-{tiles}",
            text=f"A ResNet loses more than a ViT by a fixed shuffling of {size}",
            source=s3.SHUFFLED,
            paper=f"{rounded(100 * resnet.change, 0, signed=True)} and about {100 * vit.change:.0f} points {over}",
            rule=ORDER,
            judge=partial(_judge_more_lost, s3.RESNET, s3.VIT, tiles),
        ),
    )


def _judge_kept(network: str, tiles: str, results: StudyResults) -> Finding:
    ours = change_of(results, network, tiles)
    return judge_keeps(ours, words=_in_words(results, network, tiles, ours))


def _judge_lost(network: str, tiles: str, results: StudyResults) -> Finding:
    ours = change_of(results, network, tiles)
    values = change_by_seed(results, network, tiles).tolist()
    return judge_order(values, ours, sign=-1, words=_in_words(results, network, tiles, ours))


def _judge_more_lost(network: str, reference: str, tiles: str, results: StudyResults) -> Finding:
    ours = excess_of(results, network, reference, tiles)
    values = excess_by_seed(results, network, reference, tiles).tolist()
    return judge_order(values, ours, sign=-1, words=_beside_in_words(results, network, reference, tiles, ours))


def _judge_as_little(network: str, reference: str, tiles: str, results: StudyResults) -> Finding:
    ours = excess_of(results, network, reference, tiles)
    return judge_as_little(ours, words=_beside_in_words(results, network, reference, tiles, ours))


def _in_words(results: StudyResults, network: str, tiles: str, ours: MeanInterval) -> str:
    """Of the seeds that have both, so that the change is the difference of the two."""
    seeds = change_by_seed(results, network, tiles).index
    before, after = (
        percent(float(accuracy_by_seed(results, network, level)[seeds].mean())) for level in (s3.UNSHUFFLED, tiles)
    )
    return f"{before} to {after} %: {points(ours)} points"


def _beside_in_words(results: StudyResults, network: str, reference: str, tiles: str, ours: MeanInterval) -> str:
    seeds = excess_by_seed(results, network, reference, tiles).index
    one, other = (
        rounded(100 * float(change_by_seed(results, name, tiles)[seeds].mean()), 2, signed=True)
        for name in (network, reference)
    )
    return f"{network} {one}, {reference} {other}: {points(ours)} points"


# Permutation curves: accuracy against the number of tiles that are shuffled, ours and the paper's.


Values = Callable[[StudyResults, str, str], "pd.Series[float]"]
"""Of a network and a number of tiles: a number per seed."""
Means = Callable[[StudyResults, str, str], MeanInterval]
"""Likewise: their mean."""
NETWORKS = (s3.VIT, s3.POSITIONAL_VIT, s3.RESNET, *(name for name in s3.CURVES if name not in (s3.VIT, s3.RESNET)))
"""In the order of their looks, ours and the paper's."""
# By which factor the curves lie beside each other, so that their intervals do not hide one another.
BESIDE = 1.09
# Of the height that the seeds take up: the space around them. Intervals that need more are cut off.
AROUND = 0.12


def permutation_curves(results: StudyResults) -> Drawing:
    """Three panels: our accuracy; on its scale the ends of the paper's curves; and the change within seeds of both."""
    levels = results.factors["tiles"]
    networks = [name for name in results.factors["model"] if name in set(results.runs["model"])]
    if not networks:
        raise InputError("none of its networks has a run yet")
    with house_style():
        figure = Figure(figsize=(9.4, 3.5), layout="constrained")
        ours, papers, changes = figure.subplots(1, 3, width_ratios=(1.3, 0.8, 1.3))
        heights = _draw_ours(ours, results, networks, accuracy_by_seed, accuracy_of, "accuracy")
        for network, curve in s3.CURVES.items():
            heights += [100 * curve.first, 100 * curve.last]
            papers.plot(
                [s3.FIRST_TILES, s3.LAST_TILES], heights[-2:], **_line(network, is_ours=False), gid=f"paper-{network}"
            )
        for panel in (ours, papers):
            panel.set_ylim(*_limits(heights, lowest=0.0, highest=100.0))
        drops = _draw_ours(changes, results, networks, change_by_seed, change_of, "change")
        for network, curve in s3.CURVES.items():
            look = {**_line(network, is_ours=False), "linestyle": "none"}
            # Beside the intervals, where it hides none.
            changes.plot([s3.LAST_TILES * BESIDE**4], [100 * curve.change], **look, gid=f"paper-change-{network}")
            drops.append(100 * curve.change)
        changes.axhline(0.0, color=MUTED, linewidth=0.9, zorder=1)
        changes.set_ylim(*_limits([0.0, *drops]))
        numbers = [num_tiles(level) for level in levels]
        _finish(ours, numbers, "ours: test accuracy, %")
        _finish(papers, [s3.FIRST_TILES, s3.LAST_TILES], "the paper's, %")
        _finish(changes, numbers, f"change from {s3.UNSHUFFLED}, points")
        shown = [name for name in NETWORKS if name in networks or name in s3.CURVES]
        handles = [Line2D([], [], **_line(name, is_ours=name in networks)) for name in shown]
        names = [name if name in networks else f"{name} (the paper's)" for name in shown]
        add_legend(figure, handles, names, loc="outside upper left", ncols=len(shown))
    seeds = seeds_in_words(results.runs.groupby(["model", "tiles"])["seed"].nunique())
    words = (
        f"Filled: ours, mean over {seeds}; bands: the range of seeds; bars: 95 % intervals, with the spread over seeds "
        "learned from all conditions. Changes are taken within seeds."
    )
    about = (
        f"Hollow: the paper's, the ends of its curves, read off; its changes are from {s3.FIRST_TILES} tiles along a "
        "side. Ours trained for few epochs: compare how curves fall, not how high they lie."
    )
    add_footnote(figure, [words, about, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Test accuracy against the number of tiles along a side that all images are cut into, where one fixed "
        f"permutation shuffles them; 1 is the image itself, {s3.LAST_TILES} its single pixels. Right: the change that "
        f"shuffling makes. {words} {about}",
    )


def _line(network: str, *, is_ours: bool) -> dict[str, Any]:
    style = _style(network)
    hollow = {"markerfacecolor": "white", "markeredgecolor": style.colour, "markeredgewidth": 1.3, "linewidth": 1.0}
    filled = {"markeredgecolor": "white", "markeredgewidth": 0.6, "linewidth": 1.6}
    return {
        **{"color": style.colour, "linestyle": style.dash, "marker": style.marker, "markersize": 6},
        **(filled if is_ours else hollow),
    }


def _style(network: str) -> ModelStyle:
    return model_style(NETWORKS.index(network) if network in NETWORKS else len(NETWORKS))


def _draw_ours(
    panel: Axes, results: StudyResults, networks: Sequence[str], values_of: Values, mean_of: Means, name: str
) -> list[float]:
    """A curve per network with the band of its seeds and an interval at each point; the values of all seeds, times
    100."""
    drawn: list[float] = []
    for place, network in enumerate(networks):
        beside = BESIDE ** (place - (len(networks) - 1) / 2)
        numbers, means, lowest, highest, colour = [], [], [], [], _style(network).colour
        for level in results.factors["tiles"]:
            values = _values(results, network, level, values_of)
            if not values:
                continue
            mean = mean_of(results, network, level)
            numbers.append(num_tiles(level) * beside)
            means.append(100 * mean.mean)
            lowest.append(min(values))
            highest.append(max(values))
            drawn += values
            if mean.has_interval and any(values):  # the change from nothing to nothing is sure
                panel.plot(
                    [numbers[-1]] * 2,
                    [100 * mean.low, 100 * mean.high],
                    color=colour,
                    linewidth=1.2,
                    gid=f"interval-{name}-{network}-{level}",
                )
        panel.fill_between(numbers, lowest, highest, color=colour, alpha=0.2, linewidth=0, gid=f"band-{name}-{network}")
        panel.plot(numbers, means, **_line(network, is_ours=True), zorder=3, gid=f"{name}-{network}")
    return drawn


def _values(results: StudyResults, network: str, level: str, values_of: Values) -> list[float]:
    """In per cent, or points; none where there is no such run."""
    try:
        return [100 * float(value) for value in values_of(results, network, level)]
    except InputError:
        return []


def _limits(
    values: Sequence[float], *, lowest: float | None = None, highest: float | None = None
) -> tuple[float, float]:
    around = AROUND * max(max(values) - min(values), 1.0)
    low, high = min(values) - around, max(values) + around
    return low if lowest is None else max(low, lowest), high if highest is None else min(high, highest)


def _finish(panel: Axes, numbers: Sequence[int], title: str) -> None:
    light_grid(panel, "y")
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers])
    panel.minorticks_off()
    panel.set_xlim(min(numbers) / 1.5, max(numbers) * 1.7)
    panel.set_xlabel("tiles along a side")
    panel.set_title(title)
