"""The bridge from S3 to S1 in a folder of its own: does CutMix teach positions their neighbours, and do heads that look
near come with it? From the results of any study of CutMix or of S1's protocols; no weights are needed."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from nearsight.errors import InputError
from nearsight.files import read_object, write_json, write_text
from nearsight.report.figures import save_figure
from nearsight.report.study.by_cutmix import ALL_RUNS, PROTOCOL, grouping, groups, judge_link
from nearsight.report.study.captioned import write_captioned
from nearsight.report.study.claim import Claim
from nearsight.report.study.conditions import ordered_conditions
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.judged import counted, judged_rows, rules_in_words
from nearsight.report.study.notes import assumed_notes, missing_notes, scale_notes
from nearsight.report.study.positions.association import (
    EFFECT,
    LINK,
    MEAN,
    associated_runs,
    association_rows,
)
from nearsight.report.study.positions.parts import ASSOCIATION_FIGURES, ASSOCIATION_TABLES
from nearsight.report.study.positions.positional import ASSOCIATION, WHAT_ASSOCIATION_IS
from nearsight.report.study.questions import SHORT, SIGN
from nearsight.report.study.rules import Finding, Verdict
from nearsight.report.study.table import MISSING, Table, mean_and_ends, rounded, with_interval
from nearsight.report.study.tables_conditions import INTERVALS
from nearsight.report.study.verdict import Judgement, judge_claim
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

TITLE = "From S3 to S1"
SOURCE = "S3's patch association, in models of S1"
COLUMNS = (ASSOCIATION, "min_mad", "test_acc")


def write_bridge(study: Path, folder: Path) -> tuple[Path, ...]:
    """Write runs.csv, tables/, figures/, verdict.md and provenance.json from the results in a study's folder, with run
    folders or without; the files written. The same results give the same bytes."""
    results = StudyResults.read(study)
    runs = associated_runs(results)
    judgements = [Judgement(claim=claim, finding=judge_claim(claim, results)) for claim in questions(results)]
    verdict = _verdict_table(results, judgements)
    about = (*scale_notes(results), *assumed_notes(results))
    tables = [make(results) for make in (conditions_table, *ASSOCIATION_TABLES)]
    tables = [dataclasses.replace(table, notes=(*table.notes, *about)) for table in tables]
    written = [path for table in (*tables, verdict) for path in table.write(folder / "tables")]
    figures = {name: partial(_write_figure, draw, results) for name, draw in ASSOCIATION_FIGURES.items()}
    notes = (*missing_notes(results), *about)
    written += write_captioned(folder / "figures", f"{TITLE}, {results.name}", figures, notes)
    of_runs = runs[["run", "condition", *results.factors, "seed", *COLUMNS]]
    write_text(folder / "runs.csv", of_runs.to_csv(index=False))
    write_text(folder / "verdict.md", _verdict_markdown(verdict, results, judgements))
    write_json(folder / "provenance.json", {"study": results.name, **_provenance(study / "provenance.json")})
    return (*written, *(folder / name for name in ("runs.csv", "verdict.md", "provenance.json")))


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


def _verdict_table(results: StudyResults, judgements: list[Judgement]) -> Table:
    return Table(
        name="verdict",
        title=f"{TITLE}: the answers of {results.name}",
        **judged_rows(judgements, results.scale, of_paper=False),
        notes=(
            *scale_notes(results),
            "± is half a 95 % interval; the table of position association says how each was estimated.",
            WHAT_ASSOCIATION_IS,
            *missing_notes(results),
        ),
    )


def _verdict_markdown(verdict: Table, results: StudyResults, judgements: list[Judgement]) -> str:
    found = [str(judgement.finding.verdict) for judgement in judgements]
    told = counted(found, (*map(str, Verdict), *SHORT))
    summary = f"Of {len(found)} questions of our own: {told}. {len(associated_runs(results))} runs."
    title, table = verdict.markdown().split("\n", maxsplit=1)
    return "\n".join([title, "", summary, table, *rules_in_words(judgements)])


def _write_figure(
    draw: Callable[[StudyResults], Drawing], results: StudyResults, folder: Path, name: str
) -> tuple[list[Path], str]:
    drawing = draw(results)
    return [*save_figure(drawing.figure, folder, name)], drawing.caption


def _provenance(path: Path) -> dict[str, object]:
    """That of the study; nothing where it has none."""
    return read_object(path, missing=f"{path} is missing") if path.exists() else {}
