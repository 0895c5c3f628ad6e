"""The page of a simulation: its finding, the figures that show it, its claims and its conditions."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nearsight.errors import InputError
from nearsight.report.page.document import Document, Section
from nearsight.report.page.finding import Words, judged_in_words
from nearsight.report.page.pieces import citing_html, figure_html, json_html, study_again_html
from nearsight.report.page.study_tables import opened_html, record_table, table_html, text_html
from nearsight.report.structure.numbers import notes_of
from nearsight.report.structure.tables import structure_tables
from nearsight.report.structure.verdict import judge_claims, verdict_summary, verdict_table
from nearsight.report.structure.writing import FIGURES
from nearsight.study.simulation_folder import SimulationResults


def simulation_page_html(results: SimulationResults, *, provenance: Mapping[str, Any] | None = None) -> str:
    """The text of the page."""
    if results.runs.empty:
        raise InputError(f"study {results.name!r} has no cell that is done, so there is nothing to report")
    judgements = judge_claims(results)
    conditions, *others = structure_tables(results)
    hero, *figures = _figures(results) or [""]
    judged = [(judgement.claim.text, judgement.finding) for judgement in judgements]
    words = judged_in_words(judged, are_questions=False)
    summary = (verdict_summary(results, judgements),) if judgements else ()
    words = words or Words(headline=f"{len(results.runs)} of {len(results.cells)} cells are done.", sentences=())
    again = study_again_html(
        results.name, seeds={cell.seed for cell in results.cells}, scale=results.scale, runner="run_simulation"
    )
    sections = [
        Section(name="results", heading="Results", body=table_html(conditions)),
        Section(
            name="claims",
            heading="What reproduces",
            body=table_html(verdict_table(results, judgements), kind="words") if judgements else "",
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


def _figures(results: SimulationResults) -> list[str]:
    drawn = []
    for name, draw in FIGURES.get(results.name, {}).items():
        with suppress(InputError):  # the cells there are cannot give it
            drawing = draw(results)
            drawn.append(figure_html(name, drawing.figure, drawing.caption, drawing.caption))
    return drawn


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
