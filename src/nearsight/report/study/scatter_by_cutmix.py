"""A mark per run: the distance of its most local head over some column, by CutMix."""

from math import isnan
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.report.figures.style import add_legend, house_style, light_grid, model_style
from nearsight.report.study.by_cutmix import correlations, grouping, groups, measured_runs
from nearsight.report.study.rank_correlation import RankCorrelation
from nearsight.report.study.table import probability, rounded
from nearsight.study.results import StudyResults

# Of the room that the runs take up: the space around them; and the least room, of runs that are all but alike.
AROUND, NARROWEST = 0.12, 0.02


def scatter_by_cutmix(results: StudyResults, column: str, label: str) -> tuple[Figure, Axes]:
    """The figure and its panel; `label` is that of the column."""
    runs, factor = measured_runs(results, column), grouping(results)
    here = {level: told for level, told in groups(results).items() if level in set(runs[factor])}
    with house_style():
        figure = Figure(figsize=(6.2, 4.0), layout="constrained")
        panel = figure.subplots()
        for level in here:
            group = runs[runs[factor] == level]
            panel.plot(group[column], group["min_mad"], **_look(results, level), gid=f"runs-{level}")
        # Around the runs: how they lie to one another is the question.
        panel.set_xlim(*around(runs[column]))
        panel.set_ylim(*around(runs["min_mad"]))
        panel.set_xlabel(label)
        panel.set_ylabel("MAD of the most local head")
        light_grid(panel)
        handles = [Line2D([], [], **_look(results, level)) for level in here]
        add_legend(figure, handles, list(here.values()), loc="outside upper left", ncols=2, handlelength=1.2)
    return figure, panel


def correlations_in_words(results: StudyResults, column: str) -> str:
    """What stands under such a figure."""
    told = "; ".join(f"{name} {_in_words(found)}" for name, found in correlations(results, column).items())
    return f"One mark per run. Rank correlation: {told}."


def around(values: "pd.Series[float]") -> tuple[float, float]:
    """From the least to the most, with room for whole marks."""
    low, high = float(values.min()), float(values.max())
    room = AROUND * max(high - low, NARROWEST)
    return low - room, high + room


def _in_words(found: RankCorrelation) -> str:
    if isnan(found.value):
        return f"none (n = {found.n})"
    return f"{rounded(found.value, 2, signed=True)} (n = {found.n}, p = {probability(found.p)})"


def _look(results: StudyResults, level: str) -> dict[str, Any]:
    """Without CutMix it is the second everywhere."""
    place = results.factors[grouping(results)].index(level)
    style = model_style({0: 1, 1: 0}.get(place, place))
    return {
        **{"color": style.colour, "marker": style.marker, "markersize": 7, "linestyle": "none"},
        # Runs that lie on one another show through.
        **{"markeredgecolor": "white", "markeredgewidth": 0.6, "alpha": 0.75},
    }
