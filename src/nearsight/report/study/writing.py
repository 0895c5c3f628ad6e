"""All files of a study's report: what every study has, but for what it does without, and what is registered for it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.report.figures import save_figure
from nearsight.report.study.animation import Animation, save_animation
from nearsight.report.study.captioned import write_captioned
from nearsight.report.study.conditions import with_attention
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.figure1_profiles import profiles
from nearsight.report.study.figure2_plane import plane
from nearsight.report.study.figure3_heatmaps import maps
from nearsight.report.study.figure4_minimum import minimum
from nearsight.report.study.figure5_conditions import key_conditions
from nearsight.report.study.notes import assumed_notes, missing_notes, scale_notes
from nearsight.report.study.registry import parts_of
from nearsight.report.study.tables import study_tables
from nearsight.report.study.verdict import judge_claims, verdict_markdown, verdict_table
from nearsight.study.results import StudyResults

FIGURES: dict[str, Callable[[StudyResults], Drawing]] = {
    "figure-1-profiles": profiles,
    "figure-2-plane": plane,
    "figure-3-heatmaps": maps,
    "figure-4-minimum-mad": minimum,
    "figure-5-key-conditions": key_conditions,
}


def write_study_report(results: StudyResults, folder: Path) -> tuple[Path, ...]:
    """Write tables/, figures/ and, where the study judges claims or answers questions, verdict.md; the files written.

    An incomplete study gives what it can: what is missing is named in the tables and in figures/captions.md. Every file
    is replaced whole, and the same results give the same bytes.
    """
    if results.runs.empty:
        raise InputError(f"study {results.name!r} has no complete run yet, so there is nothing to report")
    judgements = judge_claims(results)
    tables = study_tables(results)
    if judgements:
        tables.append(verdict_table(results, judgements))
    written = [path for table in tables for path in table.write(folder / "tables")]
    written += _write_figures(results, folder / "figures")
    if judgements:
        write_text(folder / "verdict.md", verdict_markdown(results, judgements))
        written.append(folder / "verdict.md")
    return tuple(written)


def _write_figures(results: StudyResults, folder: Path) -> list[Path]:
    own = parts_of(results.name)
    figures = {
        **{
            name: partial(_write_figure, partial(_of_heads, draw), results)
            for name, draw in FIGURES.items()
            if name not in own.without
        },
        **{name: partial(_write_figure, draw, results) for name, draw in own.figures.items()},
        **{name: partial(_write_animation, draw, results) for name, draw in own.animations.items()},
    }
    notes = (*scale_notes(results), *missing_notes(results), *assumed_notes(results))
    return write_captioned(folder, results.name, figures, notes)


def _of_heads(draw: Callable[[StudyResults], Drawing], results: StudyResults) -> Drawing:
    measured = with_attention(results)
    if measured.runs.empty:
        raise InputError("it is about heads, and no network of the study has attention")
    return draw(measured)


def _write_figure(
    draw: Callable[[StudyResults], Drawing], results: StudyResults, folder: Path, name: str
) -> tuple[list[Path], str]:
    drawing = draw(results)
    return [*save_figure(drawing.figure, folder, name)], drawing.caption


def _write_animation(
    draw: Callable[[StudyResults], Animation], results: StudyResults, folder: Path, name: str
) -> tuple[list[Path], str]:
    animation = draw(results)
    return [save_animation(animation, folder, name)], animation.caption
