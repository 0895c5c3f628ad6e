"""CutMix in ViT, with each part of LocAt and with both: lines that are parallel where neither changes the other."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.report.figures.style import add_legend, house_style, light_grid, model_style
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.least_squares import LeastSquares
from nearsight.report.study.locat.cutmix import CUTMIX, GAUG, PRR, cutmix_runs
from nearsight.report.study.locat.interaction import cell_means, cell_name
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults

PANELS = {
    "min_mad": "MAD of the most local head",
    "mean_mad": "mean MAD over all heads",
    "test_acc": "test accuracy, %",
}
APART = 0.12
"""How far without and with CutMix stand from the middle of their place, in units of the distance between places."""


def interaction(results: StudyResults) -> Drawing:
    """Per response: the four models from ViT to LocAt, a line without CutMix and one with it."""
    runs = cutmix_runs(results)
    if any(runs[factor].nunique() < 2 for factor in (CUTMIX, GAUG)):
        raise InputError("it compares runs with and without CutMix, with and without GAug, and some have no run yet")
    with house_style():
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        models = _models(results.factors)
        for panel, (column, title) in zip(panels, PANELS.items(), strict=True):
            known = runs.dropna(subset=[column])
            fitted = cell_means(known, results.factors, column)
            for place in range(len(results.factors[CUTMIX])):
                _draw_line(panel, known, results.factors, fitted, column, place)
            panel.set_title(title)
            panel.set_xticks(range(len(models)), list(models))
            panel.set_xlim(-0.4, len(models) - 0.6)
            light_grid(panel, "y")
        _add_legend(figure)
    seeds = seeds_in_words(runs.groupby("condition")["seed"].nunique())
    lines = (
        f"Lines: means over {seeds}; small markers: single runs; bars: 95 % intervals, the noise taken from all runs."
    )
    add_footnote(figure, [lines, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"What CutMix does in each model; parallel lines would mean that neither CutMix nor LocAt's parts "
        f"change what the other does. {lines}",
    )


def _models(factors: dict[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """Name → its levels of GAug and PRR."""
    gaug, prr = factors[GAUG], factors[PRR]
    return {
        "ViT": {GAUG: gaug[0], PRR: prr[0]},
        "+PRR": {GAUG: gaug[0], PRR: prr[-1]},
        "+GAug": {GAUG: gaug[-1], PRR: prr[0]},
        "LocAt": {GAUG: gaug[-1], PRR: prr[-1]},
    }


def _draw_line(
    panel: Axes,
    runs: pd.DataFrame,
    factors: dict[str, tuple[str, ...]],
    fitted: LeastSquares,
    column: str,
    place: int,
) -> None:
    style = model_style(place)
    scale = 100 if column == "test_acc" else 1
    across, means = [], []
    for middle, model in enumerate(_models(factors).values()):
        levels = {**model, CUTMIX: factors[CUTMIX][place]}
        here = runs[(runs[list(levels)] == pd.Series(levels)).all(axis=1)]
        if here.empty:
            continue
        estimate = fitted.estimate({cell_name(levels[name] for name in factors): 1.0})
        across.append(middle + (APART if place else -APART))
        means.append(scale * estimate.value)
        if estimate.has_interval:
            ends = [scale * estimate.low, scale * estimate.high]
            panel.plot([across[-1]] * 2, ends, color=style.colour, linewidth=4, alpha=0.35, gid="interval")
        values = scale * here[column]
        panel.plot(
            [across[-1] + (APART if place else -APART)] * len(values),
            values,
            marker=style.marker,
            markersize=3,
            color=style.colour,
            linestyle="none",
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
    add_legend(figure, handles, names, loc="outside upper left", ncols=len(names))
