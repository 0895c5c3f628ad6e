"""Figures as files and as text: the same data give the same bytes."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from nearsight.files import replacing
from nearsight.report.figures.style import house_style

PNG_DPI = 200


def figure_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Where a figure of this name is saved."""
    return folder / f"{name}.png", folder / f"{name}.svg"


def save_figure(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `name`.png (for slides) and `name`.svg (for papers; letters are outlines, so no font is needed)."""
    png, svg = figure_files(folder, name)
    with house_style(letters="outlines"):
        with replacing(png) as temporary:
            figure.savefig(temporary, format="png", dpi=PNG_DPI, metadata={"Software": None})
        with replacing(svg) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
    return png, svg


def svg_text(figure: Figure) -> str:
    """The figure as SVG whose letters stay text: small, searchable, and in the font of the page around it."""
    buffer = io.BytesIO()
    with house_style(letters="text"):
        # Not `transparent`: that would also clear the hatching behind missing heads.
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="none")
    return buffer.getvalue().decode()
