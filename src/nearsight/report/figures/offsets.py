"""Where every head looks, seen from the patch that looks: a small picture each (after Cordonnier et al. 2020)."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from nearsight.lens import HeadTable
from nearsight.report.figures.style import GRID, HATCH, INK, MUTED, house_style
from nearsight.report.inputs import shorten

RADIUS = 7
"""Steps from the patch that are shown."""
PANEL = 0.62
"""Inches."""
COLOURS = "magma_r"
CONTRAST = 4.0
"""Times the median that the darkest colour stands for at least."""
LABEL_LIMIT = 70


def offset_pictures(table: HeadTable, *, label: str, layers: Sequence[int] | None = None) -> Figure:
    """Layers × heads, of a table measured with `what=["offsets"]`.

    Each picture has its own scale, from nothing to the step that gets most, or to `CONTRAST` times the median where
    that is more: a head that looks everywhere alike is pale all over. Above it is the head's distance in patches.
    `layers`: the numbers that the table's layers have in the whole model, from 0.
    """
    numbers = range(len(table.layer_names)) if layers is None else layers
    maps = [cropped(table.offset_maps(place)) for place in range(len(table.layer_names))]
    distances = table.mad_in("patches")
    num_heads = table.mad.shape[1]
    with house_style():
        figure = Figure(figsize=(0.7 + PANEL * num_heads, 0.75 + (PANEL + 0.13) * len(maps)), layout="constrained")
        cast("ConstrainedLayoutEngine", figure.get_layout_engine()).set(w_pad=0.015, h_pad=0.015, hspace=0, wspace=0)
        panels = figure.subplots(len(maps), num_heads, squeeze=False)
        for place, row in enumerate(panels):
            layer = f"L{numbers[place] + 1}"
            row[0].set_ylabel(layer, rotation=0, ha="right", va="center", fontsize=8, labelpad=4)
            for head, panel in enumerate(row):
                panel.set(xticks=[], yticks=[])
                if np.isnan(table.mad[place, head]):
                    panel.set_visible(False)
                else:
                    _draw(panel, maps[place][head], f"{distances[place, head]:.1f}", f"{layer}-{head + 1}")
        figure.suptitle(
            f"{shorten(label, LABEL_LIMIT)}: where each head looks, seen from the patch (framed)",
            parse_math=False,
            fontsize=9.5,
            fontweight="bold",
            x=0.005,
            ha="left",
        )
        figure.supxlabel("heads; numbers: mean attention distance in patches", fontsize=8, color=MUTED)
    return figure


def cropped(maps_HRC: NDArray[np.float64]) -> NDArray[np.float64]:
    """The steps of up to `RADIUS` around the middle, as far as any head of the layer can look."""
    is_there_HRC = np.isfinite(maps_HRC)
    rows, cols = (_around_the_middle(np.any(is_there_HRC, axis=axes)) for axes in ((0, 2), (0, 1)))
    return maps_HRC[:, rows, cols]


def _around_the_middle(is_there: NDArray[np.bool_]) -> slice:
    middle = len(is_there) // 2
    reach = min(RADIUS, int(np.abs(np.nonzero(is_there)[0] - middle).max(initial=0)))
    return slice(middle - reach, middle + reach + 1)


def _draw(panel: Axes, map_RC: NDArray[np.float64], distance: str, name: str) -> None:
    most = max(float(np.nanmax(map_RC)), CONTRAST * float(np.nanmedian(map_RC))) or 1.0
    panel.imshow(map_RC, cmap=COLOURS, vmin=0.0, vmax=most, interpolation="none", gid=name)
    rows, cols = map_RC.shape
    panel.add_patch(Rectangle((cols // 2 - 0.5, rows // 2 - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=0.6))
    panel.spines[:].set(visible=True, color=GRID)
    panel.set_facecolor(HATCH)
    panel.set_title(distance, fontsize=6, pad=1.5, color=MUTED)
