"""Runs with and without CutMix: which are which, and what goes with a local head among all of them and within each."""

import math
from functools import lru_cache
from math import isnan
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.report.claims import not_tested
from nearsight.report.conditions import level_in_words
from nearsight.report.figures.style import add_legend, house_style, light_grid, model_style
from nearsight.report.rules import NOT_SHOWN, OTHER_WAY, YES, Finding
from nearsight.report.tables import probability, rounded
from nearsight.study.results import StudyResults
from nearsight.study.statistics.rank_correlation import RankCorrelation, rank_correlation

CUTMIX, PROTOCOL = "cutmix", "protocol"
ALL_RUNS = "all runs"
SURE = 0.05
"""The p-value below which a rank correlation counts."""


def grouping(results: StudyResults) -> str:
    """The factor that says whether a run has CutMix."""
    for name in (CUTMIX, PROTOCOL):
        if name in results.factors:
            return name
    raise InputError("its conditions differ neither in CutMix nor in the protocol")


def groups(results: StudyResults) -> dict[str, str]:
    """Level of that factor → in words."""
    factor = grouping(results)
    levels = results.factors[factor]
    if factor == CUTMIX:
        return {level: level_in_words(factor, levels, level) for level in levels}
    return {level: f"{level}, {'without' if level == levels[0] else 'with'} CutMix" for level in levels}


def measured_runs(results: StudyResults, column: str) -> pd.DataFrame:
    """The runs of which both the column and the smallest distance of a head are known."""
    if column not in results.runs:
        raise InputError(f"no run says its {column}")
    runs = results.runs.dropna(subset=[column, "min_mad"]).astype({column: "float64", "min_mad": "float64"})
    if runs.empty:
        raise InputError(f"no run has both a {column} and measured heads")
    return runs


def measured_parts(results: StudyResults, column: str) -> dict[str, pd.DataFrame]:
    """All `measured_runs`, then those of each group of `groups`, in words."""
    runs, factor = measured_runs(results, column), grouping(results)
    return {ALL_RUNS: runs} | {words: runs[runs[factor] == level] for level, words in groups(results).items()}


@lru_cache(maxsize=2)  # for tables and figures
def correlations(results: StudyResults, column: str) -> dict[str, RankCorrelation]:
    """A column against the smallest distance of a head, over all runs and within each group."""
    parts = measured_parts(results, column)
    return {words: rank_correlation(part[column], part["min_mad"]) for words, part in parts.items()}


def link_rule(more: str) -> str:
    """What `link` judges by; `more`: what runs have more of, as in "association"."""
    return (
        f"*Link.* Yes: the rank correlation is negative with p < {SURE:g}, so that runs with more {more} have a more "
        "local head. The other way round: it is positive with such a p. Not shown: otherwise."
    )


def judge_link(results: StudyResults, column: str, words: str) -> Finding:
    """Of one of the `correlations`. Its n counts seeds, as in all verdicts; the runs are in the words."""
    found = correlations(results, column)[words]
    if math.isnan(found.value):
        return not_tested(f"too few runs, or all alike: {found.n}")
    told = f"rank correlation {rounded(found.value, 2, signed=True)}, p = {probability(found.p)} ({found.n} runs)"
    seeds = int(measured_runs(results, column)["seed"].nunique())
    return Finding(verdict=link(found), ours=told, value=found.value, low=found.low, high=found.high, n=seeds)


def link(found: RankCorrelation) -> str:
    """Whether runs with more of something have a more local head."""
    if not found.p < SURE:  # so, too, where there is none
        return NOT_SHOWN
    return YES if found.value < 0 else OTHER_WAY


# A mark per run: the distance of its most local head over some column, by CutMix.


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
