"""The pages of results, from a study, a simulation, or probed or changed models: the finding, the figure that shows it,
tables, claims, and all that is needed to check them."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nearsight.errors import InputError
from nearsight.report.ablated import AblatedRuns
from nearsight.report.ablated_tables import ablated_report
from nearsight.report.claims import Verdicts
from nearsight.report.conditions import missing_notes, scale_notes, with_attention
from nearsight.report.figures.style import NARROW
from nearsight.report.marks import Drawing
from nearsight.report.most_local import minimum
from nearsight.report.page import charts
from nearsight.report.page.document import (
    BodyPart,
    Document,
    Section,
    chart_html,
    citing_html,
    command_html,
    figure_html,
    json_html,
    terms_html,
)
from nearsight.report.page.finding import Words, best_in_words, judged_in_words, locality_in_words
from nearsight.report.page.tables import opened_html, record_table, runs_table, table_html, text_html
from nearsight.report.probe_tables import models_table, probe_report
from nearsight.report.probes import ProbeResults
from nearsight.report.reports import Draw
from nearsight.report.simulations import notes_of, simulation_report
from nearsight.report.studies import report_of
from nearsight.report.study_figures import maps, plane, profiles
from nearsight.report.study_tables import conditions_table
from nearsight.report.tables import Table
from nearsight.report.writing import of_heads, study_tables, study_verdicts
from nearsight.study.recipes import SIMULATIONS, STUDIES
from nearsight.study.results import StudyResults
from nearsight.study.simulation_folder import SimulationResults

_Draw = Callable[[StudyResults], Drawing]
_INTERVALS = (
    "± is half the 95 % interval of the mean over seeds (Student’s t); of two seeds, both are in brackets. Effects "
    "come from ordinary least squares with seeds as replicates."
)


def simulation_page_html(results: SimulationResults, *, provenance: Mapping[str, Any] | None = None) -> str:
    """The text of the page."""
    report = simulation_report(results)
    conditions, *others = report.tables
    hero, *figures = _drawn_html(report.figures) or [""]
    done = Words(headline=f"{len(results.runs)} of {len(results.cells)} cells are done.", sentences=())
    seeds = {cell.seed for cell in results.cells}
    configuration = {
        "study": results.name,
        "scale": results.scale,
        "settings": results.settings,
        "assumed": list(results.assumed),
        "conditions": results.configs,
        "seeds": sorted(seeds),
    }
    return _page_html(
        results.name,
        _words(report.verdicts, lambda: done),
        notes_of(results),
        hero,
        [
            Section(name="results", heading="Results", body=table_html(conditions)),
            _claims(report.verdicts),
            Section(name="figures", heading="Figures", body="".join(figures)),
            Section(name="tables", heading="Further tables", body="".join(map(opened_html, others))),
        ],
        provenance=provenance,
        configuration=json_html("What all cells share, and what sets conditions apart", configuration),
        again=_again_html(results.name, seeds=seeds, scale=results.scale, runner="run_simulation"),
    )


def probes_page_html(results: ProbeResults, *, provenance: Mapping[str, Any] | None = None) -> str:
    """The text of the page."""
    report = probe_report(results)
    hero, *figures = _drawn_html(report.figures)
    command = (provenance or {}).get("command")
    return _page_html(
        results.name,
        _words(report.verdicts, lambda: best_in_words(results)),
        results.scale_notes,
        hero,
        [
            Section(name="results", heading="Models", body=table_html(models_table(results))),
            *(Section(name=each.name, heading=each.name.capitalize(), body=table_html(each)) for each in report.tables),
            _claims(report.verdicts),
            Section(name="figures", heading="Figures", body="".join(figures)),
        ],
        provenance=provenance,
        again=command_html(None if command is None else str(command)),
    )


def ablated_page_html(results: AblatedRuns, *, provenance: Mapping[str, Any] | None = None) -> str:
    """The text of the page."""
    report = ablated_report(results)
    conditions, *others = report.tables
    hero, *figures = _drawn_html(report.figures)
    done = Words(headline=f"The heads of {len(results.as_study().runs)} runs were changed.", sentences=())
    commands = (provenance or {}).get("commands") or [None]
    return _page_html(
        report.title,
        _words(report.verdicts, lambda: done),
        report.notes,
        hero,
        [
            Section(name="results", heading="Results", body=table_html(conditions)),
            _claims(report.verdicts, "The answers"),
            Section(name="figures", heading="Figures", body="".join(figures)),
            Section(name="tables", heading="Further tables", body="".join(map(opened_html, others))),
        ],
        provenance=provenance,
        again=command_html(commands[-1]),
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
    own, measured = report_of(results.name), with_attention(results)
    verdicts = study_verdicts(results) if with_tests else None
    found = {table.name: table for table in (study_tables(results) if with_tests else [conditions_table(results)])}
    data = charts.of_study(results, found.get("effects"))
    hero_name, hero = _hero(results)
    figures = {name: partial(draw, results) for name, draw in own.figures.items() if name != hero_name and with_stills}
    seeds = set(results.seeds) or {int(seed) for seed in results.runs["seed"]}
    configuration = {
        "study": results.name,
        "scale": results.scale,
        "factors": results.factors,
        "conditions": list(results.planned) or list(dict.fromkeys(results.runs["condition"])),
        "seeds": sorted({int(seed) for seed in results.runs["seed"]}),
        "settings": results.settings,
        "assumed": list(results.assumed),
    }
    return _page_html(
        results.name,
        _words(verdicts, lambda: locality_in_words(results), is_about_claims=not own.is_about_locality),
        (*scale_notes(results), *missing_notes(results)),
        hero,
        [
            Section(name="explorer", heading="Where heads attend", body="" if explorer is None else explorer.html()),
            Section(name="results", heading="Results", body=table_html(found.pop("conditions"))),
            _claims(verdicts, "The answers" if own.paper is None else "What reproduces"),
            *([] if measured.runs.empty else _head_sections(measured, with_stills)),
            Section(name="training", heading="Training", body=chart_html("training", charts.TRAINING)),
            Section(name="effects", heading="Effects of the factors", body=_effects(found)),
            Section(name="tables", heading="Further tables", body="".join(map(opened_html, found.values()))),
            Section(name="figures", heading="Figures of this study", body="".join(_drawn_html(figures))),
            Section(name="runs", heading="Every run", body=runs_table(results)),
            Section(name="terms", heading="How to read this", body=terms_html(None, _INTERVALS)),
        ],
        provenance=provenance,
        configuration=json_html("What all runs share, and what is varied", configuration),
        again=_again_html(results.name, seeds=seeds, scale=results.scale, runner="run_study"),
        data=data,
        explorer=explorer,
        banner=banner,
        refresh_seconds=refresh_seconds,
    )


def _page_html(
    title: str,
    words: Words,
    notes: Sequence[str],
    hero: str,
    sections: Sequence[Section],
    *,
    provenance: Mapping[str, Any] | None,
    configuration: str = "",
    again: str,
    **parts: Any,
) -> str:
    """What all of them begin and end with; `parts` are further ones of the document."""
    ending = (
        Section(name="provenance", heading="Provenance", body=record_table("Provenance", provenance or {})),
        Section(name="configuration", heading="Full configuration", body=configuration),
        Section(name="again", heading="Run it again", body=again),
        Section(name="cite", heading="Cite it", body=citing_html()),
    )
    return Document(
        title=title,
        headline=text_html(words.headline),
        details=[text_html(sentence) for sentence in (*words.sentences, *notes)],
        hero=hero,
        sections=(*sections, *ending),
        **parts,
    ).html()


def _words(verdicts: Verdicts | None, otherwise: Callable[[], Words], *, is_about_claims: bool = True) -> Words:
    """The first claim that the runs judge, or else something else; and in a line how all came out."""
    if verdicts is None:
        return otherwise()
    words = (judged_in_words(verdicts) if is_about_claims else None) or otherwise()
    return Words(headline=words.headline, sentences=(*words.sentences, verdicts.summary()))


def _claims(verdicts: Verdicts | None, heading: str = "What reproduces") -> Section:
    body = "" if verdicts is None else table_html(verdicts.table(), kind="words")
    return Section(name="claims", heading=heading, body=body)


def _drawn_html(figures: Mapping[str, Draw]) -> list[str]:
    """Those that the runs there are can give."""
    drawn = []
    for name, draw in figures.items():
        with suppress(InputError):
            drawing = draw()
            assert isinstance(drawing, Drawing), name
            drawn.append(figure_html(name, drawing.figure, drawing.caption, drawing.caption))
    return drawn


def _again_html(name: str, *, seeds: Collection[int], scale: str, runner: str) -> str:
    """What to type to get the runs of a study again; of one that no command knows, the function that ran it."""
    if name in {**STUDIES, **SIMULATIONS} and set(seeds) == set(range(len(seeds))):
        size = "" if scale == "full" else f" --scale {scale}"
        return command_html(f"nearsight study run {shlex.quote(name)} --seeds {len(seeds)}{size}")
    words = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, sorted(seeds)))}"
    return (
        f"<p>No command runs this study with {words}: it was run from Python, by "
        f"<code>nearsight.study.{runner}</code>. Its study.json holds the whole settings of every run.</p>"
    )


def _hero(results: StudyResults) -> tuple[str, str]:
    """The main figure and its name: that of the most local heads, or what a study has of its own."""
    own = report_of(results.name)
    draws: dict[str, _Draw] = {} if own.is_about_locality else dict(own.figures)
    for name, draw in draws.items():
        if html := _drawn_html({"finding": partial(draw, results)}):
            return name, html[0]
    with suppress(InputError):
        wide, narrow = (of_heads(partial(minimum, width=width), results) for width in (7.2, NARROW))
        return "minimum", figure_html("finding", wide.figure, wide.caption, wide.caption, narrow=narrow.figure)
    return "", ""


def _head_sections(measured: StudyResults, with_stills: bool) -> list[Section]:
    parts: list[tuple[str, str, _Draw, str]] = [
        ("profiles", "Profiles", profiles, charts.PROFILES_OF_STUDY),
        ("plane", "Distance and focus", plane, charts.PLANE),
        ("heatmaps", "Every head", maps, charts.HEATMAPS_OF_STUDY),
    ]
    return [
        Section(
            name=name,
            heading=heading,
            body=chart_html(name, caption, _still(name, draw, measured) if with_stills else ""),
        )
        for name, heading, draw, caption in parts
    ]


def _still(name: str, draw: _Draw, results: StudyResults) -> str:
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
    return chart_html("effects", charts.EFFECTS) + table_html(table) + layers
