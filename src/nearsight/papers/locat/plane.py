"""Accuracy against locality: every way to make a ViT local, row by row and in one plane."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.papers.locat import numbers as s2
from nearsight.report.conditions import missing_notes, num_seeds, scale_notes
from nearsight.report.figures.looks import looks, model_style
from nearsight.report.figures.style import house_style, light_grid
from nearsight.report.marks import (
    FEWEST,
    WHITE_EDGE,
    Drawing,
    add_footnote,
    dots_and_bars,
    draw_dots,
    interval_in_row,
    seeds_in_row,
    with_room,
)
from nearsight.report.responses import interval_of, run_measures
from nearsight.report.tables import rounded, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate

FAMILIES = (
    s2.CORE,
    (s2.VIT_WITHOUT_POSITIONS, s2.LOCAT_WITHOUT_POSITIONS, s2.GAP),
    s2.KERNELS,
    s2.WIDTHS,
    s2.SCALES,
)
"""Conditions that belong together: a space separates their rows from others, and all but the first share a look."""
_OF_FAMILIES = [model_style(place) for place in (0, 1, 5, 7)]
"""In colours that those from ViT to LocAt do not have."""
_COLUMNS = {"mean_mad": "mean MAD, all heads", "min_mad": "MAD, most local head", "accuracy": "test accuracy, %"}
# In rows: the space between families; in inches: what the plane needs, however few rows there are.
_SPACE, _LEAST_HEIGHT = 0.6, 3.2
# Of the width that the seeds take up: the space around them. Intervals that need more are cut off.
_AROUND = 0.2
# Seeds that lie closer together than this, in MAD or in points of accuracy, are not drawn apart any further.
_NARROWEST = {"mean_mad": 0.01, "min_mad": 0.01, "accuracy": 1.0}
# Conditions that a correlation needs to say anything.
_FEWEST = 6
_Means = Mapping[str, Estimate]
"""Of one column, by condition."""


def accuracy_and_locality(results: StudyResults) -> Drawing:
    """A row per condition: distances and accuracy of every seed and their mean; at the right one against the other."""
    runs = run_measures(results).assign(accuracy=lambda table: 100 * table["test_acc"])
    places = _rows(set(runs["condition"]))
    if not places:
        raise InputError("none of its conditions has a run yet")
    points, runs = _points(places), runs[runs["condition"].isin(places)]
    means = {column: {label: interval_of(runs, label, column) for label in places} for column in _COLUMNS}
    lowest = max(places.values())
    with house_style():
        figure = Figure(figsize=(9.4, max(1.5 + 0.24 * lowest, _LEAST_HEIGHT)), layout="constrained")
        panels = figure.subplots(1, len(_COLUMNS) + 1, width_ratios=(1, 1, 1, 1.35))
        for panel, (column, title) in zip(panels, _COLUMNS.items(), strict=False):
            for label, place in places.items():
                mean, point = means[column][label], points[label]
                seeds = runs.loc[runs["condition"] == label, column].dropna().tolist()
                seeds_in_row(panel, seeds, place, point["color"], f"seeds-{column}-{label}")
                if mean.n >= FEWEST:
                    gid = f"interval-{column}-{label}"
                    interval_in_row(panel, mean.low, mean.high, place, point["color"], gid)
                panel.plot(mean.value, place, **point, gid=f"mean-{column}-{label}")
            panel.set_xlim(*_limits(runs, column))
            panel.locator_params(axis="x", nbins=4)
            light_grid(panel, "x")
            panel.tick_params(axis="y", length=0)
            panel.set_title(title, fontsize=8.0)
            panel.set_ylim(lowest + 0.7, -0.7)
            panel.set_yticks(list(places.values()), [""] * len(places))
        panels[0].set_yticks(list(places.values()), list(places), parse_math=False)
        panels[-1].set_xlim(*_limits(runs, "mean_mad"))
        panels[-1].set_ylim(*_limits(runs, "accuracy"))
        for label, point in points.items():
            here = runs[runs["condition"] == label]
            if len(here) > 1:
                draw_dots(panels[-1], here["mean_mad"], here["accuracy"], point["color"], f"seeds-plane-{label}")
        _draw_plane(panels[-1], means["mean_mad"], means["accuracy"], points)
    counts = [num_seeds(results, label) for label in places]
    words = "Points: 1 seed, so no interval."
    if max(counts) > 1:
        bars = "bars: 95 % intervals, cut off at the frame"
        words = f"Points: mean over {seeds_in_words(counts)}{dots_and_bars(counts, bars)}."
    words = f"{words} {_rank_correlation(means['mean_mad'], means['accuracy'])}".strip()
    add_footnote(figure, [words, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Mean and smallest attention distance of every condition's heads (fractions of the grid's "
        "diagonal), and its test accuracy; at the right accuracy against the mean distance, in the same colours and "
        f"markers. Further left is more local. {words}",
    )


def _rows(known: set[str]) -> dict[str, float]:
    """Condition → its place from the top."""
    places: dict[str, float] = {}
    place = 0.0
    for labels in FAMILIES:
        here = [label for label in labels if label in known]
        places |= {label: place + number for number, label in enumerate(here)}
        place += len(here) + _SPACE if here else 0.0
    return places


def _points(shown: Collection[str]) -> dict[str, dict[str, Any]]:
    """Their own looks from ViT to LocAt, and one per family beyond."""
    styles = looks(s2.CORE)
    for labels, style in zip(FAMILIES[1:], _OF_FAMILIES, strict=True):
        styles |= dict.fromkeys(labels, style)
    return {
        label: styles[label].look_with(linestyle="none", markersize=6.5, **WHITE_EDGE)
        for labels in FAMILIES
        for label in labels
        if label in shown
    }


def _limits(runs: pd.DataFrame, column: str) -> tuple[float, float]:
    low, high = with_room(runs[column].dropna().tolist(), _AROUND, _NARROWEST[column])
    return max(low, 0.0), high  # neither a distance nor an accuracy is negative


def _draw_plane(panel: Axes, distance: _Means, accuracy: _Means, points: Mapping[str, dict[str, Any]]) -> None:
    places = {label: (distance[label].value, accuracy[label].value) for label in points}
    for label, point in points.items():
        is_reference = label in (s2.VIT, s2.LOCAT)  # with which all others are compared
        panel.plot(*places[label], **point, zorder=4 if is_reference else 3, gid=f"plane-{label}")
        if is_reference:
            _write_beside(panel, label, places)
    panel.set_xlabel(_COLUMNS["mean_mad"])
    panel.set_ylabel(_COLUMNS["accuracy"])
    light_grid(panel)


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


def _write_beside(panel: Axes, label: str, places: Mapping[str, tuple[float, float]]) -> None:
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


def _rank_correlation(distance: _Means, accuracy: _Means) -> str:
    """Of mean distance and accuracy over conditions, in words; nothing where there are too few."""
    far, right = (pd.Series({label: one.value for label, one in means.items()}) for means in (distance, accuracy))
    if min(far.nunique(), right.nunique()) < _FEWEST:
        return ""
    value = rounded(float(far.corr(right, method="spearman")), 2)
    return f"Rank correlation of mean MAD and accuracy over the {len(far)} conditions: {value}."
