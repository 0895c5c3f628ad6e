"""Distance against width and against depth, with and without CutMix, on all images and on a quarter of them."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from nearsight.report.figures.style import add_legend, house_style, light_grid, model_style
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, scale_notes, seeds_in_words
from nearsight.report.study.responses import EARLY, with_early_layers
from nearsight.report.study.size.fit import DOUBLINGS
from nearsight.study.results import StudyResults

ROWS = {EARLY: "MAD of the early layers,\nmean over heads", "min_mad": "MAD of the\nmost local head"}


def distance_by_size(results: StudyResults) -> Drawing:
    """Two rows (early layers, most local head), a column per way to grow."""
    runs = with_early_layers(results)
    lines = _lines(results, runs)
    with house_style():
        figure = Figure(figsize=(7.2, 5.2), layout=ConstrainedLayoutEngine(wspace=0.05, hspace=0.05))
        panels = figure.subplots(len(ROWS), len(DOUBLINGS), sharey="row", sharex="col", squeeze=False)
        for (response, title), row in zip(ROWS.items(), panels, strict=True):
            for growing, panel in zip(DOUBLINGS, row, strict=True):
                others = [name for name in DOUBLINGS if name != growing]
                at_base = runs[(runs[others] == [results.factors[name][0] for name in others]).all(axis=1)]
                for cutmix, images in lines:
                    here = at_base[(at_base["cutmix"] == cutmix) & (at_base["images"] == images)]
                    look = _look(results, cutmix, images)
                    _draw_line(panel, here, growing, response, look, f"{cutmix}-{images}")
                _finish(panel, results, growing)
            row[0].set_ylabel(title)
        for growing, panel in zip(DOUBLINGS, panels[-1], strict=True):
            panel.set_xlabel(growing)
        _add_legend(figure, results, lines)
    seeds = seeds_in_words(runs.groupby("condition")["seed"].nunique())
    add_footnote(figure, [f"{seeds[0].upper()}{seeds[1:]} per point.", *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Mean attention distance of the early layers' heads (top) and of the most local head (bottom) against "
        "width at S1's depth (left) and depth at S1's width (right), by CutMix and by the number of training images. "
        f"{seeds[0].upper()}{seeds[1:]} per point.",
    )


def _lines(results: StudyResults, runs: pd.DataFrame) -> list[tuple[str, str]]:
    """The combinations of CutMix and images that have runs."""
    found = set(zip(runs["cutmix"], runs["images"], strict=True))
    combinations = ((cutmix, images) for images in results.factors["images"] for cutmix in results.factors["cutmix"])
    return [each for each in combinations if each in found]


def _draw_line(panel: Axes, runs: pd.DataFrame, growing: str, response: str, look: dict[str, Any], name: str) -> None:
    if runs.empty:
        return
    means = runs.assign(size=runs[growing].astype(float)).groupby("size")[response].mean()
    panel.plot(means.index, means, **look, gid=f"{response}-{growing}-{name}")


def _look(results: StudyResults, cutmix: str, images: str) -> dict[str, Any]:
    """Colour and marker by CutMix, dash and filling by images."""
    level, is_all = results.factors["cutmix"].index(cutmix), images == results.factors["images"][0]
    style = model_style({0: 1, 1: 0}.get(level, level))  # without CutMix it is the second everywhere
    return {
        "color": style.colour,
        "linestyle": model_style(0 if is_all else 1).dash,
        "marker": style.marker,
        "markersize": 6,
        "linewidth": 1.5,
        "markerfacecolor": style.colour if is_all else "white",
    }


def _finish(panel: Axes, results: StudyResults, growing: str) -> None:
    light_grid(panel)
    sizes = sorted(int(level) for level in results.factors[growing])
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()


def _add_legend(figure: Figure, results: StudyResults, lines: list[tuple[str, str]]) -> None:
    off = results.factors["cutmix"][0]
    handles = [Line2D([], [], **_look(results, *line)) for line in lines]
    names = [
        f"{'without CutMix' if cutmix == off else f'CutMix {cutmix}'}, images: {images}" for cutmix, images in lines
    ]
    add_legend(figure, handles, names, loc="outside upper left", ncols=len(results.factors["images"]))
