"""What an emptied region is filled with: the data set's mean, or Gaussian noise around it."""

import math

import torch
from torch import Tensor

from nearsight.augment.base import Batch, Cells
from nearsight.augment.streams import Drawn

_HALF_STEP = 2.0**-25
"""Draws are multiples of 2⁻²⁴ that include 0, where the normal variate is infinite."""


def standard_normal(uniform: Tensor) -> Tensor:
    """Normal variates from uniform draws that are multiples of 2⁻²⁴, by the inverse of the distribution function."""
    return math.sqrt(2) * torch.erfinv(2 * uniform.clamp(min=_HALF_STEP) - 1)


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
