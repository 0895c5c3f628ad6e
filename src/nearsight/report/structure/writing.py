"""All files of a simulation's report."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.report.figures import save_figure
from nearsight.report.figures.style import house_style
from nearsight.report.structure.figure_attention import attention_matrices
from nearsight.report.structure.figure_control import control_curves
from nearsight.report.structure.figure_phases import phase_curves
from nearsight.report.structure.figure_sweep import sweep_panels
from nearsight.report.structure.figure_transfer import transfer_curves
from nearsight.report.structure.numbers import notes_of
from nearsight.report.structure.tables import structure_tables
from nearsight.report.structure.verdict import judge_claims, verdict_markdown, verdict_table
from nearsight.report.study.captioned import write_captioned
from nearsight.report.study.drawing import Drawing
from nearsight.study.simulation_folder import SimulationResults

Draw = Callable[[SimulationResults], Drawing]
FIGURES: Mapping[str, Mapping[str, Draw]] = {
    "association": {"attention": attention_matrices, "phases": phase_curves},
    "association-control": {"attention": attention_matrices, "control": control_curves},
    "association-sweep": {"sweep": sweep_panels},
    "transfer": {"transfer": transfer_curves},
}
"""Study → its figures by the names of their files."""


def write_structure_report(results: SimulationResults, folder: Path) -> tuple[Path, ...]:
    """Write tables/, figures/ and verdict.md; the files written. The same results give the same bytes."""
    if results.runs.empty:
        raise InputError(f"study {results.name!r} has no cell that is done, so there is nothing to report")
    judgements = judge_claims(results)
    tables = structure_tables(results)
    if judgements:
        tables.append(verdict_table(results, judgements))
    written = [path for table in tables for path in table.write(folder / "tables")]
    written += _write_figures(results, folder / "figures")
    if judgements:
        write_text(folder / "verdict.md", verdict_markdown(results, judgements))
        written.append(folder / "verdict.md")
    return tuple(written)


def _write_figures(results: SimulationResults, folder: Path) -> list[Path]:
    drawn = FIGURES.get(results.name, {})
    figures = {name: partial(_write_figure, draw, results) for name, draw in drawn.items()}
    return write_captioned(folder, results.name, figures, notes_of(results))


def _write_figure(draw: Draw, results: SimulationResults, folder: Path, name: str) -> tuple[Sequence[Path], str]:
    drawing = draw(results)
    _settle(drawing.figure)
    return save_figure(drawing.figure, folder, name), drawing.caption


def _settle(figure: Figure) -> None:
    """Lay the panels out and round their places: with several rows of panels the last digits vary between runs."""
    with house_style(letters="outlines"):
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = (round(float(side), 4) for side in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))
