"""Shear, translate and rotate: each sample's inverse matrix, and one gather for all of them.

Follows `torchvision.transforms.v2.functional.affine` and `rotate` on tensors, nearest neighbour, step by step: matrices
in float64, the sampling grid in float32 and normalised to [-1, 1], so that the same pixel is picked. Steps on whole
grids are in place: on a CPU fresh memory costs more than the arithmetic.

Shape suffixes: N images, C channels, H rows, W columns.
"""

import math

import torch
from torch import Tensor


def identity_matrices(num: int, device: torch.device) -> Tensor:
    """[N, 2, 3] float64: output pixel, measured from the image's centre, to input pixel."""
    return torch.eye(2, 3, dtype=torch.float64, device=device).expand(num, 2, 3)


def shear_x_matrices(magnitude_N: Tensor, height: int) -> Tensor:
    """x + m·y, about the top left corner as torchvision's policies do it."""
    m, zero, one = _columns(magnitude_N)
    return _matrices(one, m, m * (0.5 * height), zero, one, zero)


def shear_y_matrices(magnitude_N: Tensor, width: int) -> Tensor:
    m, zero, one = _columns(magnitude_N)
    return _matrices(one, zero, zero, m, one, m * (0.5 * width))


def translate_matrices(x_N: Tensor, y_N: Tensor) -> Tensor:
    """Moves the picture right by x and down by y, cut to whole pixels."""
    x, zero, one = _columns(x_N)
    return _matrices(one, zero, -x.trunc(), zero, one, -y_N.to(torch.float64).trunc())


def rotate_matrices(degrees_N: Tensor) -> Tensor:
    """Counter-clockwise about the centre."""
    radians, zero, _ = _columns(degrees_N)
    radians = radians * (math.pi / 180)
    cosine, sine = radians.cos(), radians.sin()
    return _matrices(cosine, -sine, zero, sine, cosine, zero)


def sample_nearest(images_NCHW: Tensor, matrix_N23: Tensor, fill_C: Tensor) -> Tensor:
    """The images as the matrices see them; what comes from outside is `fill_C`."""
    channels, height, width = images_NCHW.shape[-3:]
    device = images_NCHW.device
    x_W = torch.arange(width, device=device, dtype=torch.float32) - 0.5 * (width - 1)
    y_H1 = torch.arange(height, device=device, dtype=torch.float32).unsqueeze(-1) - 0.5 * (height - 1)
    scaled = matrix_N23.to(torch.float32)[..., None, None]
    column_NHW = _source_position(scaled[:, 0] / (0.5 * width), x_W, y_H1, width)
    row_NHW = _source_position(scaled[:, 1] / (0.5 * height), x_W, y_H1, height)
    nearest_column, nearest_row = column_NHW.clamp(0, width - 1), row_NHW.clamp(0, height - 1)
    inside_NHW = (column_NHW == nearest_column) & (row_NHW == nearest_row)
    flat_NHW = (nearest_row * width + nearest_column).to(torch.int64)
    picked = images_NCHW.flatten(-2).gather(-1, flat_NHW.flatten(-2).unsqueeze(1).expand(-1, channels, -1))
    return torch.where(inside_NHW.unsqueeze(1), picked.view_as(images_NCHW), fill_C[:, None, None])


def _source_position(row_N3: Tensor, x_W: Tensor, y_H1: Tensor, size: int) -> Tensor:
    grid_NHW = (x_W * row_N3[:, 0] + y_H1 * row_N3[:, 1]).add_(row_N3[:, 2])
    return grid_NHW.add_(1).mul_(size).sub_(1).mul_(0.5).round_()


def _columns(magnitude_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    magnitude = magnitude_N.to(torch.float64)
    return magnitude, torch.zeros_like(magnitude), torch.ones_like(magnitude)


def _matrices(*entries_N: Tensor) -> Tensor:
    return torch.stack(entries_N, dim=-1).view(-1, 2, 3)
