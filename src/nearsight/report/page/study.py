"""The page of a study: its finding, its conditions, claims, heads, courses and effects."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nearsight.errors import InputError
from nearsight.report.claims import Verdicts
from nearsight.report.conditions import with_attention
from nearsight.report.marks import Drawing
from nearsight.report.most_local import minimum
from nearsight.report.page import captions
from nearsight.report.page.document import BodyPart, Document, Section
from nearsight.report.page.finding import Words, judged_in_words, locality_in_words, warnings_in_words
from nearsight.report.page.html_tables import opened_html, record_table, runs_table, table_html, text_html
from nearsight.report.page.pieces import (
    chart_html,
    citing_html,
    drawn_html,
    figure_html,
    json_html,
    study_again_html,
    terms_html,
)
from nearsight.report.page.study_data import of_study
from nearsight.report.studies import report_of
from nearsight.report.study_figures import maps, plane, profiles
from nearsight.report.study_tables import conditions_table
from nearsight.report.tables import Table
from nearsight.report.writing import of_heads, study_tables, study_verdicts
from nearsight.study.results import StudyResults

Draw = Callable[[StudyResults], Drawing]
INTERVALS = (
    "± is half the 95 % interval of the mean over seeds (Student’s t); with one seed there is none. Effects come from "
    "ordinary least squares with seeds as replicates."
)


def study_page_html(
    results: StudyResults,
    *,
    provenance: Mapping[str, Any] | None = None,
    explorer: BodyPart | None = None,
    with_stills: bool = True,
    with_tests: bool = True,
    banner: str = "",
    refresh_seconds: int | None = None,
) -> str:
    """The text of the page.

    `with_stills`: draw the figures that stand for the charts on paper and without scripts, which takes seconds.
    `with_tests`: judge the claims and test differences, which takes long with many runs.
    """
    if results.runs.empty:
        raise InputError(f"study {results.name!r} has no complete run yet, so there is nothing to report")
    verdicts = study_verdicts(results) if with_tests else None
    found = {table.name: table for table in (study_tables(results) if with_tests else [conditions_table(results)])}
    data = of_study(results, found.get("effects"))
    words = _words(results, verdicts)
    measured = with_attention(results)
    hero_name, hero = _hero(results)
    seeds = set(results.seeds) or {int(seed) for seed in results.runs["seed"]}
    again = study_again_html(results.name, seeds=seeds, scale=results.scale, runner="run_study")
    sections = [
        Section(name="results", heading="Results", body=table_html(found.pop("conditions"))),
        Section(
            name="claims",
            heading=_claims_heading(results),
            body=table_html(verdicts.table(), kind="words") if verdicts else "",
        ),
        *([] if measured.runs.empty else _head_sections(measured, with_stills)),
        Section(name="explorer", heading="Where each head looks", body="" if explorer is None else explorer.html()),
        Section(name="training", heading="Training", body=chart_html("training", captions.TRAINING)),
        Section(name="effects", heading="Effects of the factors", body=_effects(found)),
        Section(name="tables", heading="Further tables", body="".join(map(opened_html, found.values()))),
        Section(
            name="figures", heading="Figures of this study", body=_figures(results, hero_name) if with_stills else ""
        ),
        Section(name="runs", heading="Every run", body=runs_table(results)),
        Section(name="terms", heading="How to read this", body=terms_html(None, INTERVALS)),
        Section(name="provenance", heading="Provenance", body=record_table("Provenance", provenance or {})),
        Section(name="configuration", heading="Full configuration", body=_configuration(results)),
        Section(name="again", heading="Run it again", body=again),
        Section(name="cite", heading="Cite it", body=citing_html()),
    ]
    return Document(
        title=results.name,
        headline=text_html(words.headline),
        details=[text_html(sentence) for sentence in (*words.sentences, *warnings_in_words(results))],
        hero=hero,
        sections=sections,
        data=data,
        explorer=explorer,
        banner=banner,
        refresh_seconds=refresh_seconds,
    ).html()


def _words(results: StudyResults, verdicts: Verdicts | None) -> Words:
    found = None if verdicts is None or report_of(results.name).is_about_locality else judged_in_words(verdicts)
    words = found or locality_in_words(results)
    return Words(headline=words.headline, sentences=(*words.sentences, *((verdicts.summary(),) if verdicts else ())))


def _hero(results: StudyResults) -> tuple[str, str]:
    """The figure that persuades, and its name: that of the most local heads, or what a study has of its own."""
    own = report_of(results.name)
    draws: dict[str, Callable[[StudyResults], Drawing]] = {} if own.is_about_locality else dict(own.figures)
    draws["minimum"] = partial(of_heads, minimum)
    for name, draw in draws.items():
        if html := drawn_html({"finding": partial(draw, results)}):
            return name, html[0]
    return "", ""


def _claims_heading(results: StudyResults) -> str:
    return "The answers" if report_of(results.name).paper is None else "What reproduces"


def _head_sections(measured: StudyResults, with_stills: bool) -> list[Section]:
    parts: list[tuple[str, str, Draw, str]] = [
        ("profiles", "Profiles", profiles, captions.PROFILES_OF_STUDY),
        ("plane", "Distance and focus", plane, captions.PLANE),
        ("heatmaps", "Every head", maps, captions.HEATMAPS_OF_STUDY),
    ]
    return [
        Section(
            name=name,
            heading=heading,
            body=chart_html(name, caption, _still(name, draw, measured) if with_stills else ""),
        )
        for name, heading, draw, caption in parts
    ]


def _still(name: str, draw: Draw, results: StudyResults) -> str:
    try:
        drawing = draw(results)
    except InputError:  # the runs there are cannot give it; the chart still can
        return ""
    return figure_html(name, drawing.figure, drawing.caption, drawing.caption, is_still=True)


def _effects(found: dict[str, Table]) -> str:
    """The chart, the table of the whole model, and that of the layers to open; they leave the other tables."""
    table, by_layer = found.pop("effects", None), found.pop("effects-by-layer", None)
    if table is None:
        return ""
    layers = "" if by_layer is None else opened_html(by_layer)
    return chart_html("effects", captions.EFFECTS) + table_html(table) + layers


def _figures(results: StudyResults, hero: str) -> str:
    """Those that only this study has, but for the one that stands above."""
    own = report_of(results.name).figures
    return "".join(drawn_html({name: partial(draw, results) for name, draw in own.items() if name != hero}))


def _configuration(results: StudyResults) -> str:
    record = {
        "study": results.name,
        "scale": results.scale,
        "factors": results.factors,
        "conditions": list(results.planned) or list(dict.fromkeys(results.runs["condition"])),
        "seeds": sorted({int(seed) for seed in results.runs["seed"]}),
        "settings": results.settings,
        "assumed": list(results.assumed),
    }
    return json_html("What all runs share, and what is varied", record)
