"""A figure and what its caption says."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Drawing:
    figure: Figure
    caption: str


def distances_from_zero(axes: Axes, largest: float) -> None:
    """A scale of distances from 0 to the largest, with room for whole markers at both ends."""
    axes.set_xlim(-0.03 * largest, 1.05 * largest)
