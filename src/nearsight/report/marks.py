"""What figures share: a figure with its caption, how it is saved, footnotes, legends, and marks for several."""

import io
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike
from PIL import Image

from nearsight.files import replacing
from nearsight.report.figures.looks import model_style, shade
from nearsight.report.figures.style import INK, MUTED, add_legend, house_style, light_grid, save_figure
from nearsight.report.tables import difference_in_words
from nearsight.study.statistics import Estimate


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure and what its caption says."""

    figure: Figure
    caption: str
    with_round_places: bool = False
    """Of panels in several rows, whose last digits vary between runs of the layout engine."""

    def save(self, folder: Path, name: str) -> list[Path]:
        """As PNG and SVG; the files written."""
        if self.with_round_places:
            _round_places(self.figure)
        return [*save_figure(self.figure, folder, name)]


def distances_from_zero(axes: Axes, largest: float) -> None:
    """A scale of distances from 0 to the largest, with room for whole markers at both ends."""
    axes.set_xlim(-0.03 * largest, 1.05 * largest)


FEWEST = 3
"""Seeds from which on a mean has an interval or a band drawn around it; of two, dots say all there is."""
_ABOVE = 6.5
"""Points of print."""


def draw_dots(axes: Axes, across: ArrayLike, up: ArrayLike, colour: str, gid: str, **more: Any) -> None:
    """A dot per seed: small, light, and behind the means."""
    look: dict[str, Any] = {"color": shade(colour, 0.1), "marker": "o", "markersize": 3.2, "markeredgewidth": 0}
    axes.plot(across, up, **look, linestyle="none", zorder=1.9, gid=gid, **more)


def draw_seeds(axes: Axes, places: Iterable[float], values: Iterable[Sequence[float]], colour: str, gid: str) -> None:
    """At each place the dots of its seeds; none of a single one, which is the mean."""
    several = [(place, of_seeds) for place, of_seeds in zip(places, values, strict=True) if len(of_seeds) > 1]
    if several:
        across = [place for place, of_seeds in several for _ in of_seeds]
        draw_dots(axes, across, [value for _, of_seeds in several for value in of_seeds], colour, gid)


def seeds_in_row(axes: Axes, values: Sequence[float], place: float, colour: str, gid: str) -> None:
    """The same in a row, just above its mean, which would hide them."""
    if len(values) > 1:
        axes.update_datalim([(value, place) for value in values])  # which a transform of its own leaves out
        above = ScaledTranslation(0, _ABOVE / 72, cast("Figure", axes.figure).dpi_scale_trans)
        draw_dots(axes, values, [place] * len(values), colour, gid, transform=axes.transData + above)


def draw_courses(axes: Axes, across: ArrayLike, seeds: Collection[ArrayLike], colour: str, gid: str) -> None:
    """A thin light line per seed, behind the line of the mean: for courses of too many points for dots."""
    look: dict[str, Any] = {"color": shade(colour, 0.1), "linewidth": 0.5, "zorder": 1.9}
    for number, up in enumerate(seeds if len(seeds) > 1 else ()):
        axes.plot(across, up, **look, gid=f"{gid}-{number}")


def dots_and_bars(counts: Iterable[int], bars: str = "bars: 95 % intervals") -> str:
    """What goes on after "mean over 3 seeds": "; dots: seeds; bars: 95 % intervals"; what is not drawn is not said."""
    fewest, most = min(found := list(counts)), max(found)
    dots = "; dots: seeds" if most > 1 else ""
    if most < FEWEST:
        return dots
    return f"{dots}; {bars}" + ("" if fewest >= FEWEST else f" (of {FEWEST} seeds or more)")


ROW, AROUND = 0.34, 1.0
"""Heights in inches."""


@dataclass(frozen=True, kw_only=True)
class ForestRow:
    """A row per estimate: its value, its interval, and the number next to it."""

    label: str
    estimate: Estimate
    seeds: Sequence[float] = ()
    """What each seed gives, drawn as dots; of too few of them no interval is drawn. Empty: it is no mean over seeds."""
    is_reference: bool = False
    """Drawn apart from the others, which are held against it."""
    words: str | None = None
    """Next to it; by default the value ± half the width of its interval."""


def forest(rows: Sequence[ForestRow], axis_label: str, *, digits: int = 3) -> Figure:
    """Estimates from top to bottom on one scale, with a line at 0."""
    with house_style():
        figure = Figure(figsize=(7.2, AROUND + ROW * len(rows)), layout="constrained")
        axes = figure.subplots()
        light_grid(axes, "x")
        axes.axvline(0.0, color=MUTED, linewidth=1.0, zorder=1)
        for place, row in enumerate(rows):
            style = model_style(1 if row.is_reference else 0)
            estimate = row.estimate
            seeds_in_row(axes, row.seeds, place, style.colour, f"seeds-{row.label}")
            if estimate.has_interval and (not row.seeds or len(row.seeds) >= FEWEST):
                axes.plot(
                    [estimate.low, estimate.high],
                    [place, place],
                    color=style.colour,
                    linewidth=2.2,
                    solid_capstyle="butt",
                    gid=f"interval-{row.label}",
                )
            axes.plot(
                estimate.value, place, marker=style.marker, color=style.colour, markersize=6.5, gid=f"value-{row.label}"
            )
            axes.annotate(
                row.words or difference_in_words(estimate, digits=digits),
                (1.0, place),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                fontsize=8,
                annotation_clip=False,
            )
        axes.set_yticks(range(len(rows)), [row.label for row in rows], parse_math=False)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(axis_label)
    return figure


DPI = 100
# In milliseconds; the last frame stays, to be read before the film begins again.
FRAME, LAST_FRAME = 160, 3000
NUM_COLOURS = 64


@dataclass(frozen=True, kw_only=True)
class Animation:
    """A figure that moves: frames drawn one after the other, as a GIF. The same data give the same bytes."""

    frames: Iterable[Figure]
    """All of one size. Each is drawn before the next is asked for, so it may be the same figure, changed."""
    caption: str

    def save(self, folder: Path, name: str) -> list[Path]:
        """As a GIF that repeats for ever; the file written."""
        path = folder / f"{name}.gif"
        images = [_image(figure) for figure in self.frames]
        # One palette for all frames: the last one has every colour, and colours do not flicker.
        palette = images[-1].quantize(NUM_COLOURS, dither=Image.Dither.NONE)
        reduced = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
        times = [FRAME] * (len(reduced) - 1) + [LAST_FRAME]
        with replacing(path) as temporary:
            reduced[0].save(
                temporary,
                format="GIF",
                save_all=True,
                append_images=reduced[1:],
                duration=times,
                loop=0,
                optimize=False,
            )
        return [path]


def _image(figure: Figure) -> Image.Image:
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="png", dpi=DPI)
    return Image.open(buffer).convert("RGB")


# In inches: the height of a line of a footnote, the space around it, and the mean width of its letters.
LINE, SPACE, LETTER = 0.155, 0.08, 0.059
# The width of a legend's line and the space around it.
HANDLE = 0.75
_IN_A_ROW = 6
FOOTNOTE_SIZE = 8.0


def legend_columns(figure: Figure, labels: Sequence[str], most: int) -> int:
    """How many columns of a legend fit side by side, so that they are equally long."""
    fitting = int(figure.get_size_inches()[0] / (HANDLE + LETTER * max(map(len, labels))))
    return next((number for number in range(min(most, fitting), 1, -1) if most % number == 0), 1)


def add_fitting_legend(figure: Figure, handles: Sequence[Line2D], labels: Sequence[str], **more: Any) -> None:
    """A legend above the panels, in as many columns as fit."""
    num_columns = legend_columns(figure, labels, len(labels))
    add_legend(figure, handles, labels, loc="outside upper left", ncols=num_columns, **more)


def add_footnote(figure: Figure, notes: Iterable[str]) -> None:
    """Lines of small text below everything else; the figure grows by their height."""
    width, height = figure.get_size_inches()
    lines = [line for note in notes for line in textwrap.wrap(note, int((width - 2 * SPACE) / LETTER))]
    if not lines:
        return
    extra = LINE * len(lines) + SPACE
    figure.set_size_inches(width, height + extra)
    share = float(extra / (height + extra))
    with house_style():
        figure.text(
            SPACE / width,
            SPACE / (height + extra),
            "\n".join(lines),
            fontsize=FOOTNOTE_SIZE,
            color=MUTED,
            va="bottom",
            linespacing=1.25,
            parse_math=False,
            gid="footnote",
        )
    cast("ConstrainedLayoutEngine", figure.get_layout_engine()).set(rect=(0, share, 1, 1 - share))


def _round_places(figure: Figure) -> None:
    """Lay the panels out, once and for all, with rounded places."""
    with house_style(letters="outlines"):
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = (round(float(side), 4) for side in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))


WHITE_EDGE = {"markeredgecolor": "white", "markeredgewidth": 0.6}


def legend_above(figure: Figure, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """A legend above all panels, in one row of not too many: name → look."""
    handles = [Line2D([], [], **one) for one in looks.values()]
    if len(looks) > _IN_A_ROW:
        add_fitting_legend(figure, handles, list(looks))
    else:
        add_legend(figure, handles, list(looks), loc="outside upper left", ncols=len(looks))


def interval_in_row(axes: Axes, low: float, high: float, place: float, colour: str, gid: str) -> None:
    """A broad bar from end to end, on which a point will stand."""
    axes.plot([low, high], [place] * 2, color=colour, linewidth=4, alpha=0.35, solid_capstyle="butt", gid=gid)


def with_room(values: Collection[float], room: float, narrowest: float) -> tuple[float, float]:
    """Limits around values: `room` on each side, as a share of what they take up, which is at least `narrowest`."""
    middle, width = (min(values) + max(values)) / 2, max(max(values) - min(values), narrowest)
    return middle - (0.5 + room) * width, middle + (0.5 + room) * width
