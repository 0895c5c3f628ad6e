"""From S3 to S1: does CutMix raise the association of learned positions, and does association tell where heads look?"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    link,
    link_rule,
    scatter_by_cutmix,
)
from nearsight.papers.structure.positional import ASSOCIATION, WHAT_ASSOCIATION_IS
from nearsight.report.claims import Claim, Verdicts, judge
from nearsight.report.conditions import FACTOR_NAMES, assumed_notes, missing_notes, ordered_conditions, scale_notes
from nearsight.report.figures.style import MUTED
from nearsight.report.fits import Estimate
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.reports import Report
from nearsight.report.responses import patches_per_side
from nearsight.report.rules import SIGN, Finding, judge_sign
from nearsight.report.study_tables import INTERVALS, NOT_CORRECTED
from nearsight.report.tables import MISSING, Table, mean_and_ends, probability, records, rounded, span, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import factorial_effects, mean_interval, paired_difference
from nearsight.study.statistics.rank_correlation import METHOD as CORRELATION

MEAN, EFFECT, CORRELATED = "mean", "effect", "rank correlation"
"""Kinds of rows."""
LINK = link_rule("association")


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    kind: str
    group: str = ""
    """Of a mean or a rank correlation: which runs."""
    value: float
    low: float = float("nan")
    high: float = float("nan")
    p: float = float("nan")
    exact: bool | None = None
    """Of a rank correlation: all orders were counted for p."""
    n: int
    """Seeds of a mean or of a difference within seeds; else runs."""
    counted: str
    answer: str = MISSING


def associated_runs(results: StudyResults) -> pd.DataFrame:
    """The runs whose models have learned positions. None such is an `InputError`."""
    if ASSOCIATION not in results.runs or results.runs[ASSOCIATION].isna().all():
        raise InputError("no run has learned positions whose association was measured")
    return results.runs.dropna(subset=[ASSOCIATION]).astype({ASSOCIATION: "float64", "min_mad": "float64"})


def chance_association(settings: Mapping[str, object]) -> float | None:
    """What positions of a random order give on the models' grid; None where the settings do not say the grid."""
    side = patches_per_side(settings)
    return None if side is None else neighbour_association(torch.zeros(side**2, side**2), (side, side)).chance


def association_rows(results: StudyResults) -> list[Row]:
    """All that is said of association."""
    return [*_means(results), *_effects(results), *_correlations(results)]


def association_table(results: StudyResults) -> Table:
    """Means of the groups, effects on association, and its rank correlation with the smallest distance."""
    rows = association_rows(results)
    chance = chance_association(results.settings)
    of_chance = () if chance is None else (f"By chance association would be {rounded(chance)} on the models' grid.",)
    return Table(
        name="position-association",
        title=f"{results.name}: do learned positions know neighbours, and do local heads go with it?",
        numbers=pd.DataFrame([_numbers(row, results.scale, chance) for row in rows]),
        shown=pd.DataFrame([_shown(row) for row in rows]),
        notes=(
            WHAT_ASSOCIATION_IS,
            *of_chance,
            "Means: over seeds, of what the group's runs of each seed have on average; 95 % intervals (Student's t).",
            *_how_effects(results),
            CORRELATION,
            "A factor that moves both makes them correlate over all runs; what is left within a group is the link "
            "itself.",
            f"Does CutMix, or Modern, raise association? {SIGN}",
            f"Do runs with more association have a more local head? {LINK}",
            NOT_CORRECTED,
            *missing_notes(results),
        ),
    )


def _means(results: StudyResults) -> list[Row]:
    runs, factor, rows = associated_runs(results), grouping(results), []
    for level, words in groups(results).items():
        by_seed = runs[runs[factor] == level].groupby("seed")[ASSOCIATION].mean()
        ours = mean_interval(by_seed)
        if ours.n:
            rows.append(
                Row(
                    what=f"association, {words}",
                    kind=MEAN,
                    group=words,
                    value=ours.mean,
                    low=ours.low,
                    high=ours.high,
                    n=ours.n,
                    counted="seeds",
                )
            )
    return rows


def _effects(results: StudyResults) -> list[Row]:
    """What each factor does to association; of two protocols, what Modern does within seeds. Only CutMix is judged."""
    runs, factor = associated_runs(results), grouping(results)
    if factor == PROTOCOL:
        first, last = results.factors[factor][0], results.factors[factor][-1]
        ours = paired_difference(runs.assign(condition=runs[factor]), last, first, ASSOCIATION)
        if not ours.n:
            return []
        estimate = Estimate.of(ours)
        return [_effect_row(f"change of association, {last} minus {first}", estimate, n=ours.n, counted="seeds")]
    found = []
    for row in records(factorial_effects(runs, results.factors, ASSOCIATION).table):
        if row["order"] == 1:
            estimate = Estimate(value=row["effect"], low=row["low"], high=row["high"])
            what = f"effect on association, {FACTOR_NAMES.get(row['term'], row['term'])}"
            is_key = row["term"] == factor
            found.append(_effect_row(what, estimate, n=len(runs), counted="runs", p=row["p"], is_key=is_key))
    return found


def _effect_row(
    what: str, estimate: Estimate, *, n: int, counted: str, p: float = float("nan"), is_key: bool = True
) -> Row:
    answer = judge_sign(estimate, sign=1, words="", n=n).verdict if is_key else MISSING
    value, low, high = estimate.value, estimate.low, estimate.high
    return Row(what=what, kind=EFFECT, value=value, low=low, high=high, p=p, n=n, counted=counted, answer=answer)


def _correlations(results: StudyResults) -> list[Row]:
    return [
        Row(
            what=f"association and min MAD, {words}",
            kind=CORRELATED,
            group=words,
            value=found.value,
            low=found.low,
            high=found.high,
            p=found.p,
            exact=found.exact,
            n=found.n,
            counted="runs",
            answer=link(found),
        )
        for words, found in correlations(results, ASSOCIATION).items()
    ]


def _how_effects(results: StudyResults) -> list[str]:
    if grouping(results) == PROTOCOL:
        return [
            "The change is taken within seeds, with Student's t interval; the protocols differ in more than CutMix."
        ]
    effects = factorial_effects(associated_runs(results), results.factors, ASSOCIATION)
    told = (
        "Effects: the mean with a factor minus the mean without it, by ordinary least squares with all interactions, "
        f"seeds as replicates; {effects.num_runs} runs, {effects.residual_df} of them left over to estimate the noise."
    )
    return [told, *(f"{note[0].upper()}{note[1:]}." for note in effects.notes)]


def _numbers(row: Row, scale: str, chance: float | None) -> dict[str, object]:
    ends = {"value": row.value, "low": row.low, "high": row.high, "p": row.p, "exact": row.exact}
    counted = {"n": row.n, "counted": row.counted, "answer": row.answer, "chance": chance, "scale": scale}
    return {"what": row.what, "kind": row.kind, **ends, **counted}


def _shown(row: Row) -> dict[str, str]:
    signed = row.kind != MEAN
    low, high = (rounded(end, signed=signed) for end in (row.low, row.high))
    return {
        "what": row.what,
        "value": rounded(row.value, signed=signed),
        "95 % interval": span(low, high),
        "p": probability(row.p) + (" (exact)" if row.exact else ""),
        "from": f"{row.n} {row.counted}",
        "answer": row.answer if row.answer == MISSING else f"**{row.answer}**",
    }


# Association of learned positions against the distance of the most local head, run by run.


def association_and_distance(results: StudyResults) -> Drawing:
    """A mark per run, by CutMix; a line at what chance gives, or a word where that is far away."""
    associated_runs(results)  # which says what is missing
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


# The bridge from S3 to S1 in a folder of its own: does CutMix teach positions their neighbours, and do heads that look
# near come with it? From the results of any study of CutMix or of S1's protocols; no weights are needed.


TITLE = "From S3 to S1"
FIGURE = "position-association"
SOURCE = "S3's patch association, in models of S1"
COLUMNS = (ASSOCIATION, "min_mad", "test_acc")


def write_bridge(study: Path, folder: Path) -> tuple[Path, ...]:
    """Write runs.csv, tables/, figures/, verdict.md and provenance.json from the results in a study's folder, with run
    folders or without; the files written. The same results give the same bytes."""
    results = StudyResults.read(study)
    runs = associated_runs(results)
    written = bridge_report(results).write(folder)
    write_text(folder / "runs.csv", runs[["run", "condition", *results.factors, "seed", *COLUMNS]].to_csv(index=False))
    path = study / "provenance.json"
    provenance = read_object(path, missing=f"{path} is missing") if path.exists() else {}
    write_json(folder / "provenance.json", {"study": results.name, **provenance})
    return (*written, folder / "runs.csv", folder / "provenance.json")


def bridge_report(results: StudyResults) -> Report:
    about = (*scale_notes(results), *assumed_notes(results))
    tables = [conditions_table(results), association_table(results)]
    return Report(
        title=f"{TITLE}, {results.name}",
        tables=[dataclasses.replace(table, notes=(*table.notes, *about)) for table in tables],
        figures={FIGURE: partial(association_and_distance, results)},
        verdicts=Verdicts(
            judgements=[judge(question, results) for question in questions(results)],
            title=f"{TITLE}: the answers of {results.name}",
            scale=results.scale,
            paper=None,
            whose_questions=" of our own",
            runs=f"{len(associated_runs(results))} runs.",
            notes=(
                *scale_notes(results),
                "± is half a 95 % interval; the table of position association says how each was estimated.",
                WHAT_ASSOCIATION_IS,
                *missing_notes(results),
            ),
        ),
        notes=(*missing_notes(results), *about),
    )


def questions(results: StudyResults) -> tuple[Claim, ...]:
    """The two questions; the second over all runs, and within those that have CutMix and those that have not."""
    levels = results.factors[grouping(results)]
    whose = f"{levels[-1]}, which has CutMix," if grouping(results) == PROTOCOL else "CutMix"
    link = "Do runs whose positions are more associated have a more local head"
    return (
        Claim(
            id="association",
            text=f"Does {whose} raise the association of learned positions with neighbours?",
            source=SOURCE,
            rule=SIGN,
            judge=_judge_effect,
        ),
        *(
            Claim(
                id=f"link-{group}",
                text=f"{link}: {group}?",
                source=SOURCE,
                rule=LINK,
                judge=partial(judge_link, column=ASSOCIATION, words=group),
            )
            for group in (ALL_RUNS, *groups(results).values())
        ),
    )


def _judge_effect(results: StudyResults) -> Finding:
    rows = association_rows(results)
    judged = [row for row in rows if row.kind == EFFECT and row.answer != MISSING]
    if not judged:
        raise InputError("there are no runs to compare with those that have CutMix")
    (row,) = judged
    means = [f"{rounded(mean.value)} {mean.group}" for mean in rows if mean.kind == MEAN]
    told = f"{', '.join(means)}: {mean_and_ends(row.value, row.low, row.high)} ({row.n} {row.counted})"
    seeds = int(associated_runs(results)["seed"].nunique())
    return Finding(verdict=row.answer, ours=told, value=row.value, low=row.low, high=row.high, n=seeds)


def conditions_table(results: StudyResults) -> Table:
    """A row per condition."""
    runs = associated_runs(results)
    rows, shown = [], []
    for condition in ordered_conditions(results):
        here = runs[runs["condition"] == condition]
        if here.empty:
            continue
        ours = {column: mean_interval(here[column].dropna()) for column in COLUMNS}
        flat = {f"{column}_{part}": x for column, each in ours.items() for part, x in dataclasses.asdict(each).items()}
        rows.append({"condition": condition, "seeds": len(here), "scale": results.scale, **flat})
        shown.append(
            {
                "condition": condition,
                "seeds": str(len(here)),
                "association": with_interval(ours[ASSOCIATION]),
                "min MAD": with_interval(ours["min_mad"]),
                "test accuracy, %": with_interval(ours["test_acc"], scale=100, digits=2),
            }
        )
    return Table(
        name="conditions",
        title=f"{results.name}: learned positions and the most local head, by condition",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(INTERVALS, WHAT_ASSOCIATION_IS, *missing_notes(results)),
    )
