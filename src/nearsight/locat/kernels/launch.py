"""Launching the kernels on tensors that are there.

Shape suffixes: B images, H heads, N tokens, P patches, d head size, 2 the axes y and x.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.locat.grid import Grid
from nearsight.locat.kernels.backward_key import backward_key_kernel
from nearsight.locat.kernels.backward_query import backward_query_kernel
from nearsight.locat.kernels.forward import forward_kernel
from nearsight.locat.kernels.tiling import Pass, num_tiles, side_of_tile, tiling_of
from nearsight.triton_language import INTERPRETED


class Inputs(NamedTuple):
    query_BHNd: Tensor
    key_BHNd: Tensor
    value_BHNd: Tensor
    precision_BHP2: Tensor
    strength_BHP: Tensor


class Geometry(NamedTuple):
    rows: int
    cols: int
    num_prefix: int
    scale: float
    """Of the products of queries and keys."""
    largest_half_square: float

    @property
    def grid(self) -> Grid:
        return Grid(self.rows, self.cols, self.num_prefix)


def forward(inputs: Inputs, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """(output, base-2 logarithm of each query's sum of weights)."""
    out_BHNd, log_sum_BHN = new_results(inputs)
    bumps = [inputs.precision_BHP2, inputs.strength_BHP]
    _launch("forward", _with_whole_rows(*inputs[:3]), bumps, [out_BHNd, log_sum_BHN], geometry)
    return out_BHNd, log_sum_BHN


def backward(
    inputs: Inputs, geometry: Geometry, out_BHNd: Tensor, log_sum_BHN: Tensor, out_grad_BHNd: Tensor
) -> Inputs:
    """Gradients by the inputs, from that by the output."""
    grads = new_gradients(inputs)
    matrices = _with_whole_rows(*inputs[:3], out_grad_BHNd)
    bumps = [inputs.precision_BHP2, inputs.strength_BHP]
    num_images, num_heads, num_tokens, _ = out_BHNd.shape
    # For each query, what the pass for keys has to know about it: the kernels say what.
    notes_BH5N = log_sum_BHN.new_empty(num_images, num_heads, 5, num_tokens)
    results = [grads.query_BHNd, grads.precision_BHP2, grads.strength_BHP]
    _launch("backward_query", matrices, bumps, [log_sum_BHN, out_BHNd, notes_BH5N, *results], geometry)
    _launch("backward_key", matrices, [], [notes_BH5N, grads.key_BHNd, grads.value_BHNd], geometry)
    return grads


def new_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What `forward` gives, not yet written."""
    query = inputs.query_BHNd
    return _new_rows(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def new_gradients(inputs: Inputs) -> Inputs:
    """What `backward` gives, not yet written."""
    return Inputs(*(_new_rows(x) for x in inputs[:3]), *(x.new_empty(x.shape) for x in inputs[3:]))


def _new_rows(like_BHNd: Tensor) -> Tensor:
    """Laid out as [B, N, H, d], so that the heads of a token can be joined without a copy."""
    num_images, num_heads, num_tokens, head_size = like_BHNd.shape
    return like_BHNd.new_empty(num_images, num_tokens, num_heads, head_size).transpose(1, 2)


def _with_whole_rows(*matrices_BHNd: Tensor) -> list[Tensor]:
    """The same matrices, with each row in one piece: kernels take any strides but that of the last axis."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in matrices_BHNd]


_KERNELS: dict[Pass, Any] = {
    "forward": forward_kernel,
    "backward_query": backward_query_kernel,
    "backward_key": backward_key_kernel,
}


def _launch(which: Pass, matrices: list[Tensor], bumps: list[Tensor], others: list[Tensor], geometry: Geometry) -> None:
    """`others` are as made above. No number of images asks for another kernel to be compiled."""
    num_images, num_heads, _, head_size = matrices[0].shape
    grid = geometry.grid
    tiling = tiling_of(which, grid, head_size, matrices[0].dtype)
    furthest = 2 * geometry.largest_half_square
    loops = (
        {} if which == "backward_key" else {"WHOLE_ROWS": tiling.whole_rows(grid), "REST_STAGES": tiling.rest_stages}
    )
    with torch.cuda.device_of(matrices[0]):
        _KERNELS[which][(num_images * num_heads * num_tiles(which, grid, tiling),)](
            *matrices,
            *bumps,
            *others,
            geometry.scale,
            furthest,
            num_heads,
            *(stride for matrix in matrices for stride in matrix.stride()[:3]),
            *(stride for bump in bumps for stride in bump.stride()),
            ROWS=grid.rows,
            COLS=grid.cols,
            PREFIX=grid.num_prefix,
            WIDTH=head_size,
            WIDTH_BLOCK=side_of_tile(head_size),
            QUERIES=tiling.queries,
            TILE_ROWS=tiling.rows,
            TILE_COLS=tiling.cols,
            **loops,
            CLAMPED=furthest < max(grid.rows - 1, grid.cols - 1) ** 2,
            PRODUCTS="ieee" if INTERPRETED else "tf32x3",
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            maxnreg=tiling.registers,
            enable_fp_fusion=True,  # a product and its sum are one instruction
        )
