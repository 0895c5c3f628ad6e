"""Rectangles inside an image: how they are drawn, which pixels they cover, and what an emptied one is filled with.

A box is (top, bottom, left, right), half open, each a tensor [K, b] with b = B or 1 (the same box for a whole batch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nearsight.augment.base import Batch, Cells
from nearsight.augment.streams import Drawn, standard_normal
from nearsight.errors import InputError
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Box(NamedTuple):
    """Rows top…bottom-1 and columns left…right-1."""

    top: Tensor
    bottom: Tensor
    left: Tensor
    right: Tensor

    def axis_masks(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Rows [K, b, H] and columns [K, b, W] that the box covers."""
        row_H = torch.arange(height, device=self.top.device)
        column_W = torch.arange(width, device=self.top.device)
        rows = (row_H >= self.top.unsqueeze(-1)) & (row_H < self.bottom.unsqueeze(-1))
        columns = (column_W >= self.left.unsqueeze(-1)) & (column_W < self.right.unsqueeze(-1))
        return rows, columns

    def mask(self, height: int, width: int) -> Tensor:
        """True inside: [K, b, 1, H, W]."""
        rows, columns = self.axis_masks(height, width)
        return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).unsqueeze(-3)

    def area(self) -> Tensor:
        """Number of pixels inside, float32."""
        return ((self.bottom - self.top) * (self.right - self.left)).to(torch.float32)


def box_of_area(fraction: Tensor, centre: Tensor, height: int, width: int) -> Box:
    """CutMix's box (Yun et al. 2019; torchvision's `CutMix`): sides √fraction of the image's, clipped at the border.

    `fraction` [K, b] is the share of the image before clipping; `centre` [K, b, 2] are uniform draws.
    """
    half_side = 0.5 * fraction.sqrt()
    spans = []
    for size, draw in zip((height, width), centre.unbind(-1), strict=True):
        middle = (draw * size).to(torch.int64)
        half = (half_side * size).to(torch.int64)
        spans += [(middle - half).clamp(min=0), (middle + half).clamp(max=size)]
    return Box(*spans)


def snapped(box: Box, patch: Tensor, height: int, width: int) -> Box:
    """The box with its edges moved to the nearest lines of the grid of `patch` [K, 1] pixels; 1 moves nothing."""
    sizes = (height, height, width, width)
    return Box(*(((edge + patch // 2) // patch * patch).clamp(max=size) for edge, size in zip(box, sizes, strict=True)))


_NUM_TRIES = 10
NUM_RECTANGLE_DRAWS = 2 * _NUM_TRIES


def check_ranges(name: str, min_area: float, max_area: float, min_ratio: float, max_ratio: float) -> None:
    if not 0 < min_area <= max_area <= 1:
        raise InputError(f"{name} has areas from {min_area} to {max_area}, but they are shares with 0 < min ≤ max ≤ 1")
    if not 0 < min_ratio <= max_ratio:
        raise InputError(f"{name} has aspect ratios from {min_ratio} to {max_ratio}, but they need 0 < min ≤ max")


def random_sides(
    draw_KBn: Tensor, cells: Cells, height: int | Tensor, width: int | Tensor, *, margin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether a random rectangle fits [K, B], and the rows and columns of the first that does (int64 [K, B]).

    torchvision draws up to ten times until one fits. Here all ten are drawn and the first that fits is taken.
    Area uniform in [min_area, max_area] of the image, log of columns/rows uniform in that of [min_ratio, max_ratio].
    `margin` is how many pixels a side must stay below the image's. Images have one size, or each its own, [K, B].
    """
    if not isinstance(height, int) and not isinstance(width, int):
        height, width = height.unsqueeze(-1), width.unsqueeze(-1)
    area_draw, ratio_draw = draw_KBn.tensor_split(2, dim=-1)
    smallest, largest, narrow, wide = (
        cells[name].to(torch.float32)[:, None, None] for name in ("min_area", "max_area", "min_ratio", "max_ratio")
    )
    area = (smallest + area_draw * (largest - smallest)) * (height * width)
    ratio = torch.exp(narrow.log() + ratio_draw * (wide.log() - narrow.log()))
    columns, rows = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (rows > 0) & (columns > 0) & (rows <= height - margin) & (columns <= width - margin)
    # The first that fits, by rank: which of several equal maxima argmax returns is not specified.
    first = torch.where(fits, torch.arange(_NUM_TRIES, device=fits.device), _NUM_TRIES).argmin(-1, keepdim=True)
    picked = [side.gather(-1, first).squeeze(-1).to(torch.int64) for side in (rows, columns)]
    return fits.any(-1), picked[0], picked[1]


def offset(draw_KB: Tensor, side_KB: Tensor, size: int | Tensor) -> Tensor:
    """Where a side begins, uniform over all places where it fits."""
    return (draw_KB * (size - side_KB + 1)).to(torch.int64)


def filling_draws(stream: str, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
    """The draws that `filling` takes: one per pixel and channel, none if all cells fill with the mean."""
    return {stream: image_shape.numel()} if cells.largest["noise"] > 0 else {}


def filling(batch: Batch, cells: Cells, drawn: Drawn, stream: str) -> Tensor:
    """Grey levels [K, B or 1, C, H or 1, W or 1], float32: mean + noise·deviation·z, with the cell's `noise`."""
    mean_C11 = batch.mean_C[:, None, None]
    if stream not in drawn.sample:
        return mean_C11[None, None]
    z_KBCHW = standard_normal(drawn.sample[stream]).view(batch.images_KBCHW.shape)
    strength = cells["noise"].to(torch.float32)[:, None, None, None, None]
    return mean_C11 + strength * batch.std_C[:, None, None] * z_KBCHW
