"""What is added to the logits between patches: α times a kernel of their distance (S2 Eq. 8-10 and App. E).

All kernels are functions of r² = Σ_axis Δ²/(variance + EPS), a squared distance in standard deviations of the query:
the Gaussian exp(−r²/2), the Laplace kernel exp(−r), the inverse distance 1/(1 + r). With `precision` = ½/(variance +
EPS) this is r² = 2 Σ_axis precision·Δ². The Gaussian is the product of a vector over rows and one over columns.

Shape suffixes: B images, H heads, N tokens, P patches, T queries of a tile, R rows, C columns, 2 (by row, by column).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.locat.grid import Grid

Kernel = Literal["gaussian", "laplace", "inverse"]


def squared_steps(grid: Grid, largest_half_square: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Δ² from each patch to each row and to each column, [P, R] and [P, C]; ½Δ² is at most `largest_half_square`."""
    rows_R, cols_C = (torch.arange(side, device=like.device, dtype=like.dtype) for side in (grid.rows, grid.cols))
    rows_RR, cols_CC = ((side[:, None] - side).square() for side in (rows_R, cols_C))
    if largest_half_square < math.inf:
        rows_RR, cols_CC = (steps.clamp(max=2 * largest_half_square) for steps in (rows_RR, cols_CC))
    return rows_RR.repeat_interleave(grid.cols, dim=0), cols_CC.repeat(grid.rows, 1)


def bias_between_patches(
    precision_BHT2: Tensor, strength_BHT: Tensor, steps: tuple[Tensor, Tensor], kernel: Kernel
) -> Tensor:
    """[B, H, T, P]: of some patches as queries, to all patches."""
    rows_BHTR = precision_BHT2[..., :1] * steps[0]
    cols_BHTC = precision_BHT2[..., 1:] * steps[1]
    if kernel == "gaussian":
        scaled_BHTR = strength_BHT[..., None] * torch.exp(-rows_BHTR)
        return (scaled_BHTR[..., None] * torch.exp(-cols_BHTC)[..., None, :]).flatten(-2)
    square_BHTP = 2 * (rows_BHTR[..., None] + cols_BHTC[..., None, :]).flatten(-2)
    # The root has no derivative at 0, where a patch looks at itself; there the distance depends on no variance.
    radius_BHTP = square_BHTP.clamp(min=torch.finfo(square_BHTP.dtype).tiny).sqrt()
    kernel_BHTP = torch.exp(-radius_BHTP) if kernel == "laplace" else 1 / (1 + radius_BHTP)
    return strength_BHT[..., None] * kernel_BHTP


def bias_between_tokens(
    precision_BHP2: Tensor, strength_BHP: Tensor, grid: Grid, *, kernel: Kernel, largest_half_square: float
) -> Tensor:
    """[B, H, N, N]: 0 for every token that is no patch. All of it at once, so for few tokens only."""
    steps = squared_steps(grid, largest_half_square, precision_BHP2)
    bias_BHPP = bias_between_patches(precision_BHP2, strength_BHP, steps, kernel)
    return F.pad(bias_BHPP, (grid.num_prefix, 0, grid.num_prefix, 0))
