"""Maps over the grid of patches: where every head attends, and which learned positions are similar."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from nearsight.lens import HeadTable, PositionGram
from nearsight.report.figures.style import GRID, HATCH, MUTED, add_title, colour_bar, house_style
from nearsight.report.inputs import shorten

_LABEL_LIMIT = 70
RADIUS = 7
"""Steps from the patch that are shown."""
CONTRAST = 4.0
"""Times the median that the brightest colour stands for at least."""
_FRAME = "#fcfcfd"
"""Of the patch that looks: as light on a dark page, where the maps are as dark as here."""
_HEAD, _POSITIONS = 0.62, 3.5
"""Inches of the picture of a head, and of all pairs of positions."""
_THRESHOLD = 0.55
"""What S3 takes as standing out."""
_MOST_MAPS = 14
"""Along a side; of a larger grid every second patch has a map, or every third, and so on."""
_MOST_TICKS = 8
_MOST_PIXELS = 600
"""Of a picture's side that is kept as it is; a larger one is averaged to what can be seen."""


def offset_pictures(table: HeadTable, *, label: str, layers: Sequence[int] | None = None) -> Figure:
    """Where each head looks, seen from the patch that looks: layers × heads, of a table measured with
    `what=["offsets"]` (after Cordonnier et al. 2020).

    Each picture has its own scale, from nothing to the step that gets most, or to `CONTRAST` times the median where
    that is more: uniform attention is dim all over. Above it is the head's distance in patches.
    `layers`: the numbers that the table's layers have in the whole model, from 0.
    """
    numbers = range(len(table.layer_names)) if layers is None else layers
    maps = [_cropped(table.offset_maps(place)) for place in range(len(table.layer_names))]
    distances = table.mad_in("patches")
    num_heads = table.mad.shape[1]
    with house_style():
        figure = Figure(figsize=(0.7 + _HEAD * num_heads, 0.75 + (_HEAD + 0.13) * len(maps)), layout="constrained")
        cast("ConstrainedLayoutEngine", figure.get_layout_engine()).set(w_pad=0.015, h_pad=0.015, hspace=0, wspace=0)
        panels = figure.subplots(len(maps), num_heads, squeeze=False)
        for place, row in enumerate(panels):
            layer = f"L{numbers[place]}"
            row[0].set_ylabel(layer, rotation=0, ha="right", va="center", fontsize=8, labelpad=4)
            for head, panel in enumerate(row):
                panel.set(xticks=[], yticks=[])
                if np.isnan(table.mad[place, head]):
                    panel.set_visible(False)
                else:
                    _draw_head(panel, maps[place][head], f"{distances[place, head]:.1f}", f"{layer}-{head}")
        add_title(figure, f"{shorten(label, _LABEL_LIMIT)}: where each head looks, seen from the patch (framed)")
        figure.supxlabel(
            "heads, from 0; bright: more attention; numbers: mean attention distance in patches",
            fontsize=8,
            color=MUTED,
        )
    return figure


def _cropped(maps_HRC: NDArray[np.float64]) -> NDArray[np.float64]:
    """The steps of up to `RADIUS` around the middle, as far as any head of the layer can look."""
    is_there_HRC = np.isfinite(maps_HRC)
    rows, cols = (_around_the_middle(np.any(is_there_HRC, axis=axes)) for axes in ((0, 2), (0, 1)))
    return maps_HRC[:, rows, cols]


def _around_the_middle(is_there: NDArray[np.bool_]) -> slice:
    middle = len(is_there) // 2
    reach = min(RADIUS, int(np.abs(np.nonzero(is_there)[0] - middle).max(initial=0)))
    return slice(middle - reach, middle + reach + 1)


def _draw_head(panel: Axes, map_RC: NDArray[np.float64], distance: str, name: str) -> None:
    most = max(float(np.nanmax(map_RC)), CONTRAST * float(np.nanmedian(map_RC))) or 1.0
    panel.imshow(map_RC, cmap="magma", vmin=0.0, vmax=most, interpolation="none", gid=name)
    rows, cols = map_RC.shape
    panel.add_patch(Rectangle((cols // 2 - 0.5, rows // 2 - 0.5), 1, 1, fill=False, edgecolor=_FRAME, linewidth=0.6))
    panel.spines[:].set(visible=True, color=GRID)
    panel.set_facecolor(HATCH)
    panel.set_title(distance, fontsize=6, pad=1.5, color=MUTED)


def position_maps(positions: PositionGram, *, label: str, threshold: float = _THRESHOLD) -> Figure:
    """Which positions are similar, in three panels on one scale from −1 to 1: the Gram matrix, its entries from the
    threshold on (S3, Figure 1), and a map per patch (after Dosovitskiy et al. 2021, Figure 7).

    In a map, at the place of its patch, is the cosine similarity of that patch's position with those of all others.
    """
    gram, neighbours = positions.gram.numpy(), positions.neighbours
    rows, cols = positions.grid_size
    with house_style():
        figure = Figure(figsize=(3 * _POSITIONS + 1.3, _POSITIONS + 1.0), layout="constrained")
        whole, standing_out, maps = figure.subplots(1, 3)
        _matrix(whole, gram, cols).set_gid("gram")
        whole.set_title("Gram matrix PᵀP (largest entry = 1)")
        whole.set_ylabel("patch, by rows of the image")
        image = _matrix(standing_out, np.where(gram >= threshold, gram, np.nan), cols)
        image.set_gid("threshold")
        standing_out.set_title(f"its entries from {threshold:g} on")
        every = -(-max(rows, cols) // _MOST_MAPS)
        mosaic = _mosaic(positions.cosine.numpy().reshape(rows, cols, rows, cols)[::every, ::every])
        _draw(maps, mosaic).set_gid("maps")
        maps.patch.set(facecolor=HATCH)  # between the maps: white would be a similarity of 0
        maps.set(xticks=[], yticks=[])
        maps.spines[:].set_visible(False)
        maps.set_title(f"cosine similarities of {'each' if every == 1 else f'every {_ordinal(every)}'} patch")
        scale = "equal: 1, unrelated: 0, opposite: −1"
        colour_bar(figure, image, [whole, standing_out, maps], scale, aspect=20, shrink=0.86, pad=0.015)
        found = f"{float(neighbours.fraction):.0%} of neighbours are among the most similar"
        add_title(figure, f"{shorten(label, _LABEL_LIMIT)}: {found} ({neighbours.chance:.0%} by chance)")
    return figure


def _matrix(panel: Axes, values: NDArray[np.float64], cols: int) -> AxesImage:
    """Of all pairs of patches, with ticks where rows of the image begin."""
    image = _draw(panel, values)
    panel.spines[:].set(visible=True, color=GRID)
    num_rows = len(values) // cols
    ticks = range(0, num_rows, -(-num_rows // _MOST_TICKS))
    for set_ticks in (panel.set_xticks, panel.set_yticks):
        set_ticks([tick * cols for tick in ticks], [str(tick + 1) for tick in ticks])
    panel.set_xlabel("patch, by rows of the image")
    return image


def _draw(panel: Axes, values: NDArray[np.float64]) -> AxesImage:
    interpolation = "none" if max(values.shape) <= _MOST_PIXELS else "auto"
    return panel.imshow(np.ma.masked_invalid(values), cmap="RdBu_r", vmin=-1.0, vmax=1.0, interpolation=interpolation)


def _mosaic(maps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Maps [R, C, rows, cols] as one picture, with a gap around each."""
    num_rows, num_cols, rows, cols = maps.shape
    gap = max(1, rows // 8)
    framed = np.full((num_rows, num_cols, rows + gap, cols + gap), np.nan)
    framed[:, :, :rows, :cols] = maps
    joined = framed.transpose(0, 2, 1, 3).reshape(num_rows * (rows + gap), num_cols * (cols + gap))
    return joined[:-gap, :-gap]


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
