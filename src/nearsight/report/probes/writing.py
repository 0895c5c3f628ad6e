"""All files of a report on probes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.report.figures import save_figure
from nearsight.report.probes.differences import differences
from nearsight.report.probes.figures import differences_of_conditions, scores_of_models
from nearsight.report.probes.measures import main_measures
from nearsight.report.probes.results import ProbeResults
from nearsight.report.probes.tables import conditions_table, differences_table, models_table
from nearsight.report.probes.verdict import judge_claims, verdict_markdown, verdict_table
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.table import Table

DIFFERENCES = "differences-"
"""How the names of figures of differences begin."""

_OF_CONDITIONS = (
    "verdict.md",
    *(f"tables/{name}.*" for name in ("conditions", "differences", "verdict")),
    f"figures/{DIFFERENCES}*",
)
"""Files that a report on models without conditions does not have."""


def write_probe_report(results: ProbeResults, folder: Path) -> tuple[Path, ...]:
    """Write probes.csv, probes.md and figures/ and, of several conditions, tables/ of them; where S2 claims something
    about them, verdict.md, too. The files written.

    Every file is replaced whole, and the same results give the same bytes. What an earlier report on other models left
    there and this one does not have goes: a verdict must not outlive its numbers.
    """
    if results.rows.empty:
        raise InputError("no model has been probed yet, so there is nothing to report")
    written = [*results.write(folder), folder / "probes.md"]
    write_text(folder / "probes.md", models_table(results).markdown())
    tables = tables_of_conditions(results)
    if judgements := judge_claims(results):
        tables.append(verdict_table(results, judgements))
        write_text(folder / "verdict.md", verdict_markdown(results, judgements))
        written.append(folder / "verdict.md")
    written += [path for table in tables for path in table.write(folder / "tables")]
    captions = [f"# {results.name}: the figures", ""]
    for name, draw in drawings_of(results).items():
        drawing = draw()
        written += save_figure(drawing.figure, folder / "figures", name)
        captions.append(f"- **{name}**: {drawing.caption}")
    written.append(folder / "figures" / "captions.md")
    write_text(written[-1], "\n".join(captions) + "\n")
    for pattern in _OF_CONDITIONS:
        for path in set(folder.glob(pattern)) - set(written):
            path.unlink()
    return tuple(written)


def tables_of_conditions(results: ProbeResults) -> list[Table]:
    """None where the models stand for themselves; no differences of a single condition."""
    if results.num_conditions == 0:
        return []
    return [conditions_table(results), *([differences_table(results)] if results.num_conditions > 1 else [])]


def drawings_of(results: ProbeResults) -> dict[str, Callable[[], Drawing]]:
    """The figures by their name; the first is of all models."""
    drawings: dict[str, Callable[[], Drawing]] = {"probes": partial(scores_of_models, results)}
    if results.num_conditions > 1:
        drawings |= {
            f"{DIFFERENCES}{measure.replace('_', '-')}": partial(differences_of_conditions, results, measure)
            for measure in main_measures(results.measures)
            if differences(results, measure)
        }
    return drawings
