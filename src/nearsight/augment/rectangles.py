"""Rectangles of random area and aspect ratio that fit into the image: for random erasing and resized crops.

torchvision draws up to ten times until one fits. Here all ten are drawn and the first that fits is taken.
"""

import torch
from torch import Tensor

from nearsight.augment.base import Cells

NUM_TRIES = 10
NUM_RECTANGLE_DRAWS = 2 * NUM_TRIES


def random_sides(
    draw_KBn: Tensor, cells: Cells, height: int, width: int, *, margin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether one fits [K, B], and the rows and columns of the first that does (int64 [K, B]).

    Area uniform in [min_area, max_area] of the image, log of columns/rows uniform in that of [min_ratio, max_ratio].
    `margin` is how many pixels a side must stay below the image's.
    """
    area_draw, ratio_draw = draw_KBn.tensor_split(2, dim=-1)
    smallest, largest, narrow, wide = (
        cells[name].to(torch.float32)[:, None, None] for name in ("min_area", "max_area", "min_ratio", "max_ratio")
    )
    area = (smallest + area_draw * (largest - smallest)) * (height * width)
    ratio = torch.exp(narrow.log() + ratio_draw * (wide.log() - narrow.log()))
    columns, rows = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (rows > 0) & (columns > 0) & (rows <= height - margin) & (columns <= width - margin)
    # The first that fits, by rank: which of several equal maxima argmax returns is not specified.
    first = torch.where(fits, torch.arange(NUM_TRIES, device=fits.device), NUM_TRIES).argmin(-1, keepdim=True)
    picked = [side.gather(-1, first).squeeze(-1).to(torch.int64) for side in (rows, columns)]
    return fits.any(-1), picked[0], picked[1]


def offset(draw_KB: Tensor, side_KB: Tensor, size: int) -> Tensor:
    """Where a side begins, uniform over all places where it fits."""
    return (draw_KB * (size - side_KB + 1)).to(torch.int64)
