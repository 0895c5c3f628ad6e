"""What goes with a local head, among all runs and among those with and without CutMix: how long a run trains, for one.

Early stopping decides how long that is, not the study, so that a link is an observation: whatever makes runs go on may
also make their heads local. Conditions differ in both, so that a link is judged among the runs of one condition. The
paper asks nothing of the kind, and reports no numbers of epochs.
"""

import math
from functools import lru_cache
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.report.claims import OURS, Claim, asked, judge_all, not_tested
from nearsight.report.conditions import level_in_words, level_looks, missing_notes, scale_notes
from nearsight.report.figures.style import add_legend, house_style, light_grid
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.rules import LEANING, Finding
from nearsight.report.study_tables import NOT_CORRECTED
from nearsight.report.tables import MISSING, Row, Table, probability, rounded, span
from nearsight.study.results import StudyResults
from nearsight.study.statistics.rank_correlation import (
    METHOD,
    WITHIN,
    RankCorrelation,
    rank_correlation,
    rank_correlation_within,
)

CUTMIX, PROTOCOL = "cutmix", "protocol"
ALL_RUNS = "all runs"
# Of the room that the marks of runs take up: the space around them; and the least room, of runs that are almost equal.
_AROUND, _NARROWEST = 0.12, 0.02


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


def _measured_runs(results: StudyResults, column: str) -> pd.DataFrame:
    """The runs of which both the column and the smallest distance of a head are known."""
    if column not in results.runs:
        raise InputError(f"no run says its {column}")
    runs = results.runs.dropna(subset=[column, "min_mad"]).astype({column: "float64", "min_mad": "float64"})
    if runs.empty:
        raise InputError(f"no run has both a {column} and measured heads")
    return runs


def _measured_parts(results: StudyResults, column: str) -> dict[str, pd.DataFrame]:
    """All `_measured_runs`, then those of each group of `groups`, in words."""
    runs, factor = _measured_runs(results, column), grouping(results)
    return {ALL_RUNS: runs} | {words: runs[runs[factor] == level] for level, words in groups(results).items()}


@lru_cache(maxsize=2)  # for tables and figures
def correlations(results: StudyResults, column: str) -> dict[str, RankCorrelation]:
    """A column against the smallest distance of a head, over all runs and within each group."""
    parts = _measured_parts(results, column)
    return {words: rank_correlation(part[column], part["min_mad"]) for words, part in parts.items()}


@lru_cache(maxsize=2)
def correlations_within(results: StudyResults, column: str) -> dict[str, RankCorrelation]:
    """The same among the runs of each condition: what is judged."""
    parts = _measured_parts(results, column)
    return {
        words: rank_correlation_within(part[column], part["min_mad"], list(part["condition"]))
        for words, part in parts.items()
    }


def link_rule(more: str) -> str:
    """What `judge_link` judges by; `more`: what runs have more of, as in "association"."""
    return (
        f"*Link.* Whether, among the runs of a condition, those with more {more} have a more local head: the rank "
        "correlation within conditions is negative, or positive, by permutations within conditions (two-sided)."
    )


def judge_link(results: StudyResults, column: str, words: str) -> Finding:
    """Of one of the groups of `correlations`, within conditions. Its n counts seeds, as in all verdicts; the runs are
    in the words."""
    found, plain = (some(results, column)[words] for some in (correlations_within, correlations))
    if math.isnan(found.value):
        return not_tested(f"no condition has runs to compare, or all are equal: {found.n} runs")
    p, p_against = (found.p if sign * found.value > 0 else 1.0 for sign in (-1, 1))
    return Finding(
        ours=f"rank correlation {rounded(found.value, 2, signed=True)} within conditions, p = {probability(found.p)}; "
        f"{rounded(plain.value, 2, signed=True)} over all {found.n} runs, p = {probability(plain.p)}",
        value=found.value,
        n=int(_measured_runs(results, column)["seed"].nunique()),
        p=p,
        p_against=p_against,
        leans=p <= 2 * LEANING,
    )


def scatter_by_cutmix(results: StudyResults, column: str, label: str) -> tuple[Figure, Axes]:
    """A mark per run, the distance of its most local head over a column: the figure and its panel."""
    runs, factor = _measured_runs(results, column), grouping(results)
    here = {level: words for level, words in groups(results).items() if level in set(runs[factor])}
    with house_style():
        figure = Figure(figsize=(6.2, 4.0), layout="constrained")
        panel = figure.subplots()
        for level in here:
            group = runs[runs[factor] == level]
            panel.plot(group[column], group["min_mad"], **_look(results, level), gid=f"runs-{level}")
        # Around the runs: how they lie to one another is the question.
        panel.set_xlim(*_around(runs[column]))
        panel.set_ylim(*_around(runs["min_mad"]))
        panel.set_xlabel(label)
        panel.set_ylabel("MAD of the most local head")
        light_grid(panel)
        handles = [Line2D([], [], **_look(results, level)) for level in here]
        add_legend(figure, handles, list(here.values()), loc="outside upper left", ncols=2, handlelength=1.2)
    return figure, panel


def correlations_in_words(results: StudyResults, column: str) -> str:
    """What stands under such a figure."""

    def describe(found: RankCorrelation) -> str:
        if math.isnan(found.value):
            return f"none (n = {found.n})"
        return f"{rounded(found.value, 2, signed=True)} (n = {found.n}, p = {probability(found.p)})"

    over_all, within = (
        "; ".join(f"{name} {describe(found)}" for name, found in some(results, column).items())
        for some in (correlations, correlations_within)
    )
    return f"One mark per run. Rank correlation: {over_all}. Within conditions: {within}."


def _around(values: "pd.Series[float]") -> tuple[float, float]:
    """From the least to the most, with room for whole marks."""
    low, high = float(values.min()), float(values.max())
    room = _AROUND * max(high - low, _NARROWEST)
    return low - room, high + room


def _look(results: StudyResults, level: str) -> dict[str, Any]:
    factor = grouping(results)
    style = level_looks(factor, results.factors[factor])[level]
    return {
        **{"color": style.colour, "marker": style.marker, "markersize": 7, "linestyle": "none"},
        # Runs that lie on one another show through.
        **{"markeredgecolor": "white", "markeredgewidth": 0.6, "alpha": 0.75},
    }


_EPOCHS = "epochs"
LENGTH_RULE = link_rule(_EPOCHS)
_NOT_SET = (
    "Early stopping ended each run, not the study: a link is an observation, and what makes a run go on may also make "
    "its heads local."
)


def _longer(id: str, level: int, whose: str) -> Claim:
    """Of the runs at a level of the factor that is CutMix: its last, with it, or its first."""
    text = f"Do runs that train longer have a more local head: {whose}?"

    @asked(id, text, source=OURS, rule=LENGTH_RULE, family="length")
    def question(results: StudyResults) -> Finding:
        return judge_link(results, _EPOCHS, list(groups(results).values())[level])

    return question


LENGTH_QUESTIONS = (
    _longer("longer-with-cutmix", -1, "those with CutMix"),
    _longer("longer-without-cutmix", 0, "those without"),
)


def length_table(results: StudyResults) -> Table:
    """A row per group of runs: how long they trained, how local their heads are, and whether these go together."""
    rows, plain, within = [], correlations(results, _EPOCHS), correlations_within(results, _EPOCHS)
    with_it, without = (judgement.words for judgement in judge_all(LENGTH_QUESTIONS, results))
    names = list(groups(results).values())
    answers = {names[-1]: with_it, names[0]: without}
    for name, part in _measured_parts(results, _EPOCHS).items():
        if part.empty:
            continue
        found, judged = plain[name], within[name]
        row = Row().both("group", name, "runs", f"{name} ({found.n})").keep(runs=found.n)
        for column, title, digits in ((_EPOCHS, "epochs", 0), ("min_mad", "min MAD", 3)):
            low, high = float(part[column].min()), float(part[column].max())
            row.keep(**{f"{column}_min": low, f"{column}_max": high})
            row.show(title, span(*(rounded(end, digits) for end in (low, high))))
        row.both("correlation", found.value, "rank correlation", rounded(found.value, 2, signed=True))
        ends = span(*(rounded(end, 2, signed=True) for end in (found.low, found.high)))
        row.keep(low=found.low, high=found.high).show("95 % interval", ends)
        row.both("p", found.p, words=_p_in_words(found)).keep(exact=found.exact)
        value, title = rounded(judged.value, 2, signed=True), "within conditions"
        row.both("correlation_within", judged.value, title, value)
        row.both("p_within", judged.p, f"p {title}", _p_in_words(judged)).keep(exact_within=judged.exact)
        answer = str(answers.get(name, MISSING))  # of all runs nothing is asked
        row.both("answer", answer, "longer, more local?", answer if answer == MISSING else f"**{answer}**")
        row.keep(scale=results.scale)
        rows.append(row)
    title = f"{results.name}: do runs that train longer have a more local head?"
    corrected = f"{NOT_CORRECTED} The answers rest on p-values that are corrected for the two questions (Holm)."
    notes = (_NOT_SET, METHOD, WITHIN, LENGTH_RULE, corrected, *missing_notes(results))
    return Table.of("training-length", title, rows, notes=notes)


def _p_in_words(found: RankCorrelation) -> str:
    return probability(found.p) + (" (exact)" if found.exact else "")


def length_and_distance(results: StudyResults) -> Drawing:
    """A mark per run, by CutMix."""
    figure, _ = scatter_by_cutmix(results, _EPOCHS, "epochs until early stopping")
    order = correlations_in_words(results, _EPOCHS)
    add_footnote(figure, [order, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Epochs that each run trained against the mean attention distance of its most local head, with and "
        f"without CutMix. {order} {_NOT_SET}",
    )
