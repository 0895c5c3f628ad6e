"""A figure and what its caption says."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.report.figures.style import ModelStyle, model_style


@dataclass(frozen=True, kw_only=True)
class Drawing:
    figure: Figure
    caption: str


def level_styles(levels: Sequence[str]) -> dict[str, ModelStyle]:
    """A look per level of a factor. The last level comes first: circles are with it, triangles without, as in S1."""
    return {level: model_style(place) for place, level in enumerate(reversed(levels))}


def distances_from_zero(axes: Axes, largest: float) -> None:
    """A scale of distances from 0 to the largest, with room for whole markers at both ends."""
    axes.set_xlim(-0.03 * largest, 1.05 * largest)
