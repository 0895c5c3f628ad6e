"""Figures that every study has: profiles, plane and heat maps of the heads of its base and of everything on, and the
plane of four key conditions (S1, Figures 1, 2, 3 and 5; Figure 4 is in `most_local`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.report.conditions import base_and_full, beside_the_paper, condition_looks, num_seeds, roles, scale_notes
from nearsight.report.figures.heat import heatmaps
from nearsight.report.figures.looks import ModelStyle, depth_of, shade
from nearsight.report.figures.models import MOST_OUTLINES, mad_entropy_plane
from nearsight.report.figures.style import (
    DISTANCE_LABEL,
    DISTANCE_LABEL_ONE_LINE,
    ENTROPY_LABEL,
    add_legend,
    house_style,
    light_grid,
)
from nearsight.report.inputs import ModelHeads, shorten
from nearsight.report.marks import (
    FEWEST,
    Drawing,
    add_footnote,
    distances_from_zero,
    dots_and_bars,
    draw_seeds,
    legend_columns,
)
from nearsight.report.tables import layers_in_words, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import sorted_heads

_METRICS = {"mad": DISTANCE_LABEL, "entropy": ENTROPY_LABEL}
# Filled and hollow markers by turns: neighbouring layers stay apart where a printer loses the shades.
_FILLS = ("full", "none")
_LABEL_LIMIT = 30


def profiles(results: StudyResults) -> Drawing:
    """Distance (left) and entropy (right) of the first and last layers' heads, from the lowest to the highest."""
    labels = base_and_full(results)
    styles = {label: condition_looks(results)[label] for label in labels}
    layers = extreme_layers(results)
    one_seed = max(num_seeds(results, label) for label in labels) == 1
    with house_style():
        figure = Figure(figsize=(7.2, 3.9), layout=ConstrainedLayoutEngine(wspace=0.06))
        panels = figure.subplots(1, len(_METRICS), sharex=True)
        for panel, (metric, axis_label) in zip(panels, _METRICS.items(), strict=True):
            for label, style in styles.items():
                numbers = profile(results, label, metric, over_images=one_seed)
                for layer in layers:
                    draw_layer(panel, numbers[numbers["layer"] == layer], style, layers, f"{metric}-{label}-{layer}")
            light_grid(panel)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            panel.set_xlabel(f"heads of a layer, by {'distance' if metric == 'mad' else metric}")
            panel.set_ylabel(axis_label)
        # A little more than the data need, so that markers at the ends are whole.
        largest = max(profile(results, label, "mad", over_images=one_seed)["highest"].max() for label in labels)
        panels[0].set_ylim(-0.02 * largest, 1.05 * largest)
        panels[1].set_ylim(-0.02, 1.03)
        add_layer_legend(figure, styles, layers)
    counts = [num_seeds(results, label) for label in labels]
    bands = (
        "Lines: 1 seed; bands: ± one standard deviation over images."
        if one_seed
        else f"Lines: mean over {seeds_in_words(counts)} at each rank{dots_and_bars(counts, 'bands: their range')}."
    )
    caption = (
        f"Heads of layers {layers_in_words(layers)} (from 0), sorted within their layer from the lowest to the highest "
        f"value: mean attention distance (left) and entropy (right) of {' and '.join(labels)}. {bands}"
    )
    return _finished(results, "figure-1-profiles", figure, bands, caption)


def _finished(results: StudyResults, name: str, figure: Figure, footnote: str, caption: str) -> Drawing:
    """With what has to be said below it, and how the paper's differs."""
    add_footnote(figure, [footnote, *scale_notes(results)])
    return Drawing(figure=figure, caption=caption + beside_the_paper(results, name))


def extreme_layers(results: StudyResults) -> list[int]:
    """The first two and the last two layers; all of them where there are at most four."""
    layers = sorted({int(layer) for layer in results.heads["layer"]})
    return layers if len(layers) <= 4 else [*layers[:2], *layers[-2:]]


def profile(results: StudyResults, condition: str, metric: str, *, over_images: bool) -> pd.DataFrame:
    """Per layer and rank: every seed, their mean, and the ends of the band around it: the range of seeds (NaN where
    they are too few) or ± one deviation over images; and the highest of all these."""
    heads = sorted_heads(_heads_of(results, condition), metric)
    ranks = heads.groupby(["layer", "rank"])
    table = ranks[metric].agg(["mean", "min", "max"]).rename(columns={"min": "low", "max": "high"})
    if over_images:
        spread = ranks[f"{metric}_std"].mean()
        table = table.assign(low=table["mean"] - spread, high=table["mean"] + spread)
    table = table.assign(seeds=ranks[metric].agg(list), highest=table["high"])
    if not over_images:
        table.loc[ranks.size() < FEWEST, ["low", "high"]] = np.nan
    return table.reset_index()


def _heads_of(results: StudyResults, condition: str) -> pd.DataFrame:
    """Of all its seeds."""
    runs = results.runs.loc[results.runs["condition"] == condition, "run"]
    return results.heads[results.heads["run"].isin(runs)]


def draw_layer(panel: Axes, numbers: pd.DataFrame, style: ModelStyle, layers: Sequence[int], name: str) -> None:
    if numbers.empty:
        return
    layer = int(numbers["layer"].iloc[0])
    colour = shade(style.colour, depth_of(layer, layers))
    rank, mean = numbers["rank"] + 1, numbers["mean"]
    draw_seeds(panel, rank, numbers["seeds"], colour, f"seeds-{name}")
    if numbers["low"].isna().all():
        pass
    elif len(numbers) == 1:  # a band needs two points
        reach = np.array([mean - numbers["low"], numbers["high"] - mean])
        panel.errorbar(rank, mean, yerr=reach, color=colour, capsize=3)
    else:
        panel.fill_between(
            rank, numbers["low"], numbers["high"], color=colour, alpha=0.18, linewidth=0, gid=f"band-{name}"
        )
    panel.plot(rank, mean, color=colour, **_line(style, layer, layers), gid=name)


def _line(style: ModelStyle, layer: int, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "linestyle": style.dash,
        "marker": style.marker,
        "fillstyle": _FILLS[layers.index(layer) % len(_FILLS)],
        "linewidth": 1.5,
        "markersize": 4.5,
    }


def add_layer_legend(figure: Figure, styles: Mapping[str, ModelStyle], layers: Sequence[int]) -> None:
    """A column per layer, a row per condition."""
    handles, names = [], []
    for layer in layers:
        for label, style in styles.items():
            colour = shade(style.colour, depth_of(layer, layers))
            handles.append(Line2D([], [], color=colour, **_line(style, layer, layers)))
            names.append(f"{shorten(label, _LABEL_LIMIT)}, L{layer}")
    num_columns = legend_columns(figure, names, len(layers))
    add_legend(figure, handles, names, loc="outside upper center", ncols=num_columns)


def plane(results: StudyResults) -> Drawing:
    """All heads of all seeds of the base and the full protocol."""
    labels = base_and_full(results)
    models = [_all_heads(results, label) for label in labels]
    figure = mad_entropy_plane(models)
    distances_from_zero(figure.axes[0], max(model.heads["mad"].max() for model in models))  # all panels share it
    seeds = seeds_in_words(num_seeds(results, label) for label in labels)
    caption = (
        f"Mean attention distance and entropy of every head of {' and '.join(labels)}; the colour is the layer, the "
        f"lower left corner is local and focused. The heads of {seeds} are shown."
    )
    return _finished(results, "figure-2-plane", figure, f"One point per head; the heads of {seeds}.", caption)


def _all_heads(results: StudyResults, condition: str) -> ModelHeads:
    """The heads of all seeds of a condition as those of one wide model: seed after seed."""
    runs = results.runs.loc[results.runs["condition"] == condition, "run"]
    heads, places = _heads_of(results, condition), {run: place for place, run in enumerate(runs)}
    place = heads["run"].map(places)
    wide = heads.assign(epoch=0, head=heads["head"] + place * (results.heads["head"].max() + 1))
    return ModelHeads(label=condition, heads=wide.iloc[place.argsort(kind="stable")])


def maps(results: StudyResults) -> Drawing:
    """The base on the left, the full protocol on the right, as in the paper.

    With one seed a column is a head. Heads of different seeds have nothing to do with each other, so with several a
    column is a rank by distance and a cell the mean over seeds.
    """
    labels = base_and_full(results)[::-1]
    one_seed = max(num_seeds(results, label) for label in labels) == 1
    figure = heatmaps([_one_model(results, label, by_rank=not one_seed) for label in labels], by_rank=not one_seed)
    seeds = seeds_in_words(num_seeds(results, label) for label in labels)
    words = (
        "1 seed, its heads in their own order."
        if one_seed
        else f"Each cell: mean over {seeds}. Each layer's heads are sorted by their distance, also in the lower row."
    )
    caption = (
        f"Mean attention distance (top) and entropy (bottom) of every head of {' and '.join(labels)}, on one scale per "
        f"row; bright is more. {words}"
    )
    return _finished(results, "figure-3-heatmaps", figure, words, caption)


def _one_model(results: StudyResults, condition: str, *, by_rank: bool) -> ModelHeads:
    heads = _heads_of(results, condition)
    if by_rank:
        ranked = sorted_heads(heads, "mad")
        numbers = ["mad", "mad_std", "entropy", "entropy_std", "num_images"]
        groups = ranked.groupby(["layer", "rank"])
        heads = groups.agg({"layer_name": "first", **dict.fromkeys(numbers, "mean")}).reset_index()
        heads = heads.rename(columns={"rank": "head"}).round({"num_images": 0})
    return ModelHeads(label=condition, heads=heads.assign(epoch=0))


_MARKERS = {"full": "o", "only_key": "X", "without_key": "s", "base": "^"}
"""The paper's. Conditions with the key factor are filled."""
_HOLLOW = ("without_key", "base")


def key_conditions(results: StudyResults) -> Drawing:
    """All heads of all seeds: everything on, only the key factor, all but the key factor, nothing."""
    if len(results.factors) < 2:
        raise InputError("it needs two factors or more; with one, Figure 2 shows the same conditions")
    found = roles(results)
    labels = {role: getattr(found, role) for role in _MARKERS}
    present = {role: label for role, label in labels.items() if label is not None}
    if not present:
        raise InputError("none of its four conditions has a run yet")
    styles = condition_looks(results)
    with house_style():
        figure = Figure(figsize=(6.6, 4.8), layout="constrained")
        axes = figure.subplots()
        light_grid(axes)
        handles, largest = [], 0.0
        for role, label in present.items():
            style, hollow = replace(styles[label], marker=_MARKERS[role]), role in _HOLLOW
            heads = _heads_of(results, label)
            largest = max(largest, float(heads["mad"].max()))
            axes.scatter(
                heads["mad"],
                heads["entropy"],
                s=18,
                marker=style.marker,
                linewidths=0.7 if hollow else 0.3,
                alpha=0.75,
                facecolors="none" if hollow else style.colour,
                edgecolors=style.colour if hollow else "white",
                zorder=2 if hollow else 3,
                rasterized=len(heads) > MOST_OUTLINES,
                gid=f"heads-{label}",
            )
            handles.append(style.handle(linestyle="none", markerfacecolor="none" if hollow else style.colour))
        distances_from_zero(axes, largest)
        axes.set_ylim(-0.03, 1.05)
        axes.set_xlabel(DISTANCE_LABEL_ONE_LINE)
        axes.set_ylabel(ENTROPY_LABEL)
        names = [shorten(label, _LABEL_LIMIT) for label in present.values()]
        num_columns = legend_columns(figure, names, len(names))
        add_legend(figure, handles, names, loc="outside upper left", ncols=num_columns, handlelength=1)
    seeds = seeds_in_words(num_seeds(results, label) for label in present.values())
    absent = "" if len(present) == len(_MARKERS) else " A condition that has no complete run yet is not shown."
    caption = (
        f"Mean attention distance and entropy of every head of {', '.join(present.values())}. The heads of {seeds} are "
        f"shown.{absent}"
    )
    footnote = f"One point per head; the heads of {seeds}.{absent}"
    return _finished(results, "figure-5-key-conditions", figure, footnote, caption)
