"""Which learned positions are alike: their Gram matrix, what stands out of it, and a map for each patch (S3, Figure 1).

The maps are those of Dosovitskiy et al. (2021), Figure 7.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from nearsight.lens import PositionGram
from nearsight.report.figures.style import GRID, HATCH, house_style
from nearsight.report.inputs import shorten

THRESHOLD = 0.55
"""What S3 takes as standing out."""
PANEL = 3.5
"""Inches."""
COLOURS = "RdBu_r"
MOST_MAPS = 14
"""Along a side; of a larger grid every second patch has a map, or every third, and so on."""
MOST_TICKS = 8
MOST_PIXELS = 600
"""Of a picture's side that is kept as it is; a larger one is averaged to what can be seen."""
LABEL_LIMIT = 70


def position_maps(positions: PositionGram, *, label: str, threshold: float = THRESHOLD) -> Figure:
    """Three panels on one scale from −1 to 1: the Gram matrix, its entries from the threshold on, a map per patch.

    In a map, at the place of its patch, is the cosine similarity of that patch's position with those of all others.
    """
    gram, neighbours = positions.gram.numpy(), positions.neighbours
    rows, cols = positions.grid_size
    with house_style():
        figure = Figure(figsize=(3 * PANEL + 1.3, PANEL + 1.0), layout="constrained")
        whole, standing_out, maps = figure.subplots(1, 3)
        _matrix(whole, gram, cols).set_gid("gram")
        whole.set_title("Gram matrix PᵀP (largest entry = 1)")
        whole.set_ylabel("patch, by rows of the image")
        image = _matrix(standing_out, np.where(gram >= threshold, gram, np.nan), cols)
        image.set_gid("threshold")
        standing_out.set_title(f"its entries from {threshold:g} on")
        every = -(-max(rows, cols) // MOST_MAPS)
        mosaic = _mosaic(positions.cosine.numpy().reshape(rows, cols, rows, cols)[::every, ::every])
        _draw(maps, mosaic).set_gid("maps")
        maps.patch.set(facecolor=HATCH)  # between the maps: white would be a similarity of 0
        maps.set(xticks=[], yticks=[])
        maps.spines[:].set_visible(False)
        maps.set_title(f"cosine similarities of {'each' if every == 1 else f'every {_ordinal(every)}'} patch")
        bar = figure.colorbar(image, ax=[whole, standing_out, maps], aspect=20, shrink=0.86, pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("alike: 1, unrelated: 0, opposite: −1", fontsize=8.5)
        found = f"{float(neighbours.fraction):.0%} of neighbours are among the most alike"
        figure.suptitle(
            f"{shorten(label, LABEL_LIMIT)}: {found} ({neighbours.chance:.0%} by chance)",
            parse_math=False,
            fontsize=9.5,
            fontweight="bold",
            x=0.005,
            ha="left",
        )
    return figure


def _matrix(panel: Axes, values: NDArray[np.float64], cols: int) -> AxesImage:
    """Of all pairs of patches, with ticks where rows of the image begin."""
    image = _draw(panel, values)
    panel.spines[:].set(visible=True, color=GRID)
    num_rows = len(values) // cols
    ticks = range(0, num_rows, -(-num_rows // MOST_TICKS))
    for set_ticks in (panel.set_xticks, panel.set_yticks):
        set_ticks([tick * cols for tick in ticks], [str(tick + 1) for tick in ticks])
    panel.set_xlabel("patch, by rows of the image")
    return image


def _draw(panel: Axes, values: NDArray[np.float64]) -> AxesImage:
    interpolation = "none" if max(values.shape) <= MOST_PIXELS else "auto"
    return panel.imshow(np.ma.masked_invalid(values), cmap=COLOURS, vmin=-1.0, vmax=1.0, interpolation=interpolation)


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
