"""The page of a study: its finding, its conditions, claims, heads, courses and effects."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nearsight.errors import InputError
from nearsight.report.page import captions
from nearsight.report.page.document import BodyPart, Document, Section
from nearsight.report.page.finding import Words, judged_in_words, locality_in_words, warnings_in_words
from nearsight.report.page.pieces import (
    chart_html,
    citing_html,
    figure_html,
    json_html,
    study_again_html,
    terms_html,
)
from nearsight.report.page.study_data import of_study
from nearsight.report.page.study_tables import opened_html, record_table, runs_table, table_html, text_html
from nearsight.report.study.conditions import with_attention
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.figure1_profiles import profiles
from nearsight.report.study.figure2_plane import plane
from nearsight.report.study.figure3_heatmaps import maps
from nearsight.report.study.figure4_minimum import minimum
from nearsight.report.study.paper import PAPER
from nearsight.report.study.registry import parts_of
from nearsight.report.study.table import Table
from nearsight.report.study.tables import study_tables
from nearsight.report.study.tables_conditions import conditions_table
from nearsight.report.study.verdict import Judgement, judge_claims, verdict_summary, verdict_table
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
    judgements = judge_claims(results) if with_tests else []
    found = {table.name: table for table in (study_tables(results) if with_tests else [conditions_table(results)])}
    data = of_study(results, found.get("effects"))
    words = _words(results, judgements)
    measured = with_attention(results)
    hero_name, hero = _hero(results)
    seeds = set(results.seeds) or {int(seed) for seed in results.runs["seed"]}
    again = study_again_html(results.name, seeds=seeds, scale=results.scale, runner="run_study")
    sections = [
        Section(name="results", heading="Results", body=table_html(found.pop("conditions"))),
        Section(name="claims", heading=_claims_heading(results), body=_claims(results, judgements)),
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


def _words(results: StudyResults, judgements: Sequence[Judgement]) -> Words:
    judged = [(judgement.claim.text, judgement.finding) for judgement in judgements]
    summary = (verdict_summary(results, list(judgements)),) if judgements else ()
    parts = parts_of(results.name)
    found = None if parts.paper == PAPER else judged_in_words(judged, are_questions=parts.paper is None)
    words = found or locality_in_words(results)
    return Words(headline=words.headline, sentences=(*words.sentences, *summary))


def _hero(results: StudyResults) -> tuple[str, str]:
    """The figure that persuades, and its name: S1's is that of the most local heads, other studies have their own."""
    parts = parts_of(results.name)
    own = {} if parts.paper == PAPER else parts.figures
    for name, draw in {**own, "minimum": _of_heads(minimum)}.items():
        with suppress(InputError):  # the runs there are cannot give it
            drawing = draw(results)
            return name, figure_html("finding", drawing.figure, drawing.caption, drawing.caption)
    return "", ""


def _of_heads(draw: Draw) -> Draw:
    def drawn(results: StudyResults) -> Drawing:
        measured = with_attention(results)
        if measured.runs.empty:
            raise InputError("no network of the study has attention")
        return draw(measured)

    return drawn


def _claims_heading(results: StudyResults) -> str:
    return "The answers" if parts_of(results.name).paper is None else "What reproduces"


def _claims(results: StudyResults, judgements: Sequence[Judgement]) -> str:
    return table_html(verdict_table(results, list(judgements)), kind="words") if judgements else ""


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
    drawn = []
    for name, draw in parts_of(results.name).figures.items():
        with suppress(InputError):
            if name == hero:
                continue
            drawing = draw(results)
            drawn.append(figure_html(name, drawing.figure, drawing.caption, drawing.caption))
    return "".join(drawn)


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
