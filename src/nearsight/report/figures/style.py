"""What all figures have in common but their data: fonts, paper and ink, legends, scales, and how they are saved.

Conditions and models get their colours in `looks`. The same data give the same bytes.
"""

import contextlib
import io
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from nearsight.files import replacing

DISTANCE_LABEL = "mean attention distance\n(fraction of the grid's diagonal)"
DISTANCE_LABEL_ONE_LINE = "mean attention distance (fraction of the grid's diagonal)"
ENTROPY_LABEL = "attention entropy (1 = uniform)"

# Everything that is not data. The page replaces exactly these colours by those of its light or dark theme.
INK = "#1c2127"
MUTED = "#656d77"
GRID = "#dfe3e8"
PAPER = "#ffffff"
HATCH = "#a4aeb9"

FIGURE_LABEL_LIMIT = 30
NARROW = 3.9
"""Inches of a figure whose letters can be read on a phone."""
UNIFORM: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (1, 2))}
"""The line of uniform attention."""

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so a figure is the same on every machine
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "legend.title_fontsize": 8.0,
    "legend.handlelength": 2.8,
    "figure.facecolor": PAPER,
    "savefig.facecolor": "auto",
    "hatch.linewidth": 0.8,
    "hatch.color": HATCH,
    "svg.hashsalt": "nearsight",
}
_SETTINGS_OF_LOOKS = re.compile(
    r"(axes|errorbar|figure|font|grid|hatch|image|legend|lines|markers|patch|path|savefig|scatter|svg|text|[xy]axis|[xy]tick)\."
)
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def house_style(*, letters: Literal["outlines", "text"] = "outlines") -> Iterator[None]:
    """Matplotlib's own defaults with this package's style on top, whatever the user's settings are.

    `letters` says what becomes of them in an SVG.

    Matplotlib keeps its settings in one global place, hence the lock: two threads that draw reports do not mix.
    """
    defaults: dict[Any, Any] = {
        name: value for name, value in mpl.rcParamsDefault.items() if _SETTINGS_OF_LOOKS.match(name)
    }
    with (
        _ONE_AT_A_TIME,
        mpl.rc_context({**defaults, **_STYLE, "svg.fonttype": "none" if letters == "text" else "path"}),
    ):
        yield


def add_legend(
    target: Figure | Axes, handles: Sequence[Line2D], labels: Sequence[str], *, title: str | None = None, **options: Any
) -> Legend:
    """A legend that shows labels as they are.

    Matplotlib drops labels that begin with an underscore and reads dollar signs as formulas; setting the text
    afterwards does neither.
    """
    legend = target.legend(handles=handles, labels=[str(place) for place in range(len(labels))], title=title, **options)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
    legend.get_title().set_color(MUTED)
    legend.set_alignment("left")
    return legend


def colour_bar(
    figure: Figure,
    image: ScalarMappable,
    panels: Axes | list[Axes],
    label: str = "",
    *,
    aspect: float = 18,
    **options: Any,
) -> Colorbar:
    """The scale of an image next to its panels, without frame and ticks."""
    bar = figure.colorbar(image, ax=panels, aspect=aspect, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", length=0)
    if label:
        bar.set_label(label, fontsize=8.5)
    return bar


def add_title(figure: Figure, title: str) -> None:
    """Above all panels, at the left, as it is."""
    figure.suptitle(title, parse_math=False, fontsize=9.5, fontweight="bold", x=0.005, ha="left")


def light_grid(axes: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(visible=True, axis=axis)
    axes.tick_params(length=0 if axis == "both" else 3.0)


def draw_uniform_line(axes: Axes, distance: float, *, horizontal: bool, gid: str) -> None:
    """The distance of uniform attention: what 'not local' means on this grid."""
    draw = axes.axhline if horizontal else axes.axvline
    draw(distance, **UNIFORM, zorder=1, gid=gid)


def figure_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Where a figure of this name is saved."""
    return folder / f"{name}.png", folder / f"{name}.svg"


def save_figure(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `name`.png (for slides) and `name`.svg (for papers; letters are outlines, so no font is needed)."""
    png, svg = figure_files(folder, name)
    with house_style(letters="outlines"):
        with replacing(png) as temporary:
            figure.savefig(temporary, format="png", dpi=200, metadata={"Software": None})
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
