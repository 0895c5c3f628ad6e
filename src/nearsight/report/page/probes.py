"""The page of probed models: what their features are worth, side by side."""

from collections.abc import Mapping
from typing import Any

from nearsight.errors import InputError
from nearsight.report.page.document import Document, Section
from nearsight.report.page.finding import Words, judged_in_words
from nearsight.report.page.pieces import citing_html, command_html, figure_html
from nearsight.report.page.study_tables import record_table, table_html, text_html
from nearsight.report.probes.measures import main_measures, title_of
from nearsight.report.probes.results import ProbeResults
from nearsight.report.probes.tables import OVER_IMAGES, models_table
from nearsight.report.probes.verdict import judge_claims, verdict_summary, verdict_table
from nearsight.report.probes.writing import drawings_of, tables_of_conditions


def probes_page_html(results: ProbeResults, *, provenance: Mapping[str, Any] | None = None) -> str:
    """The text of the page."""
    if results.rows.empty:
        raise InputError("no model has been probed yet, so there is nothing to report")
    judgements = judge_claims(results)
    judged = [(judgement.claim.text, judgement.finding) for judgement in judgements]
    words = judged_in_words(judged, are_questions=False) or _best_in_words(results)
    summary = (verdict_summary(results, judgements),) if judgements else ()
    hero, *figures = (
        figure_html(name, drawing.figure, drawing.caption, drawing.caption)
        for name, drawing in ((name, draw()) for name, draw in drawings_of(results).items())
    )
    command = (provenance or {}).get("command")
    sections = [
        Section(name="results", heading="Models", body=table_html(models_table(results))),
        *(
            Section(name=shown.name, heading=shown.name.capitalize(), body=table_html(shown))
            for shown in tables_of_conditions(results)
        ),
        Section(
            name="claims",
            heading="What reproduces",
            body=table_html(verdict_table(results, judgements), kind="words") if judgements else "",
        ),
        Section(name="figures", heading="Figures", body="".join(figures)),
        Section(name="provenance", heading="Provenance", body=record_table("Provenance", provenance or {})),
        Section(name="again", heading="Run it again", body=command_html(None if command is None else str(command))),
        Section(name="cite", heading="Cite it", body=citing_html()),
    ]
    return Document(
        title=results.name,
        headline=text_html(words.headline),
        details=[text_html(sentence) for sentence in (*words.sentences, *summary, *results.scale_notes)],
        hero=hero,
        sections=sections,
    ).html()


def _best_in_words(results: ProbeResults) -> Words:
    """The model that does best in the first probe, and the one that does worst."""
    measure = main_measures(results.measures)[0]
    scores = sorted(results.scores(measure).items(), key=lambda item: -item[1].value)
    told = [
        f"“{model}” with {100 * score.value:.1f} %"
        + (f" ({100 * score.low:.1f} to {100 * score.high:.1f})" if score.has_interval else "")
        for model, score in scores
    ]
    beside = f"; at the other end is {told[-1]}" if len(told) > 1 else ""
    title = title_of(measure)
    return Words(headline=f"{title[:1].upper()}{title[1:]}: best is {told[0]}{beside}.", sentences=(OVER_IMAGES,))
