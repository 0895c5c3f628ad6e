"""GELU of hidden units with their bias, and its gradient, in one pass over memory each.

Libraries' erf takes some 40 instructions, so many that it would cost as much as the memory. That of Abramowitz and
Stegun (7.1.26, error below 1.5e-7) shares its exponential with the density that the gradient needs.

Shape suffixes: K cells, R rows (tokens) of a cell, M hidden units, T tiles of rows.
"""

import torch
from torch import Tensor

from nearsight.train.fused.tiles import chunk_of
from nearsight.triton_language import kernel, tl

_ROWS = 64


def gelu_forward(hidden_KRM: Tensor, bias_KM: Tensor) -> Tensor:
    """gelu(hidden + bias)."""
    num_cells, num_rows, width = hidden_KRM.shape
    out_KRM = torch.empty_like(hidden_KRM)
    columns = chunk_of(width)
    _forward_kernel[(-(-num_rows // _ROWS), width // columns, num_cells)](
        hidden_KRM, bias_KM, out_KRM, num_rows, WIDTH=width, COLUMNS=columns, ROWS=_ROWS, num_warps=4
    )
    return out_KRM


def gelu_backward(gradient_KRM: Tensor, hidden_KRM: Tensor, bias_KM: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the hidden units, and its sums over the rows of each tile, [K, T, M]."""
    num_cells, num_rows, width = hidden_KRM.shape
    out_KRM = torch.empty_like(hidden_KRM)
    num_tiles, columns = -(-num_rows // _ROWS), chunk_of(width)
    sums_KTM = torch.empty(num_cells, num_tiles, width, device=hidden_KRM.device)
    _backward_kernel[(num_tiles, width // columns, num_cells)](
        gradient_KRM,
        hidden_KRM,
        bias_KM,
        out_KRM,
        sums_KTM,
        num_rows,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=_ROWS,
        num_warps=4,
    )
    return out_KRM, sums_KTM


@kernel
def _normal_distribution(x):
    """Density and distribution of the standard normal."""
    bell = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * bell
    return bell * 0.3989422804014327, tl.where(x < 0, tail, 1.0 - tail)


@kernel
def _forward_kernel(hidden, bias, out, num_rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    cell = tl.program_id(2).to(tl.int64)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit_M = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used_RM = (row_R < num_rows)[:, None] & (unit_M < WIDTH)[None, :]
    place_RM = (cell * num_rows + row_R)[:, None] * WIDTH + unit_M[None, :]
    x_RM = tl.load(hidden + place_RM, mask=used_RM, other=0.0).to(tl.float32)
    x_RM += tl.load(bias + cell * WIDTH + unit_M)[None, :]
    _, below_RM = _normal_distribution(x_RM)
    tl.store(out + place_RM, (x_RM * below_RM).to(out.dtype.element_ty), mask=used_RM)


@kernel
def _backward_kernel(
    gradient, hidden, bias, out, sums, num_rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    tile = tl.program_id(0)
    cell = tl.program_id(2).to(tl.int64)
    row_R = tile * ROWS + tl.arange(0, ROWS)
    unit_M = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used_RM = (row_R < num_rows)[:, None] & (unit_M < WIDTH)[None, :]
    place_RM = (cell * num_rows + row_R)[:, None] * WIDTH + unit_M[None, :]
    x_RM = tl.load(hidden + place_RM, mask=used_RM, other=0.0).to(tl.float32)
    x_RM += tl.load(bias + cell * WIDTH + unit_M)[None, :]
    density_RM, below_RM = _normal_distribution(x_RM)
    gradient_RM = tl.load(gradient + place_RM, mask=used_RM, other=0.0).to(tl.float32)
    gradient_RM *= below_RM + x_RM * density_RM
    tl.store(out + place_RM, gradient_RM.to(out.dtype.element_ty), mask=used_RM)
    tl.store(sums + (cell * tl.num_programs(0) + tile) * WIDTH + unit_M, tl.sum(gradient_RM, 0))
