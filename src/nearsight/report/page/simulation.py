"""The page of a simulation: its finding, the figures that show it, its claims and its conditions."""

from collections.abc import Mapping
from typing import Any

from nearsight.report.page.document import Document, Section
from nearsight.report.page.finding import Words, judged_in_words
from nearsight.report.page.html_tables import opened_html, record_table, table_html, text_html
from nearsight.report.page.pieces import citing_html, drawn_html, json_html, study_again_html
from nearsight.report.simulations import notes_of, simulation_report
from nearsight.study.simulation_folder import SimulationResults


def simulation_page_html(results: SimulationResults, *, provenance: Mapping[str, Any] | None = None) -> str:
    """The text of the page."""
    report = simulation_report(results)
    conditions, *others = report.tables
    hero, *figures = drawn_html(report.figures) or [""]
    verdicts = report.verdicts
    words = judged_in_words(verdicts) if verdicts else None
    summary = (verdicts.summary(),) if verdicts else ()
    words = words or Words(headline=f"{len(results.runs)} of {len(results.cells)} cells are done.", sentences=())
    again = study_again_html(
        results.name, seeds={cell.seed for cell in results.cells}, scale=results.scale, runner="run_simulation"
    )
    sections = [
        Section(name="results", heading="Results", body=table_html(conditions)),
        Section(
            name="claims",
            heading="What reproduces",
            body=table_html(verdicts.table(), kind="words") if verdicts else "",
        ),
        Section(name="figures", heading="Figures", body="".join(figures)),
        Section(name="tables", heading="Further tables", body="".join(map(opened_html, others))),
        Section(name="provenance", heading="Provenance", body=record_table("Provenance", provenance or {})),
        Section(name="configuration", heading="Full configuration", body=_configuration(results)),
        Section(name="again", heading="Run it again", body=again),
        Section(name="cite", heading="Cite it", body=citing_html()),
    ]
    return Document(
        title=results.name,
        headline=text_html(words.headline),
        details=[text_html(sentence) for sentence in (*words.sentences, *summary, *notes_of(results))],
        hero=hero,
        sections=sections,
    ).html()


def _configuration(results: SimulationResults) -> str:
    record = {
        "study": results.name,
        "scale": results.scale,
        "settings": results.settings,
        "assumed": list(results.assumed),
        "conditions": results.configs,
        "seeds": sorted({cell.seed for cell in results.cells}),
    }
    return json_html("What all cells share, and what sets conditions apart", record)
