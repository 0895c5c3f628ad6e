"""From a finished study's folder, with its runs and weights, to what is kept of it: a folder of results."""

import shutil
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import check_output_folder, write_text
from nearsight.report.study.writing import write_study_report
from nearsight.study import StudyFolder, StudyResults

KEPT = ("study.json", "provenance.json")
"""What is kept as it is."""


def write_results(study: Path, folder: Path) -> tuple[Path, ...]:
    """Write the tables of the runs, what they are of, and the report into a folder of results; the files written.

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
    for name in KEPT:
        if study != folder and (study / name).exists():
            write_text(folder / name, (study / name).read_text(encoding="utf-8"))
    written = (*(folder / name for name in KEPT if (folder / name).exists()), *results.write_tables(folder))
    return (*written, *write_study_report(results, folder))
