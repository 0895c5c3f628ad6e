"""Figure 1: the heads of the first and last layers, sorted (S1, Figure 1)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nearsight.report.figures.style import (
    DISTANCE_LABEL,
    ENTROPY_LABEL,
    add_legend,
    depth_of,
    house_style,
    light_grid,
    model_style,
    shade,
)
from nearsight.report.inputs import shorten
from nearsight.report.study.conditions import base_and_full, num_seeds
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, beside_the_paper, legend_columns, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import sorted_heads

METRICS = {"mad": DISTANCE_LABEL, "entropy": ENTROPY_LABEL}
# Filled and hollow markers by turns: neighbouring layers stay apart where a printer loses the shades.
FILLS = ("full", "none")
LABEL_LIMIT = 30


def profiles(results: StudyResults) -> Drawing:
    """Distance (left) and entropy (right) of each layer's heads, from the lowest to the highest."""
    labels = base_and_full(results)
    layers = extreme_layers(results)
    one_seed = max(num_seeds(results, label) for label in labels) == 1
    with house_style():
        figure = Figure(figsize=(7.2, 3.9), layout=ConstrainedLayoutEngine(wspace=0.06))
        panels = figure.subplots(1, len(METRICS), sharex=True)
        for panel, (metric, axis_label) in zip(panels, METRICS.items(), strict=True):
            for index, label in enumerate(labels):
                numbers = profile(results, label, metric, over_images=one_seed)
                for layer in layers:
                    draw_layer(panel, numbers[numbers["layer"] == layer], index, layers, f"{metric}-{label}-{layer}")
            light_grid(panel)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            panel.set_xlabel(f"heads of a layer, by {'distance' if metric == 'mad' else metric}")
            panel.set_ylabel(axis_label)
        # A little more than the data need, so that markers at the ends are whole.
        largest = max(profile(results, label, "mad", over_images=one_seed)["high"].max() for label in labels)
        panels[0].set_ylim(-0.02 * largest, 1.05 * largest)
        panels[1].set_ylim(-0.02, 1.03)
        add_layer_legend(figure, labels, layers)
    seeds = seeds_in_words(num_seeds(results, label) for label in labels)
    bands = (
        "Lines: 1 seed; bands: ± one standard deviation over images."
        if one_seed
        else f"Lines: mean over {seeds} at each rank; bands: their range."
    )
    add_footnote(figure, [bands, *scale_notes(results)])
    shown = ", ".join(f"L{layer + 1}" for layer in layers)
    return Drawing(
        figure=figure,
        caption=f"Heads of layers {shown}, sorted within their layer from the lowest to the highest value: mean "
        f"attention distance (left) and entropy (right) of {' and '.join(labels)}. {bands}"
        + beside_the_paper(results, "In the paper's Figure 1 a line is one seed and its band the spread over images."),
    )


def extreme_layers(results: StudyResults) -> list[int]:
    """The first two and the last two layers; all of them where there are at most four."""
    layers = sorted({int(layer) for layer in results.heads["layer"]})
    return layers if len(layers) <= 4 else [*layers[:2], *layers[-2:]]


def profile(results: StudyResults, condition: str, metric: str, *, over_images: bool) -> pd.DataFrame:
    """Per layer and rank: mean over seeds and the ends of their range, or of ± one deviation over images."""
    runs = results.runs.loc[results.runs["condition"] == condition, "run"]
    heads = sorted_heads(results.heads[results.heads["run"].isin(runs)], metric)
    ranks = heads.groupby(["layer", "rank"])
    table = ranks[metric].agg(["mean", "min", "max"]).rename(columns={"min": "low", "max": "high"})
    if over_images:
        spread = ranks[f"{metric}_std"].mean()
        table = table.assign(low=table["mean"] - spread, high=table["mean"] + spread)
    return table.reset_index()


def draw_layer(panel: Axes, numbers: pd.DataFrame, index: int, layers: Sequence[int], name: str) -> None:
    if numbers.empty:
        return
    layer = int(numbers["layer"].iloc[0])
    colour = shade(model_style(index).colour, depth_of(layer, layers))
    rank, mean = numbers["rank"] + 1, numbers["mean"]
    if len(numbers) == 1:  # a band needs two points
        reach = np.array([mean - numbers["low"], numbers["high"] - mean])
        panel.errorbar(rank, mean, yerr=reach, color=colour, capsize=3)
    else:
        panel.fill_between(
            rank, numbers["low"], numbers["high"], color=colour, alpha=0.18, linewidth=0, gid=f"band-{name}"
        )
    panel.plot(rank, mean, color=colour, **_line(index, layer, layers), gid=name)


def _line(index: int, layer: int, layers: Sequence[int]) -> dict[str, Any]:
    style = model_style(index)
    return {
        "linestyle": style.dash,
        "marker": style.marker,
        "fillstyle": FILLS[layers.index(layer) % len(FILLS)],
        "linewidth": 1.5,
        "markersize": 4.5,
    }


def add_layer_legend(figure: Figure, labels: Sequence[str], layers: Sequence[int]) -> None:
    """A column per layer, a row per condition."""
    handles, names = [], []
    for layer in layers:
        for index, label in enumerate(labels):
            colour = shade(model_style(index).colour, depth_of(layer, layers))
            handles.append(Line2D([], [], color=colour, **_line(index, layer, layers)))
            names.append(f"{shorten(label, LABEL_LIMIT)}, L{layer + 1}")
    num_columns = legend_columns(figure, names, len(layers))
    add_legend(figure, handles, names, loc="outside upper center", ncols=num_columns)
