"""Every head of every condition by its distance, so that one head does not stand for its model."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.metrics import next_patch_distance, uniform_attention_distance
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    GRID,
    INK,
    MUTED,
    ModelStyle,
    add_legend,
    depth_of,
    draw_uniform_line,
    house_style,
    light_grid,
    shade,
)
from nearsight.report.study.by_cutmix import CUTMIX, groups
from nearsight.report.study.drawing import Drawing, distances_from_zero, level_styles
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes
from nearsight.report.study.own_patch.heads import HEADS, grid_of, own_patch_bound, with_own_patch
from nearsight.report.study.table import rounded
from nearsight.study.results import StudyResults

# Of a row's height: what its layers take up, from the first above to the last below.
SPREAD = 0.62


def every_head(results: StudyResults) -> Drawing:
    """A row per condition, the nearest on top, with a mark per head of all its seeds."""
    runs, bound = with_own_patch(results), own_patch_bound(results)
    heads = results.heads.dropna(subset=["mad"]).merge(runs[["run", "condition", CUTMIX]], on="run")
    labels = list(runs.groupby("condition")["min_mad"].mean().sort_values().index)
    styles = level_styles(results.factors[CUTMIX])
    with house_style():
        figure = Figure(figsize=(7.2, 1.6 + 0.5 * len(labels)), layout="constrained")
        axes = figure.subplots()
        _draw_landmarks(axes, grid_of(results), bound)
        for place, label in enumerate(labels):
            here = heads[heads["condition"] == label]
            _draw_row(axes, place, here, styles[str(here[CUTMIX].iloc[0])])
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.set_ylim(len(labels) - 0.5, -0.85)
        distances_from_zero(axes, float(heads["mad"].max()))
        light_grid(axes, "x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(DISTANCE_LABEL_ONE_LINE)
        named = {level: words for level, words in reversed(groups(results).items()) if level in set(runs[CUTMIX])}
        handles = [
            Line2D([], [], color=styles[level].colour, marker=styles[level].marker, markersize=6, linestyle="none")
            for level in named
        ]
        add_legend(figure, handles, list(named.values()), loc="outside upper left", ncols=2, handlelength=1)
    having = int((runs[HEADS] > 0).sum())
    told = (
        "A mark per head, of all seeds; in a row the first layer is on top. Shaded: below "
        f"{rounded(bound)}, half of the distance to the next patch, a head spends more on its own patch than on "
        f"all others: in {having} of {len(runs)} runs."
    )
    add_footnote(figure, [told, *missing_notes(results), *scale_notes(results)])
    return Drawing(figure=figure, caption=f"The mean attention distance of every head, by condition. {told}")


def _draw_row(axes: Axes, place: int, heads: pd.DataFrame, style: ModelStyle) -> None:
    layers = sorted(set(heads["layer"]))
    for layer in layers:
        mad, depth = heads.loc[heads["layer"] == layer, "mad"], depth_of(layer, layers)
        axes.plot(
            mad,
            [place + SPREAD * (depth - 0.5)] * len(mad),
            color=shade(style.colour, depth),
            marker=style.marker,
            markersize=3.2,
            markeredgewidth=0,
            linestyle="none",
            alpha=0.7,  # heads that lie on one another show through
            gid=f"heads-{heads['condition'].iloc[0]}-{layer}",
        )


def _draw_landmarks(axes: Axes, grid: tuple[int, int], bound: float) -> None:
    """What the distances of this grid mean: the patch itself, the next one, everywhere alike."""
    step, uniform = next_patch_distance(grid), uniform_attention_distance(grid)
    axes.axvspan(0, bound, facecolor=GRID, alpha=0.8, linewidth=0, zorder=0, gid="own-patch")
    axes.axvline(step, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1, gid="next-patch")
    draw_uniform_line(axes, uniform, horizontal=False, gid="uniform")
    beside = {"own patch": (0.0, "left"), "next patch": (step, "left"), "uniform": (uniform, "right")}
    for words, (x, side_of_text) in beside.items():
        axes.annotate(
            words,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if side_of_text == "right" else 3, -2),
            textcoords="offset points",
            ha=side_of_text,
            va="top",
            fontsize=8,
            color=MUTED,
        )
