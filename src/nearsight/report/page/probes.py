"""The page of probed models: what their features are worth, side by side."""

from collections.abc import Mapping
from typing import Any

from nearsight.report.page.document import Document, Section
from nearsight.report.page.finding import Words, judged_in_words
from nearsight.report.page.html_tables import record_table, table_html, text_html
from nearsight.report.page.pieces import citing_html, command_html, drawn_html
from nearsight.report.probe_tables import OVER_IMAGES, models_table, probe_report
from nearsight.report.probes import ProbeResults, main_measures, title_of


def probes_page_html(results: ProbeResults, *, provenance: Mapping[str, Any] | None = None) -> str:
    """The text of the page."""
    report = probe_report(results)
    verdicts = report.verdicts
    words = (judged_in_words(verdicts) if verdicts else None) or _best_in_words(results)
    summary = (verdicts.summary(),) if verdicts else ()
    hero, *figures = drawn_html(report.figures)
    command = (provenance or {}).get("command")
    sections = [
        Section(name="results", heading="Models", body=table_html(models_table(results))),
        *(Section(name=shown.name, heading=shown.name.capitalize(), body=table_html(shown)) for shown in report.tables),
        Section(
            name="claims",
            heading="What reproduces",
            body=table_html(verdicts.table(), kind="words") if verdicts else "",
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
