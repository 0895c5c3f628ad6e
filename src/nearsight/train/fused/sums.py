"""The sum of a cell's rows, for the gradients of biases.

Shape suffixes: K cells, R rows (tokens) of a cell, C channels, T parts of the rows.
"""

import torch
from torch import Tensor

from nearsight.train.fused.tiles import chunk_of
from nearsight.triton_language import kernel, tl

_ROWS = 64
_TILES = 8
"""Of rows, that a program sums."""


def sum_rows(rows_KRC: Tensor) -> Tensor:
    """The sum over R, float32 [K, C]. They may be some of the channels of longer rows."""
    num_cells, num_rows, width = rows_KRC.shape
    row = rows_KRC.stride(1)
    assert rows_KRC.stride() == (num_rows * row, row, 1)
    num_parts, columns = -(-num_rows // (_ROWS * _TILES)), chunk_of(width)
    sums_KTC = torch.empty(num_cells, num_parts, width, device=rows_KRC.device)
    _sum_kernel[(num_parts, width // columns, num_cells)](
        rows_KRC, sums_KTC, num_rows, ROW=row, WIDTH=width, COLUMNS=columns, ROWS=_ROWS, TILES=_TILES, num_warps=4
    )
    return sums_KTC.sum(1)


@kernel
def _sum_kernel(
    rows,
    sums,
    num_rows,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    part = tl.program_id(0)
    cell = tl.program_id(2).to(tl.int64)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row_R = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        place_RC = (cell * num_rows + row_R)[:, None] * ROW + column_C[None, :]
        total_RC += tl.load(rows + place_RC, mask=(row_R < num_rows)[:, None], other=0.0).to(tl.float32)
    tl.store(sums + (cell * tl.num_programs(0) + part) * WIDTH + column_C, tl.sum(total_RC, 0))
