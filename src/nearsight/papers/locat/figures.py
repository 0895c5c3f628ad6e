"""Accuracy against locality: every way to make a ViT local, row by row and in one plane."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.measures import interval_of, layer_measures, run_measures
from nearsight.report.conditions import missing_notes, num_seeds, ordered_conditions, scale_notes
from nearsight.report.figures.style import ModelStyle, add_legend, house_style, light_grid, model_style
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.tables import rounded, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval

FAMILIES = (
    s2.CORE,
    (s2.VIT_WITHOUT_POSITIONS, s2.LOCAT_WITHOUT_POSITIONS, s2.GAP),
    s2.KERNELS,
    s2.WIDTHS,
    s2.SCALES,
)
"""Conditions that belong together: they share a colour and a marker, and a space parts their rows from the others'."""
COLUMNS = {
    "mean_mad": "mean MAD, all heads",
    "min_mad": "MAD, most local head",
    "accuracy": "test accuracy, %",
}
# In rows: the space between families; in inches: what the plane needs, however few rows there are.
SPACE, LEAST_HEIGHT = 0.6, 3.2
# Of the width that the means take up: the space around them. Intervals that need more are cut off.
AROUND = 0.3
# Means that lie closer together than this, in MAD or in points of accuracy, are not drawn apart any further.
NARROWEST = {"mean_mad": 0.01, "min_mad": 0.01, "accuracy": 1.0}
# Conditions that a correlation needs to say anything.
FEWEST = 6


def accuracy_and_locality(results: StudyResults) -> Drawing:
    """A row per condition: distances and accuracy, with intervals; at the right one against the other."""
    runs = run_measures(results).assign(accuracy=lambda table: 100 * table["test_acc"])
    places = _rows(set(runs["condition"]))
    if not places:
        raise InputError("none of its conditions has a run yet")
    styles = _styles(places)
    numbers = {column: {label: interval_of(runs, label, column) for label in places} for column in COLUMNS}
    lowest = max(places.values())
    with house_style():
        figure = Figure(figsize=(9.4, max(1.5 + 0.24 * lowest, LEAST_HEIGHT)), layout="constrained")
        panels = figure.subplots(1, len(COLUMNS) + 1, width_ratios=(1, 1, 1, 1.35))
        for panel, (column, title) in zip(panels, COLUMNS.items(), strict=False):
            _draw_rows(panel, numbers[column], places, styles, column)
            panel.set_title(title, fontsize=8.0)
            panel.set_ylim(lowest + 0.7, -0.7)
            panel.set_yticks(list(places.values()), [""] * len(places))
        panels[0].set_yticks(list(places.values()), list(places), parse_math=False)
        _draw_plane(panels[-1], numbers["mean_mad"], numbers["accuracy"], styles)
    counts = [num_seeds(results, label) for label in places]
    points = "Points: 1 seed, so no interval."
    if max(counts) > 1:
        points = f"Points: mean over {seeds_in_words(counts)}; bars: 95 % intervals, cut off at the frame."
    order = _rank_correlation(numbers)
    add_footnote(figure, [f"{points} {order}".strip(), *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="How far the heads of every condition look, on average and at the nearest (fractions of the grid's "
        "diagonal), and its test accuracy; at the right accuracy against the mean distance, in the same colours and "
        f"markers. Further left is more local. {points} {order}".strip(),
    )


def _rows(known: set[str]) -> dict[str, float]:
    """Condition → its place from the top."""
    places: dict[str, float] = {}
    place = 0.0
    for labels in FAMILIES:
        here = [label for label in labels if label in known]
        places |= {label: place + number for number, label in enumerate(here)}
        place += len(here) + SPACE if here else 0.0
    return places


def _styles(shown: Collection[str]) -> dict[str, ModelStyle]:
    """A look per family; where there is only one, per condition."""
    families = [[label for label in labels if label in shown] for labels in FAMILIES]
    if sum(map(bool, families)) == 1:
        families = [[label] for label in shown]
    return {label: model_style(place) for place, labels in enumerate(families) for label in labels}


def _draw_rows(
    panel: Axes,
    numbers: dict[str, MeanInterval],
    places: dict[str, float],
    styles: dict[str, ModelStyle],
    column: str,
) -> None:
    for label, place in places.items():
        interval, style = numbers[label], styles[label]
        if interval.has_interval:
            panel.plot(
                [interval.low, interval.high],
                [place, place],
                color=style.colour,
                linewidth=4,
                alpha=0.35,
                solid_capstyle="butt",
                gid=f"interval-{column}-{label}",
            )
        panel.plot(interval.mean, place, **_point(style), gid=f"mean-{column}-{label}")
    panel.set_xlim(*_limits(numbers, column))
    panel.locator_params(axis="x", nbins=4)
    light_grid(panel, "x")
    panel.tick_params(axis="y", length=0)


def _draw_plane(
    panel: Axes, distance: dict[str, MeanInterval], accuracy: dict[str, MeanInterval], styles: dict[str, ModelStyle]
) -> None:
    panel.set_xlim(*_limits(distance, "mean_mad"))
    panel.set_ylim(*_limits(accuracy, "accuracy"))
    places = {label: (distance[label].mean, accuracy[label].mean) for label in styles}
    for label, style in styles.items():
        is_reference = label in (s2.VIT, s2.LOCAT)  # with which all others are compared
        panel.plot(*places[label], **_point(style), zorder=4 if is_reference else 3, gid=f"plane-{label}")
        if is_reference:
            _write_beside(panel, label, places)
    panel.set_xlabel(COLUMNS["mean_mad"])
    panel.set_ylabel(COLUMNS["accuracy"])
    light_grid(panel)


def _write_beside(panel: Axes, label: str, places: dict[str, tuple[float, float]]) -> None:
    """A point's label, at that of its sides where the nearest other point is farthest."""
    points = panel.transData.transform(list(places.values()))
    mine = panel.transData.transform(places[label])
    others = points[[other != label for other in places]]
    per_point = panel.figure.dpi / 72

    def room(side: _Side) -> float:
        centre = mine + per_point * np.array(side.centre)
        return float(np.hypot(*(others - centre).T).min(initial=np.inf))

    side = max(_SIDES, key=room)
    panel.annotate(
        label, places[label], xytext=side.offset, textcoords="offset points", ha=side.ha, va=side.va, fontsize=8
    )


class _Side(NamedTuple):
    """Where a label may stand beside its point; offsets in points of print."""

    offset: tuple[float, float]
    ha: Literal["left", "center", "right"]
    va: Literal["top", "center", "bottom"]
    centre: tuple[float, float]
    """About where its middle is, were it a word of five letters."""


_SIDES = (
    _Side((0, -6), "center", "top", (0, -11)),
    _Side((0, 6), "center", "bottom", (0, 11)),
    _Side((6, 0), "left", "center", (18, 0)),
    _Side((-6, 0), "right", "center", (-18, 0)),
)


def _point(style: ModelStyle) -> dict[str, Any]:
    return {
        **{"color": style.colour, "marker": style.marker, "markersize": 6.5, "linestyle": "none"},
        **{"markeredgecolor": "white", "markeredgewidth": 0.6},
    }


def _limits(numbers: dict[str, MeanInterval], column: str) -> tuple[float, float]:
    means = [interval.mean for interval in numbers.values()]
    middle, width = (min(means) + max(means)) / 2, max(max(means) - min(means), NARROWEST[column])
    # Neither a distance nor an accuracy is negative.
    return max(middle - (0.5 + AROUND) * width, 0.0), middle + (0.5 + AROUND) * width


def _rank_correlation(numbers: dict[str, dict[str, MeanInterval]]) -> str:
    """Of mean distance and accuracy over conditions, in words; nothing where there are too few."""
    distance, accuracy = (
        pd.Series({label: interval.mean for label, interval in numbers[column].items()})
        for column in ("mean_mad", "accuracy")
    )
    if min(distance.nunique(), accuracy.nunique()) < FEWEST:
        return ""
    value = rounded(float(distance.corr(accuracy, method="spearman")), 2)
    return f"Rank correlation of mean MAD and accuracy over the {len(distance)} conditions: {value}."


# Layer by layer: how far heads look, and what the tokens are like (S2, Figure 5).


PANELS = {
    "mean_mad": "mean MAD of the heads",
    "min_mad": "MAD of the most local head",
    "locality_score": "locality score",
    "patch_cls_similarity": "patch–CLS similarity",
}


def layer_profiles(conditions: Mapping[str, str]) -> Callable[[StudyResults], Drawing]:
    """A figure of these conditions: label → its name in the legend."""
    styles = {label: model_style(place) for place, label in enumerate(conditions)}

    def draw(results: StudyResults) -> Drawing:
        present = [label for label in conditions if label in ordered_conditions(results)]
        if not present:
            raise InputError(f"it shows {', '.join(conditions)}, and none of them has a run yet")
        layers = layer_measures(results)
        with house_style():
            figure = Figure(figsize=(7.2, 5.4), layout="constrained")
            panels = figure.subplots(2, 2, sharex=True)
            for panel, (column, title) in zip(panels.flat, PANELS.items(), strict=True):
                for label in present:
                    _draw_line(panel, layers[layers["condition"] == label], column, styles[label], label)
                panel.set_title(title)
                panel.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
                light_grid(panel)
            for panel in panels[-1]:
                panel.set_xlabel("layer")
            handles = [Line2D([], [], **_line(styles[label])) for label in present]
            names = [conditions[label] for label in present]
            add_legend(figure, handles, names, loc="outside upper left", ncols=len(present))
        counts = [num_seeds(results, label) for label in present]
        lines = "Lines: 1 seed."
        if max(counts) > 1:
            lines = f"Lines: mean over {seeds_in_words(counts)}; bands: their range."
        add_footnote(figure, [lines, *missing_notes(results), *scale_notes(results)])
        return Drawing(
            figure=figure,
            caption="Layer by layer: mean attention distance of the layer's heads and of its most local one, in "
            "fractions of the grid's diagonal (top); mean cosine similarity of the patch tokens with their neighbours "
            f"and with CLS, as the layer's block gives them (bottom; S2 Figure 5). {lines} Without PRR the classifier "
            "reads CLS alone, so what the patches of the last layer attend to does not reach the loss.",
        )

    return draw


def _line(style: ModelStyle) -> dict[str, Any]:
    return {
        **{"color": style.colour, "linestyle": style.dash, "linewidth": 1.5},
        **{"marker": style.marker, "markersize": 5},
    }


def _draw_line(panel: Axes, layers: pd.DataFrame, column: str, style: ModelStyle, label: str) -> None:
    numbers = layers.groupby("layer")[column].agg(["mean", "min", "max"]).dropna()
    place = numbers.index + 1
    panel.fill_between(place, numbers["min"], numbers["max"], color=style.colour, alpha=0.18, linewidth=0)
    panel.plot(place, numbers["mean"], **_line(style), gid=f"{column}-{label}")
