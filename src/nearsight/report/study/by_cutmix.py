"""Runs with and without CutMix: which are which, and what goes with a local head among all of them and within each."""

import math
from functools import lru_cache

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.conditions import level_in_words
from nearsight.report.study.judged import not_tested
from nearsight.report.study.questions import NOT_SHOWN, OTHER_WAY, YES
from nearsight.report.study.rank_correlation import RankCorrelation, rank_correlation
from nearsight.report.study.rules import Finding
from nearsight.report.study.table import probability, rounded
from nearsight.study.results import StudyResults

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
