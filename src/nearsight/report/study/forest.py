"""A row per estimate: its value, its interval, and the number beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from nearsight.report.figures.style import INK, MUTED, house_style, light_grid, model_style
from nearsight.report.study.least_squares import Estimate

ROW, AROUND = 0.34, 1.0
"""Heights in inches."""


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    estimate: Estimate
    is_reference: bool = False
    """Drawn apart from the others, which are held against it."""
    words: str | None = None
    """Beside it; by default the value ± half the width of its interval."""


def forest(rows: Sequence[Row], axis_label: str, *, digits: int = 3) -> Figure:
    """Estimates from top to bottom on one scale, with a line at 0."""
    with house_style():
        figure = Figure(figsize=(7.2, AROUND + ROW * len(rows)), layout="constrained")
        axes = figure.subplots()
        light_grid(axes, "x")
        axes.axvline(0.0, color=MUTED, linewidth=1.0, zorder=1)
        for place, row in enumerate(rows):
            style = model_style(1 if row.is_reference else 0)
            estimate = row.estimate
            if estimate.has_interval:
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
                row.words or estimate.in_words(digits=digits),
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
