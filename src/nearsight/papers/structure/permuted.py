"""S3 on real images: does it matter where pixels are? The tiles of all images are shuffled in one fixed way.

How S3 trained its networks is assumed. Here all are trained in the same way, for a fixed number of epochs that takes
minutes on a GPU, so that accuracies lie below the paper's: what is compared is how they change. Networks of different
shapes do not train as one stack, but their seeds do.

Of two seeds alone no interval is worth having. So the spread over seeds is taken to be the same everywhere, and learned
from all of them: for accuracies the spread within conditions, for changes what is left of it within seeds.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.papers.structure import PAPER
from nearsight.papers.structure.positional import OF_PROTOCOLS, POSITIONAL, POSITIONAL_VIT, VIT
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import missing_notes, scale_notes
from nearsight.report.contrasts import condition_means, pooled_interval
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import MUTED, house_style, light_grid
from nearsight.report.marks import (
    FEWEST,
    WHITE_EDGE,
    Drawing,
    add_footnote,
    dots_and_bars,
    draw_seeds,
    legend_above,
    with_room,
)
from nearsight.report.rules import INFINITE, Finding, judge_sign, judge_within
from nearsight.report.studies import report_on
from nearsight.report.tables import Row, Table, percent, rounded, seeds_in_words, with_interval
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, LeastSquares, least_squares, mean_interval
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 12
_RESNET, _VGG = "ResNet-18", "VGG"
_UNSHUFFLED, _LARGE_TILES, _PIXELS = "1×1", "4×4", "32×32"
_NETWORKS = (VIT, POSITIONAL_VIT, _RESNET, _VGG)
"""In the order of their looks."""


@recipe("permuted-cifar100")
def permuted_cifar100(*, seeds: int = 2) -> Study:
    """Which networks mind that the tiles of all images are shuffled in one fixed way? (S3, permuted CIFAR-100)

    The paper: a ViT with patches of 2 pixels stays near 64 %, a ResNet falls from 80 % to 57 %. To a ViT, 4×4 tiles are
    no change: its patches come in another order. 32×32 tiles are single pixels, which also takes its patches apart.

    Run     nearsight study run permuted-cifar100
    Cost    18 cells of at most 12 epochs of 40,000 images (8 M); needs a GPU
    Result  a ViT minds pixels, not tiles; a ResNet both, more: see results/spatial-structure/permuted-cifar100
    """
    return _permuted(_NETWORKS[:3], (1, 4, 32), seeds)


@recipe("permuted-tilings-cifar100")
def permuted_tilings_cifar100(*, seeds: int = 3) -> Study:
    """The same for every tiling of S3's curves, and with its third network, VGG (S3, the paper: 76 to 47 %)

    Which VGG is assumed: timm's VGG-16 with batch norms. It has 134 M parameters: a cell's checkpoint takes 2.1 GB and
    its weights 0.5, so give --checkpoint-every 12, and 48 GB of disk for its 18 cells.

    Run     nearsight study run permuted-tilings-cifar100 --reuse results/spatial-structure/permuted-cifar100
    Cost    72 cells of 12 epochs of 40,000 images (34 M); needs a GPU
    Result  not run yet; its plan is in results/permuted-tilings-cifar100
    """
    return _permuted(_NETWORKS, (1, 2, 4, 8, 16, 32), seeds)


def _permuted(networks: Sequence[str], tiles: Sequence[int], seeds: int) -> Study:
    # Larger batches than S1's: patches of 2 are four times as many, and convolutions run one cell at a time.
    protocol = dataclasses.replace(compact_cifar100("baseline").protocol, batch_size=256, warmup_epochs=2)
    base = dataclasses.replace(compact_cifar100("baseline"), protocol=protocol, num_measured=1000)
    models = {
        VIT: {"patch_size": 2},
        POSITIONAL_VIT: {"patch_size": 2, **POSITIONAL},
        _RESNET: {"model.name": "compact_resnet18"},
        _VGG: {"model.name": "vgg16_bn"},
    }
    factors: dict[str, Any] = {
        "model": {name: models[name] for name in networks},
        "tiles": {f"{num}×{num}": {"shuffled_tiles": num} if num > 1 else OFF for num in tiles},
    }
    ends = VIT, f"{networks[-1]}, tiles {tiles[-1]}×{tiles[-1]}"
    return Study(trained_for(base, _EPOCHS), factors=factors, seeds=seeds, ends=ends)


class _Curve(NamedTuple):
    """The paper's accuracy at the ends of a curve over the number of tiles; fractions."""

    first: float
    last: float

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def ends(self) -> str:
        """ "80 to 57 %"."""
        return f"{100 * self.first:.0f} to {100 * self.last:.0f} %"


_FIRST_TILES, _LAST_TILES = 2, 32
"""Along a side, at the ends of S3's curves."""
CURVES: Mapping[str, _Curve] = {VIT: _Curve(0.64, 0.64), _RESNET: _Curve(0.80, 0.57), _VGG: _Curve(0.76, 0.47)}
"""Read off, by the network of ours that each is compared with."""
_POOLED = (
    "± is half the 95 % interval of the mean over seeds (Student's t). The spread over seeds is taken to be the same "
    "in all conditions and estimated from all runs, for changes after taking out what a seed does to all of them; with "
    "one seed there is none."
)


def _num_tiles(level: str) -> int:
    """Along a side: 4 of "4×4"."""
    return int(level.partition("×")[0])


def _accuracy_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Of the seeds that have such a run."""
    runs = results.runs
    here = runs[(runs["model"] == network) & (runs["tiles"] == tiles)]
    return here.set_index("seed")["test_acc"].astype("float64")


def _change_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Accuracy with shuffled tiles minus that of the same seed without. No such seed is an `InputError`."""
    after, before = (_accuracy_by_seed(results, network, level) for level in (tiles, _UNSHUFFLED))
    change = (after - before).dropna()
    if change.empty:
        raise InputError(f"no seed of {network} has a run with {tiles} tiles and one without shuffling")
    return change


def _excess_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """How much more a network changes than the ViT, seed by seed. No such seed is an `InputError`."""
    excess = (_change_by_seed(results, network, tiles) - _change_by_seed(results, VIT, tiles)).dropna()
    if excess.empty:
        raise InputError(f"no seed has runs of both {network} and {VIT} with {tiles} tiles and without")
    return excess


def _within_conditions(runs: pd.DataFrame) -> LeastSquares:
    return least_squares(pd.get_dummies(runs["condition"], dtype=float), runs["test_acc"])


class _Quantity(NamedTuple):
    """A number per seed of a network and of tiles."""

    by_seed: Callable[[StudyResults, str, str], "pd.Series[float]"]
    num_runs: int
    """Of which each is a sum or difference."""
    fitted: Callable[[pd.DataFrame], LeastSquares]
    """What estimates the spread of a run over seeds, from all conditions together."""

    def mean(self, results: StudyResults, network: str, tiles: str) -> Estimate:
        """Over the seeds, of nothing where there is no such run. That no seed has all runs is an `InputError`."""
        values = self.by_seed(results, network, tiles)
        try:
            fit = self.fitted(results.runs.astype({"test_acc": "float64"}))
        except InputError:  # seeds without a common condition leave nothing to estimate the noise from
            plain = mean_interval(values)
            return Estimate(value=plain.value, n=plain.n, std=plain.std)
        return pooled_interval(values, fit, num_runs=self.num_runs)

    def words(self, results: StudyResults, network: str, tiles: str) -> str:
        """Of a change or of its excess: the two numbers that it is the difference of, then it."""
        seeds = self.by_seed(results, network, tiles).index
        ours = with_interval(self.mean(results, network, tiles), scale=100, digits=2, signed=True)
        if self.by_seed is _change_by_seed:
            both = (_accuracy_by_seed(results, network, level) for level in (_UNSHUFFLED, tiles))
            before, after = (percent(float(one[seeds].mean())) for one in both)
            return f"{before} to {after} %: {ours} points"
        both = (_change_by_seed(results, name, tiles) for name in (network, VIT))
        one, other = (rounded(100 * float(each[seeds].mean()), 2, signed=True) for each in both)
        return f"{network} {one}, {VIT} {other}: {ours} points"


_ACCURACY = _Quantity(_accuracy_by_seed, 1, _within_conditions)
_within_seeds = partial(condition_means, response="test_acc")
_CHANGE = _Quantity(_change_by_seed, 2, _within_seeds)
_EXCESS = _Quantity(_excess_by_seed, 4, _within_seeds)


# How S3's claims are judged: by which way accuracy goes, and by a margin that is stated.
_KEPT_MARGIN = 0.02
"""A loss of accuracy that does not count: a choice, less than a tenth of what the paper's ResNet loses."""
_MARGIN = f"{100 * _KEPT_MARGIN:g} points"
_TEST = (
    "The change is taken within every seed; how far it varies over seeds is taken to be the same in all conditions and "
    "estimated by one fit to all runs, since a condition has few seeds."
)
_LOSES = (
    f"*Loses.* {_TEST} Student's t, two-sided: accuracy falls, or rises. Networks here train for few epochs, so the "
    "size is not compared."
)
_ABOVE = f"is above −{_MARGIN}, by a one-sided t test. Contradicted: it is shown to be below."
_KEEPS = (
    f"*Keeps.* {_TEST} Up to {_MARGIN} of accuracy may be lost: a margin of our choice, less than a tenth of what the "
    f"paper's ResNet loses. Shown: the change {_ABOVE}"
)
_AS_LITTLE = (
    f"*As little.* {_TEST} Up to {_MARGIN} may be lost beyond what the other network loses. Shown: the difference of "
    f"the two changes {_ABOVE}"
)


def _judge_kept(quantity: _Quantity, network: str, tiles: str, results: StudyResults) -> Finding:
    """That no more than the margin is lost or, of `_EXCESS`, no more beyond the ViT's loss."""
    about = results, network, tiles
    return judge_within(quantity.mean(*about), -_KEPT_MARGIN, INFINITE, words=quantity.words(*about))


def _judge_lost(quantity: _Quantity, network: str, tiles: str, results: StudyResults) -> Finding:
    about = results, network, tiles
    return judge_sign(quantity.mean(*about), sign=-1, words=quantity.words(*about))


def _claims_about(tiles: str, size: str, networks: Mapping[str, str]) -> tuple[Claim, ...]:
    """Of networks with convolutions, by what they are called."""
    claim = partial(Claim, source="S3, permuted CIFAR-100")
    vit = CURVES[VIT]
    # Its curves also have a point at 4×4 tiles, but only their ends are known to us.
    over = f"from {_FIRST_TILES}×{_FIRST_TILES} to {_LAST_TILES}×{_LAST_TILES} tiles"
    return (
        claim(
            id=f"vit-{tiles}",
            text=f"A ViT keeps its accuracy under a fixed shuffling of {size}",
            paper=f"stays near {100 * vit.first:.0f} % {over}",
            rule=_KEEPS,
            judge=partial(_judge_kept, _CHANGE, VIT, tiles),
        ),
        *(
            part
            for network, name in networks.items()
            for part in (
                claim(
                    id=f"{name.lower()}-{tiles}",
                    text=f"A {name} loses accuracy under a fixed shuffling of {size}",
                    paper=f"{CURVES[network].ends} {over}",
                    rule=_LOSES,
                    judge=partial(_judge_lost, _CHANGE, network, tiles),
                ),
                claim(
                    id=f"{name.lower()}-beside-vit-{tiles}",
                    text=f"A {name} loses more than a ViT under a fixed shuffling of {size}",
                    paper=f"{rounded(100 * CURVES[network].change, 0, signed=True)} and about "
                    f"{100 * vit.change:.0f} points {over}",
                    rule=_LOSES,
                    judge=partial(_judge_lost, _EXCESS, network, tiles),
                ),
            )
        ),
    )


def _question_about(tiles: str, size: str) -> Claim:
    return Claim(
        id=f"positional-{tiles}",
        text=f"Does positional attention lose as little as the usual one under a fixed shuffling of {size}?",
        source=OURS,
        rule=_AS_LITTLE,
        judge=partial(_judge_kept, _EXCESS, POSITIONAL_VIT, tiles),
    )


def permutation_table(results: StudyResults) -> Table:
    """A row per network and number of tiles: accuracy, what shuffling changes, and how much more than in the ViT."""
    points: dict[str, Any] = {"scale": 100, "digits": 2}
    rows = []
    for network, tiles in product(results.factors["model"], results.factors["tiles"]):
        accuracy = _ACCURACY.mean(results, network, tiles)
        if not accuracy.n:
            continue
        change = excess = mean_interval([])
        with suppress(InputError):  # no seed has both runs
            if tiles != _UNSHUFFLED:
                change = _CHANGE.mean(results, network, tiles)
                excess = _EXCESS.mean(results, network, tiles) if network != VIT else excess
        papers, papers_change = _papers(network, tiles)
        row = Row(network=network, tiles=tiles, seeds=accuracy.n).keep(scale=results.scale)
        row.interval("test_acc", accuracy, "test accuracy, %", **points)
        row.show("paper's accuracy", _whole(papers))
        row.interval("change", change, f"change from {_UNSHUFFLED}, points", **points, signed=True)
        row.show("paper's change", _whole(papers_change, signed=True))
        row.interval("change_beyond_vit", excess, f"change beyond that of {VIT}, points", **points, signed=True)
        rows.append(row.keep(paper_test_acc=papers, paper_change=papers_change))
    if not rows:
        raise InputError("none of its networks has a run yet")
    first, last = f"{_FIRST_TILES}×{_FIRST_TILES}", f"{_LAST_TILES}×{_LAST_TILES}"
    notes = (
        f"{_POOLED} The table of conditions takes each by itself, which few seeds hardly allow.",
        "Changes are taken within seeds, of those that have both runs.",
        f"The paper's numbers are the ends of its curves, read off: {first} tiles, compared here with "
        f"{_UNSHUFFLED}, and {last}. How long its networks trained is not "
        "known to us; ours train for few epochs, so that the sign of a change can be compared, its size cannot."
        + f" Its third network, VGG, goes from {CURVES[_VGG].ends}."
        * (_VGG not in results.factors["model"]),
        f"{_PIXELS} tiles are single pixels, finer than patches: there heads have no distances to measure.",
        *missing_notes(results),
    )
    title = f"{results.name}: what a fixed shuffling of tiles costs each network"
    return Table.of("permutation", title, rows, notes=notes)


def _papers(network: str, tiles: str) -> tuple[float | None, float | None]:
    """Its accuracy and its change, where its curve has an end there."""
    curve = CURVES.get(network)
    if curve is None:
        return None, None
    if _num_tiles(tiles) == _LAST_TILES:
        return curve.last, curve.change
    return (curve.first if tiles == _UNSHUFFLED else None), None


def _whole(papers: float | None, *, signed: bool = False) -> str:
    """As exact as what was read off a figure."""
    return rounded(None if papers is None else 100 * papers, 0, signed=signed)


# The factor by which curves are moved apart, so that neither hides another's intervals; by half of it (a root) the
# seeds stand beside their mean. The paper's stand beside all of them.
_APART, _PAPERS_APART = 1.22, 1.5
# Of the height that the seeds take up: the space around them. Intervals that need more are cut off.
_AROUND = 0.12


def permutation_curves(results: StudyResults) -> Drawing:
    """Three panels: our accuracy; on its scale the ends of the paper's curves; and the change within seeds of both."""
    networks = [name for name in results.factors["model"] if name in set(results.runs["model"])]
    if not networks:
        raise InputError("none of its networks has a run yet")
    paper_tiles = [_FIRST_TILES, _LAST_TILES]
    with house_style():
        figure = Figure(figsize=(9.4, 3.5), layout="constrained")
        ours, papers, changes = figure.subplots(1, 3, width_ratios=(1.3, 0.8, 1.3))
        heights = _draw_ours(ours, results, networks, _ACCURACY, "accuracy")
        for network, curve in CURVES.items():
            heights += [100 * curve.first, 100 * curve.last]
            papers.plot(paper_tiles, heights[-2:], **_line(network, is_ours=False), gid=f"paper-{network}")
        low, high = with_room(heights, _AROUND, 1.0)
        for panel in (ours, papers):
            panel.set_ylim(max(low, 0.0), min(high, 100.0))
        drops = _draw_ours(changes, results, networks, _CHANGE, "change")
        for network, curve in CURVES.items():
            point = {**_line(network, is_ours=False), "linestyle": "none"}
            # Next to the intervals, where it hides none.
            changes.plot([_LAST_TILES * _PAPERS_APART], [100 * curve.change], **point, gid=f"paper-change-{network}")
            drops.append(100 * curve.change)
        changes.axhline(0.0, color=MUTED, linewidth=0.9, zorder=1)
        changes.set_ylim(*with_room([0.0, *drops], _AROUND, 1.0))
        numbers = [_num_tiles(level) for level in results.factors["tiles"]]
        _finish(ours, numbers, "ours: test accuracy, %")
        _finish(papers, paper_tiles, "the paper's, %")
        _finish(changes, numbers, f"change from {_UNSHUFFLED}, points")
        shown = [name for name in _NETWORKS if name in networks or name in CURVES]
        names = [name if name in networks else f"{name} (the paper's)" for name in shown]
        lines = (_line(name, is_ours=name in networks) for name in shown)
        legend_above(figure, dict(zip(names, lines, strict=True)))
    counts = results.runs.groupby(["model", "tiles"])["seed"].nunique()
    bars = "bands: their range; bars: 95 % intervals, with the spread over seeds estimated from all conditions"
    words = f"Filled: ours, mean over {seeds_in_words(counts)}{dots_and_bars(counts, bars)}. "
    words += "Changes are taken within seeds."
    about = (
        f"Hollow: the paper's, the ends of its curves, read off; its changes are from {_FIRST_TILES} tiles along a "
        "side. Ours trained for few epochs: compare how curves fall, not how high they lie."
    )
    add_footnote(figure, [words, about, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Test accuracy against the number of tiles along a side that all images are cut into, where one fixed "
        f"permutation shuffles them; 1 is the image itself, {_LAST_TILES} its single pixels. Right: the change that "
        f"shuffling makes. {words} {about}",
    )


def _line(network: str, *, is_ours: bool) -> dict[str, Any]:
    style = looks([*dict.fromkeys((*_NETWORKS, network))])[network]
    hollow = {"markerfacecolor": "white", "markeredgecolor": style.colour, "markeredgewidth": 1.3, "linewidth": 1.0}
    return style.look_with(markersize=6, **({**WHITE_EDGE, "linewidth": 1.6} if is_ours else hollow))


def _draw_ours(
    panel: Axes, results: StudyResults, networks: Sequence[str], quantity: _Quantity, name: str
) -> list[float]:
    """A curve per network with its seeds and, of enough of them, their band and an interval at each point; the values
    of all seeds, in per cent or points."""
    drawn: list[float] = []
    for place, network in enumerate(networks):
        apart, line = _APART ** (place - (len(networks) - 1) / 2), _line(network, is_ours=True)
        numbers, means, seeds = [], [], []
        for level in results.factors["tiles"]:
            try:
                values = [100 * float(value) for value in quantity.by_seed(results, network, level)]
            except InputError:
                continue
            if not values:
                continue
            mean = quantity.mean(results, network, level)
            numbers.append(_num_tiles(level) * apart)
            means.append(100 * mean.value)
            seeds.append(values)
            drawn += values
            has_interval = mean.has_interval and len(values) >= FEWEST
            if has_interval and any(values):  # the change from nothing to nothing is exact
                ends, gid = [100 * mean.low, 100 * mean.high], f"interval-{name}-{network}-{level}"
                panel.plot([numbers[-1]] * 2, ends, color=line["color"], linewidth=1.2, gid=gid)
        beside = [number * _APART**0.5 for number in numbers]
        draw_seeds(panel, beside, seeds, line["color"], f"seeds-{name}-{network}")
        if min(map(len, seeds), default=0) >= FEWEST:
            band = {"color": line["color"], "alpha": 0.2, "linewidth": 0, "gid": f"band-{name}-{network}"}
            panel.fill_between(numbers, [min(values) for values in seeds], [max(values) for values in seeds], **band)
        panel.plot(numbers, means, **line, zorder=3, gid=f"{name}-{network}")
    return drawn


def _finish(panel: Axes, numbers: Sequence[int], title: str) -> None:
    light_grid(panel, "y")
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers])
    panel.minorticks_off()
    panel.set_xlim(min(numbers) / 1.5, max(numbers) * 1.7)
    panel.set_xlabel("tiles along a side")
    panel.set_title(title)


_SIZES = {_LARGE_TILES: f"tiles larger than a patch ({_LARGE_TILES})", _PIXELS: f"single pixels ({_PIXELS})"}
"""Tiles → in words."""
# "All factors on" is another network on other images; all four conditions with heads are in Figure 5.
_OF_ENDS = frozenset({"figure-1-profiles", "figure-2-plane", "figure-3-heatmaps"})
for _name, _convolutional in (
    ("permuted-cifar100", {_RESNET: "ResNet"}),
    ("permuted-tilings-cifar100", {_RESNET: "ResNet", _VGG: "VGG"}),
):
    report_on(
        _name,
        paper=PAPER,
        claims=[
            *(claim for size in _SIZES.items() for claim in _claims_about(*size, _convolutional)),
            *(_question_about(*size) for size in _SIZES.items()),
        ],
        intervals=_POOLED,
        without=OF_PROTOCOLS | _OF_ENDS,
        tables=(permutation_table,),
        figures={"permutation-curves": permutation_curves},
    )
