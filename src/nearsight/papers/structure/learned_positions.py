"""From S3 to S1: does CutMix raise the association of learned positions, and does association go with local heads?

A table and a figure in the reports of studies of CutMix or of S1's protocols, and the bridge, a report of its own: from
the results of any such study; no weights are needed.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from nearsight.errors import InputError
from nearsight.files import read_object, write_json, write_text
from nearsight.metrics import neighbour_association
from nearsight.papers.protocol.links import (
    ALL_RUNS,
    PROTOCOL,
    correlations,
    correlations_in_words,
    grouping,
    groups,
    judge_link,
    link_rule,
    scatter_by_cutmix,
)
from nearsight.papers.structure.positional import ASSOCIATION, WHAT_ASSOCIATION_IS
from nearsight.report.claims import Claim, Verdicts, judge_all
from nearsight.report.conditions import FACTOR_NAMES, assumed_notes, missing_notes, ordered_conditions, scale_notes
from nearsight.report.figures.style import MUTED
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.reports import Report
from nearsight.report.responses import patches_per_side
from nearsight.report.rules import SIGN, Finding, judge_sign
from nearsight.report.studies import marks_of
from nearsight.report.study_tables import INTERVALS, NOT_CORRECTED
from nearsight.report.tables import (
    MISSING,
    Row,
    Table,
    difference_in_words,
    probability,
    records,
    rounded,
    seeds_in_words,
    span,
)
from nearsight.study.plan import Plan
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, factorial_effects, mean_interval
from nearsight.study.statistics.rank_correlation import METHOD as CORRELATION

_MEAN, _EFFECT, _CORRELATED = "mean", "effect", "rank correlation"
"""Kinds of what is said."""
_LINK = link_rule("association")
_RAISED = "association"
"""The question of what CutMix does; those of links are named after their groups."""


class _Said(NamedTuple):
    """One number about association."""

    what: str
    kind: str
    found: Estimate
    n: int
    """Seeds of a mean or of a difference within seeds; otherwise runs."""
    counted: str
    question: str = ""
    """The id of the one that it answers."""
    group: str = ""
    """Of a mean: which runs."""
    exact: bool | None = None
    """Of a rank correlation: all orders were counted for p."""


def _associated_runs(results: StudyResults) -> pd.DataFrame:
    """The runs whose models have learned positions. None such is an `InputError`."""
    if ASSOCIATION not in results.runs or results.runs[ASSOCIATION].isna().all():
        raise InputError("no run has learned positions whose association was measured")
    return results.runs.dropna(subset=[ASSOCIATION]).astype({ASSOCIATION: "float64", "min_mad": "float64"})


def chance_association(settings: Mapping[str, object]) -> float | None:
    """What positions of a random order give on the models' grid; None where the settings do not say the grid."""
    side = patches_per_side(settings)
    return None if side is None else neighbour_association(torch.zeros(side**2, side**2), (side, side)).chance


def association_table(results: StudyResults) -> Table:
    """Means of the groups, effects on association, and its rank correlation with the smallest distance."""
    chance, rows = chance_association(results.settings), []
    answers = {judgement.claim.id: judgement.words for judgement in judge_all(bridge_questions(results), results)}
    for said in (*_means(results), *_effects(results), *_correlations(results)):
        signed, found = said.kind != _MEAN, said.found
        low, high = (rounded(end, signed=signed) for end in (found.low, found.high))
        p = probability(found.p) + (" (exact)" if said.exact else "")
        row = Row(what=said.what).keep(kind=said.kind)
        row.both("value", found.value, words=rounded(found.value, signed=signed)).keep(low=found.low, high=found.high)
        row.show("95 % interval", span(low, high)).both("p", found.p, words=p)
        row.keep(exact=said.exact, n=said.n, counted=said.counted).show("from", f"{said.n} {said.counted}")
        answer = answers.get(said.question, MISSING)
        row.both("answer", answer, words=answer if answer == MISSING else f"**{answer}**")
        rows.append(row.keep(chance=chance, scale=results.scale))
    notes = (
        WHAT_ASSOCIATION_IS,
        *(() if chance is None else (f"By chance association would be {rounded(chance)} on the models' grid.",)),
        "Means: over seeds, of what the group's runs of each seed have on average; 95 % intervals (Student's t).",
        *_how_effects(results),
        CORRELATION,
        "A factor that moves both makes them correlate over all runs; what is left within a group is the link itself.",
        f"Does CutMix, or Modern, raise association? {SIGN}",
        f"Do runs with more association have a more local head? {_LINK}",
        f"{NOT_CORRECTED} The answers rest on p-values that are corrected for the number of questions (Holm).",
        *missing_notes(results),
    )
    title = f"{results.name}: do learned positions know neighbours, and do local heads go with it?"
    return Table.of("position-association", title, rows, notes=notes)


def _means(results: StudyResults) -> Iterator[_Said]:
    runs, factor = _associated_runs(results), grouping(results)
    for level, words in groups(results).items():
        ours = mean_interval(runs[runs[factor] == level].groupby("seed")[ASSOCIATION].mean())
        if ours.n:  # that it is not 0 is no question
            found = dataclasses.replace(ours, p=float("nan"))
            yield _Said(f"association, {words}", _MEAN, found, ours.n, "seeds", group=words)


def _change(results: StudyResults) -> Estimate:
    """What CutMix, or the protocol with it, changes: the mean within each seed, of its pairs of runs that differ in
    nothing else, over seeds."""
    runs, factor = _associated_runs(results), grouping(results)
    others = [name for name in results.factors if name != factor]
    pairs = runs.pivot_table(index=["seed", *others], columns=factor, values=ASSOCIATION)
    pairs = pairs.reindex(columns=list(results.factors[factor]))
    return mean_interval((pairs.iloc[:, -1] - pairs.iloc[:, 0]).dropna().groupby("seed").mean())


def _effects(results: StudyResults) -> Iterator[_Said]:
    """What CutMix does to association within seeds, which is judged; and what each factor does, by one fit."""
    runs, factor, change = _associated_runs(results), grouping(results), _change(results)
    names = results.factors[factor] if factor == PROTOCOL else tuple(groups(results).values())
    if change.n:
        what = f"change of association, {names[-1]} minus {names[0]}"
        yield _Said(what, _EFFECT, change, change.n, "seeds", question=_RAISED)
    if factor == PROTOCOL:
        return
    for row in records(factorial_effects(runs, results.factors, ASSOCIATION).table):
        if row["order"] == 1:
            found = Estimate(value=row["effect"], low=row["low"], high=row["high"], p=row["p"])
            what = f"effect on association, {FACTOR_NAMES.get(row['term'], row['term'])}"
            yield _Said(what, _EFFECT, found, len(runs), "runs")


def _correlations(results: StudyResults) -> Iterator[_Said]:
    for words, found in correlations(results, ASSOCIATION).items():
        estimate = Estimate(value=found.value, low=found.low, high=found.high, p=found.p)
        what = f"association and min MAD, {words}"
        yield _Said(what, _CORRELATED, estimate, found.n, "runs", question=_of_link(words), exact=found.exact)


def _how_effects(results: StudyResults) -> list[str]:
    within = "The change is taken within seeds, with Student's t interval"
    if grouping(results) == PROTOCOL:
        return [f"{within}; the protocols differ in more than CutMix."]
    effects = factorial_effects(_associated_runs(results), results.factors, ASSOCIATION)
    words = (
        "Effects: the mean with a factor minus the mean without it, by ordinary least squares with all interactions, "
        f"seeds as replicates; {effects.num_runs} runs, {effects.residual_df} of them left over to estimate the noise."
    )
    within = f"{within}: the mean over a seed's pairs of runs that differ in CutMix alone."
    return [within, words, *(f"{note[0].upper()}{note[1:]}." for note in effects.notes)]


def association_and_distance(results: StudyResults) -> Drawing:
    """A mark per run, by CutMix; a line at what chance gives, or a word where that is far away."""
    _associated_runs(results)  # which says what is missing
    figure, panel = scatter_by_cutmix(
        results, ASSOCIATION, "association of learned positions (share of neighbours found)"
    )
    chance = chance_association(results.settings)
    if chance is not None:
        low, high = panel.get_xlim()
        panel.axvline(chance, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1, gid="chance")
        panel.set_xlim(low, high)
        panel.annotate(
            "chance" if chance > low else f"← chance, {rounded(chance)}",
            (max(chance, low), 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=MUTED,
        )
    order = correlations_in_words(results, ASSOCIATION)
    add_footnote(figure, [order, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Association of a model's learned positions against the mean attention distance of its most local "
        f"head, with and without CutMix. {order} {WHAT_ASSOCIATION_IS}"
        + ("" if chance is None else f" By chance it would be {rounded(chance)}."),
    )


_TITLE = "From S3 to S1"
_SOURCE = "S3's patch association, in models of S1"
_COLUMNS = (ASSOCIATION, "min_mad", "test_acc")


def write_bridge(study: Path, folder: Path) -> tuple[Path, ...]:
    """Write runs.csv, tables/, figures/, verdict.md and provenance.json from the results in a study's folder, with run
    folders or without; the files written. The same results give the same bytes. What was planned of its questions is
    what plan.json in the folder says."""
    results = StudyResults.read(study)
    runs = _associated_runs(results)
    written = _bridge_report(results, Plan.read(folder)).write(folder)
    write_text(folder / "runs.csv", runs[["run", "condition", *results.factors, "seed", *_COLUMNS]].to_csv(index=False))
    path = study / "provenance.json"
    provenance = read_object(path, missing=f"{path} is missing") if path.exists() else {}
    write_json(folder / "provenance.json", {"study": results.name, **provenance})
    return (*written, folder / "runs.csv", folder / "provenance.json")


def _bridge_report(results: StudyResults, plan: Plan | None) -> Report:
    about, questions = (*scale_notes(results), *assumed_notes(results)), bridge_questions(results)
    tables = [_conditions_table(results), association_table(results)]
    return Report(
        title=f"{_TITLE}, {results.name}",
        tables=[dataclasses.replace(table, notes=(*table.notes, *about)) for table in tables],
        figures={"position-association": partial(association_and_distance, results)},
        verdicts=Verdicts(
            judgements=judge_all(questions, results),
            title=f"{_TITLE}: the answers of {results.name}",
            scale=results.scale,
            paper=None,
            whose_questions=" of our own",
            runs=f"{len(_associated_runs(results))} runs.",
            notes=(
                *scale_notes(results),
                "± is half a 95 % interval; the table of position association says how each was estimated.",
                WHAT_ASSOCIATION_IS,
                *missing_notes(results),
            ),
            asked=marks_of(plan, questions),
        ),
        notes=(*missing_notes(results), *about),
    )


def bridge_questions(results: StudyResults) -> tuple[Claim, ...]:
    """The two questions; the second over all runs, and within those that have CutMix and those that have not."""
    levels = results.factors[grouping(results)]
    whose = f"{levels[-1]}, which has CutMix," if grouping(results) == PROTOCOL else "CutMix"
    link = "Do runs whose positions are more associated have a more local head"
    return (
        Claim(
            id=_RAISED,
            text=f"Does {whose} raise the association of learned positions with neighbours?",
            source=_SOURCE,
            rule=SIGN,
            judge=_judge_effect,
        ),
        *(
            Claim(
                id=_of_link(group),
                text=f"{link}: {group}?",
                source=_SOURCE,
                rule=_LINK,
                judge=partial(judge_link, column=ASSOCIATION, words=group),
            )
            for group in (ALL_RUNS, *groups(results).values())
        ),
    )


def _of_link(group: str) -> str:
    return f"link-{group}"


def _judge_effect(results: StudyResults) -> Finding:
    ours = _change(results)
    if not ours.n:
        raise InputError("there are no runs to compare with those that have CutMix")
    means = ", ".join(f"{rounded(mean.found.value)} {mean.group}" for mean in _means(results))
    return judge_sign(ours, sign=1, words=f"{means}: {difference_in_words(ours)} ({seeds_in_words([ours.n])})")


def _conditions_table(results: StudyResults) -> Table:
    """A row per condition."""
    runs, rows = _associated_runs(results), []
    for condition in ordered_conditions(results):
        here = runs[runs["condition"] == condition]
        if here.empty:
            continue
        association, distance, accuracy = (mean_interval(here[column].dropna()) for column in _COLUMNS)
        row = Row(condition=condition, seeds=len(here)).keep(scale=results.scale)
        row.interval(ASSOCIATION, association, "association").interval("min_mad", distance, "min MAD")
        rows.append(row.interval("test_acc", accuracy, "test accuracy, %", scale=100, digits=2))
    title = f"{results.name}: learned positions and the most local head, by condition"
    notes = (INTERVALS, WHAT_ASSOCIATION_IS, *missing_notes(results))
    return Table.of("conditions", title, rows, notes=notes)
