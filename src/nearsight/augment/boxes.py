"""Rectangles inside an image: where CutMix and its relatives cut, and which pixels they cover.

A box is (top, bottom, left, right), half open, each a tensor [K, b] with b = B or 1 (the same box for a whole batch).
"""

from typing import NamedTuple

import torch
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
