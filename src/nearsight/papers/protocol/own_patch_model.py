"""The most local head as a model: a share on the query's own patch, and the rest everywhere or next to it.

Its MAD alone then says its entropy. S1 reports both of its most local and most focused heads, and our runs have both of
every head: so the two ways to leak can be told apart without the attention maps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from nearsight.errors import InputError
from nearsight.metrics import OwnPatchHead, least_share_on_itself, own_patch_head, uniform_attention_distance
from nearsight.metrics.own_patch import Leak
from nearsight.papers.protocol import numbers as s1
from nearsight.papers.protocol.links import CUTMIX, groups
from nearsight.report.conditions import level_looks, missing_notes, noted, ordered_conditions
from nearsight.report.figures.style import DISTANCE_LABEL_ONE_LINE, ENTROPY_LABEL, INK, MUTED, house_style, light_grid
from nearsight.report.marks import WHITE_EDGE, Drawing, legend_above
from nearsight.report.own_patch import OWN_PATCH, grid_of, own_patch_bound, own_patch_heads
from nearsight.report.tables import MISSING, Row, Table, records, rounded, share
from nearsight.study.results import StudyResults

OURS, PAPER = "ours", "the paper's"
_ONE_HEAD = (
    "The paper gives the smallest MAD and the smallest entropy of a model; that both are of one head is an assumption."
)
_UNKNOWN = float("nan")


class Pair(NamedTuple):
    """MAD and entropy of an own-patch head."""

    whose: str
    condition: str
    distance: float
    entropy: float
    grid: tuple[int, int]
    seed: int | None = None
    layer: int | None = None
    """From 0."""
    measured: float = _UNKNOWN
    """The share of attention on the query's own patch, CLS counted too."""
    next_distance: float = _UNKNOWN
    """MAD of the run's most local head after it."""
    is_most_focused: bool | None = None
    """Whether no head of its run has a smaller entropy."""

    @property
    def everywhere(self) -> OwnPatchHead:
        return own_patch_head(self.distance, self.grid, leak="everywhere")

    @property
    def to_neighbours(self) -> OwnPatchHead:
        return own_patch_head(self.distance, self.grid, leak="to neighbours")

    @property
    def is_closer_to_everywhere(self) -> bool:
        far, near = (abs(self.entropy - head.entropy) for head in (self.everywhere, self.to_neighbours))
        return far < near


def own_patch_pairs(results: StudyResults) -> list[Pair]:
    """Those of the paper's conditions, then those of our runs. None at all is an `InputError`."""
    pairs = [*_of_paper(results), *_of_runs(results)]
    if not pairs:
        raise InputError("neither the paper nor a run has an own-patch head")
    return pairs


def _of_paper(results: StudyResults) -> Iterator[Pair]:
    bound, grid = own_patch_bound(results), (s1.SIDE, s1.SIDE)
    published = s1.PUBLISHED[results.name].conditions if results.name in s1.PUBLISHED else {}
    for label, row in published.items():
        if row.min_mad is not None and row.min_entropy is not None and row.min_mad < bound:
            yield Pair(PAPER, label, row.min_mad, row.min_entropy, grid)


def _of_runs(results: StudyResults) -> Iterator[Pair]:
    grid = grid_of(results)
    turned = own_patch_heads(results).merge(results.runs, on="run").sort_values(["seed", "mad"])
    for label in ordered_conditions(results):
        for row in records(turned[turned["condition"] == label]):
            of_run = results.heads[results.heads["run"] == row["run"]]
            is_first = row["mad"] == of_run["mad"].min()
            # A run says the largest share that any of its heads has.
            measured = row.get("max_share_self", _UNKNOWN) if is_first else _UNKNOWN
            farther = of_run.loc[of_run["mad"] > row["mad"], "mad"]
            yield Pair(
                *(OURS, label, row["mad"], row["entropy"], grid),
                seed=int(row["seed"]),
                layer=int(row["layer"]),
                measured=measured,
                next_distance=float(farther.min()),
                is_most_focused=bool(row["entropy"] == of_run["entropy"].min()),
            )


def own_patch_model(results: StudyResults) -> Table:
    """A row per own-patch head, the paper's and ours: MAD and entropy, and what either leak predicts."""
    pairs, rows = own_patch_pairs(results), []
    for pair in pairs:
        far, near = pair.everywhere, pair.to_neighbours
        of_run = MISSING if pair.seed is None or pair.layer is None else f"seed {pair.seed}, L{pair.layer}"
        least = least_share_on_itself(pair.distance, pair.grid)
        digits = 3 if pair.whose == PAPER else 4  # as many as it gives; ours need them
        row = Row(whose=pair.whose, condition=pair.condition).show("head", of_run)
        row.keep(seed=pd.NA if pair.seed is None else pair.seed, layer=pd.NA if pair.layer is None else pair.layer)
        row.both("mad", pair.distance, "MAD", rounded(pair.distance, digits))
        row.both("next_mad", pair.next_distance, "MAD of the next head", rounded(pair.next_distance))
        row.both("least_share", least, "its own patch gets, at least", _per_cent(least))
        row.both("share_everywhere", far.share, "if the rest is uniform", _per_cent(far.share))
        row.both("share_measured", pair.measured, "measured", _per_cent(pair.measured))
        row.both("entropy", pair.entropy, "entropy", rounded(pair.entropy, digits))
        for name, head, where in (("everywhere", far, "uniform"), ("to_neighbours", near, "on 4 neighbours")):
            row.both(f"entropy_{name}", head.entropy, f"predicted, rest {where}", rounded(head.entropy, digits))
        rows.append(row.keep(scale=results.scale))
    notes = (
        "Layers count from 0.",
        f"Heads whose distance is below {share(OWN_PATCH)} of that to the next patch. The model: every query keeps one "
        "share of its attention on patches to itself, and the rest goes evenly to all other patches (uniform), or "
        "evenly to the neighbours above, below, left and right. The MAD fixes that share, and so the entropy.",
        f"{_closer_in_words(pairs)} {_one_head_in_words(pairs)}",
        "At least: with the rest on the nearest patches. Measured: the largest share of a run that a head spends on "
        "the query's own patch, CLS counted too, where the run says it. The next head: the run's most local after it.",
        *missing_notes(results),
    )
    title = f"{results.name}: what the most local heads do with the rest of their attention"
    return Table.of("own-patch-model", title, rows, notes=notes)


def _per_cent(value: float) -> str:
    return MISSING if math.isnan(value) else f"{100 * value:.1f} %"


def _closer_in_words(pairs: Sequence[Pair]) -> str:
    closer = sum(pair.is_closer_to_everywhere for pair in pairs)
    than = "than to that of a rest on the neighbours"
    return f"{closer} of {len(pairs)} entropies are closer to the prediction of a uniform rest {than}."


def _one_head_in_words(pairs: Sequence[Pair]) -> str:
    if all(pair.whose == OURS for pair in pairs):
        return ""
    known = [pair.is_most_focused for pair in pairs if pair.is_most_focused is not None]
    ours = f" Of ours, {sum(known)} of {len(known)} have the smallest entropy of their run." if known else ""
    return f"{_ONE_HEAD}{ours}"


# Marks of the figure: the paper's, and where the curve of a uniform rest says the share on the own patch.
_HOLLOW: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 8, "markerfacecolor": "none", "linestyle": "none"}
_SHARES = (0.99, 0.95, 0.8, 0.5)
_CURVES: Mapping[Leak, tuple[Any, str, dict[str, Any]]] = {
    "everywhere": ("solid", "the rest\nuniform", {"xytext": (24, -14), "ha": "left", "va": "top"}),
    "to neighbours": ((0, (5, 2)), "the rest on\n4 neighbours", {"xytext": (-6, 4), "ha": "right", "va": "bottom"}),
}
"""Its dash, its name, and where that stands."""


def entropy_by_distance(results: StudyResults) -> Drawing:
    """Entropy over MAD on logarithmic scales: the two curves, the paper's pairs, our own-patch heads, other heads."""
    pairs, bound = own_patch_pairs(results), own_patch_bound(results)
    papers = [pair for pair in pairs if pair.whose == PAPER]
    styles = level_looks(CUTMIX, results.factors[CUTMIX])
    heads = results.heads.dropna(subset=["mad", "entropy"]).merge(results.runs[["run", CUTMIX]], on="run")
    with house_style():
        figure = Figure(figsize=(6.2, 4.4), layout="constrained")
        axes = figure.subplots()
        for level, here in heads.groupby(CUTMIX):
            style, is_own = styles[str(level)], here["mad"] < bound
            small = style.look_with(linestyle="none", markersize=2.2, markeredgewidth=0, alpha=0.25)
            large = style.look_with(linestyle="none", markersize=6.5, zorder=4, **WHITE_EDGE)
            for name, some, look in (("others", ~is_own, small), ("own", is_own, large)):
                axes.plot(here.loc[some, "mad"], here.loc[some, "entropy"], **look, gid=f"{name}-{level}")
        axes.plot([pair.distance for pair in papers], [pair.entropy for pair in papers], **_HOLLOW, gid="paper")
        _set_scales(axes, pairs)
        _draw_curves(axes, grid_of(results))
        light_grid(axes)
        axes.set_xlabel(DISTANCE_LABEL_ONE_LINE)
        axes.set_ylabel(ENTROPY_LABEL)
        looks = {
            f"ours, {words}": styles[level].look_with(linestyle="none", markersize=6)
            for level, words in reversed(groups(results).items())
        }
        legend_above(figure, {**looks, **({"the paper's smallest MAD and entropy": _HOLLOW} if papers else {})})
    words = (
        "Large: own-patch heads; small: all other heads, of all seeds. Curves: predicted from the MAD; per cent: what "
        "the query's own patch gets."
    )
    caption = (
        "Entropy and mean attention distance of the most local heads, the paper's and ours, and of a head that keeps "
        "one share of its attention on the query's own patch and spreads the rest evenly over all other patches "
        f"(solid) or over the four next to it (dashed). {_closer_in_words(pairs)} {_one_head_in_words(pairs)}"
    )
    return noted(figure, results, caption.strip(), words)


def _set_scales(axes: Axes, pairs: Sequence[Pair]) -> None:
    """Logarithmic, so that a head at 0.002 and one at 0.4 are both seen."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.6 * min((pair.distance for pair in pairs if pair.distance > 0), default=0.01), 0.8)
    axes.set_ylim(0.6 * min((pair.entropy for pair in pairs if pair.entropy > 0), default=0.01), 1.4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _draw_curves(axes: Axes, grid: tuple[int, int]) -> None:
    uniform, num_patches = uniform_attention_distance(grid), math.prod(grid)
    distances = np.geomspace(axes.get_xlim()[0], uniform, 200).tolist()
    middle = len(distances) // 3
    for leak, (dash, words, beside) in _CURVES.items():
        entropies = [own_patch_head(distance, grid, leak=leak).entropy for distance in distances]
        axes.plot(distances, entropies, color=INK, linewidth=1.2, linestyle=dash, zorder=3, gid=f"curve-{leak}")
        place = (distances[middle], entropies[middle])
        axes.annotate(words, place, **beside, textcoords="offset points", fontsize=8, color=INK)
    for kept in _SHARES:
        distance = (1 - kept) * uniform * num_patches / (num_patches - 1)
        if distance < axes.get_xlim()[0]:
            continue
        place = (distance, own_patch_head(distance, grid, leak="everywhere").entropy)
        axes.plot(*place, marker="|", color=INK, markersize=7, zorder=3)
        axes.annotate(share(kept), place, xytext=(4, -9), textcoords="offset points", fontsize=7.5, color=MUTED)
