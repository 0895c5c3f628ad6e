"""The report of a study: what every study has, except what does not apply to it, and what is declared for it."""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import check_output_folder, write_json, write_text
from nearsight.report.claims import Verdicts
from nearsight.report.conditions import assumed_notes, missing_notes, scale_notes, with_attention
from nearsight.report.marks import Animation, Drawing
from nearsight.report.most_local import minimum
from nearsight.report.reports import Report
from nearsight.report.studies import report_of
from nearsight.report.study_figures import key_conditions, maps, plane, profiles
from nearsight.report.study_tables import common_tables
from nearsight.report.tables import OF_TWO, Table
from nearsight.study import StudyFolder, StudyResults
from nearsight.study.results import read_description

FIGURES: dict[str, Callable[[StudyResults], Drawing]] = {
    "figure-1-profiles": profiles,
    "figure-2-plane": plane,
    "figure-3-heatmaps": maps,
    "figure-4-minimum-mad": minimum,
    "figure-5-key-conditions": key_conditions,
}
KEPT = ("plan.json", "provenance.json")
"""What is kept of a study as it is, beside study.json."""


def study_report(results: StudyResults) -> Report:
    """An incomplete study gives what it can: what is missing is named in the tables and captions."""
    if results.runs.empty:
        raise InputError(f"study {results.name!r} has no complete run yet, so there is nothing to report")
    own = report_of(results.name)
    draws: dict[str, Callable[[StudyResults], Drawing | Animation]] = {
        **{name: partial(of_heads, draw) for name, draw in FIGURES.items() if name not in own.without},
        **own.figures,
        **own.animations,
    }
    return Report(
        title=results.name,
        tables=study_tables(results),
        figures={name: partial(draw, results) for name, draw in draws.items()},
        verdicts=study_verdicts(results),
        notes=(*scale_notes(results), *missing_notes(results), *assumed_notes(results)),
    )


def study_tables(results: StudyResults) -> list[Table]:
    """What can be said with the runs there are; under every table its scale and what was assumed."""
    own = report_of(results.name)
    return [
        dataclasses.replace(table, notes=(*scale_notes(results), *table.notes, *assumed_notes(results)))
        for table in (*common_tables(results), *own.tables_of(results))
        if table.name not in own.without
    ]


def study_verdicts(results: StudyResults) -> Verdicts | None:
    """Every claim and question that the study is about, judged; None where nothing is declared under its name."""
    own = report_of(results.name)
    of_seeds = f"± is half the 95 % interval of the mean over seeds; {OF_TWO}. Differences are taken within seeds."
    of_fits = "± is half a 95 % interval; the tables say how each was estimated."
    return own.verdicts_on(
        results,
        units="runs",
        intervals=own.intervals or (of_seeds if own.paper else of_fits),
        notes=(*missing_notes(results), *assumed_notes(results)),
        warning="".join(scale_notes(results)),
    )


def of_heads(draw: Callable[[StudyResults], Drawing], results: StudyResults) -> Drawing:
    """A figure of the networks that have attention."""
    measured = with_attention(results)
    if measured.runs.empty:
        raise InputError("it is about heads, and no network of the study has attention")
    return draw(measured)


def write_study_report(results: StudyResults, folder: Path) -> tuple[Path, ...]:
    """Write the report on a study's results; the files written."""
    return study_report(results).write(folder)


def write_results(study: Path, folder: Path) -> tuple[Path, ...]:
    """From a finished study's folder, with its runs and weights, to what is kept of it, a folder of results: the tables
    of the runs, what they are of, and the report; the files written.

    The report of an earlier state there goes first, so that no table stays that is not written any more.
    """
    check_output_folder(folder)
    has_runs = (study / "runs").is_dir()
    results = StudyFolder(study).write_tables() if has_runs else StudyResults.read(study)
    if results.scale != "full":
        raise InputError(f"{study} is of {results.scale} scale, which tests the path and has no results to keep")
    if results.runs.empty:
        raise InputError(f"study {results.name!r} has no complete run yet, so there is nothing to keep")
    for name in ("tables", "figures"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_json(folder / "study.json", read_description(study))  # with the labels of this version
    for name in KEPT:
        if study != folder and (study / name).exists():
            write_text(folder / name, (study / name).read_text(encoding="utf-8"))
    kept = (folder / name for name in ("study.json", *KEPT) if (folder / name).exists())
    return (*kept, *results.write_tables(folder), *write_study_report(results, folder))
