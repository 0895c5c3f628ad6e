"""CutMix with and without GAug: lines that are parallel where neither changes what the other does."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.report.figures.style import MUTED, add_legend, house_style, light_grid, model_style
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.locat.cutmix import CUTMIX, GAUG, PRR, cutmix_runs
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

PANELS = {
    "min_mad": "MAD of the most local head",
    "mean_mad": "mean MAD over all heads",
    "test_acc": "test accuracy, %",
}
# In units of the distance between the two places on the axis: how far the lines' ends stand apart, where the runs begin
# outside of them, where no line passes, and how far the runs of one line stand from those of the other.
APART, OUTSIDE, STEP = 0.03, 0.11, 0.08


def interaction(results: StudyResults) -> Drawing:
    """Per response: without and with GAug, a line without CutMix and one with it, over all their runs."""
    runs = cutmix_runs(results)
    if any(runs[factor].nunique() < 2 for factor in (CUTMIX, GAUG)):
        raise InputError("it compares runs with and without CutMix, with and without GAug, and some have no run yet")
    with house_style():
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        for panel, (column, title) in zip(panels, PANELS.items(), strict=True):
            scale = 100 if column == "test_acc" else 1
            for place, level in enumerate(results.factors[CUTMIX]):
                _draw_line(panel, runs[runs[CUTMIX] == level], results.factors, column, place, scale)
            panel.set_title(title)
            panel.set_xticks([0, 1], ["without GAug", "with GAug"])
            panel.set_xlim(-0.35, 1.35)
            light_grid(panel, "y")
        _add_legend(figure)
    seeds = seeds_in_words(runs.groupby("condition")["seed"].nunique())
    lines = f"Lines: means over all runs ({seeds} per model); bars: their 95 % intervals; small markers: single runs."
    add_footnote(figure, [lines, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"What CutMix does without GAug and with it; parallel lines would mean that neither changes what the "
        f"other does. {lines}",
    )


def _draw_line(
    panel: Axes, runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], column: str, place: int, scale: float
) -> None:
    style = model_style(place)
    across, means = [], []
    for middle, level in enumerate(factors[GAUG]):
        here = runs[runs[GAUG] == level].dropna(subset=[column])
        if here.empty:
            continue
        interval = mean_interval(scale * here[column])
        across.append(middle + (APART if place else -APART))
        means.append(interval.mean)
        if interval.has_interval:
            panel.plot(
                [across[-1]] * 2,
                [interval.low, interval.high],
                color=style.colour,
                linewidth=4,
                alpha=0.35,
                gid="interval",
            )
        aside = OUTSIDE + STEP * place
        for prr in factors[PRR]:
            values = scale * here.loc[here[PRR] == prr, column]
            look: dict[str, Any] = {"markerfacecolor": "none"} if prr == factors[PRR][0] else {}
            panel.plot(
                [middle + aside if middle else -aside] * len(values),
                values,
                marker=style.marker,
                markersize=4,
                color=style.colour,
                linestyle="none",
                **look,
            )
    panel.plot(
        across,
        means,
        color=style.colour,
        linestyle=style.dash,
        marker=style.marker,
        markersize=7,
        linewidth=1.6,
        gid=f"{column}-{place}",
    )


def _add_legend(figure: Figure) -> None:
    handles, names = [], []
    for place, name in enumerate(("without CutMix", "with CutMix")):
        style = model_style(place)
        handles.append(Line2D([], [], color=style.colour, linestyle=style.dash, marker=style.marker, markersize=7))
        names.append(name)
    for face, name in (("none", "a run without PRR"), (MUTED, "a run with PRR")):
        handles.append(Line2D([], [], color=MUTED, marker="o", markersize=4, linestyle="none", markerfacecolor=face))
        names.append(name)
    add_legend(figure, handles, names, loc="outside upper left", ncols=len(names))
