"""What is done to rows of channels between matrix products, in one pass over memory each: what a branch adds to the
residual stream and the norm before the next branch, GELU with its bias, both also backwards, and sums of rows.

Layer norms have no scale and shift here: those are part of the projection after them (`folding`).

Tiles have sides that are powers of two, and widths such as 192 are not: the channels of some rows are a tuple of
chunks.

Shape suffixes: K cells, R rows (tokens) of a cell, C channels, M hidden units, T tiles of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nearsight.triton_language import kernel, tl

_LARGEST_CHUNK = 64
_MOST_CHUNKS = 12
_ROWS = 64
"""Of a tile."""
_ROWS_FORWARD, _ROWS_BACKWARD = 32, 64
"""Of a tile of the residual stream."""
_TILES = 8
"""Of rows, that a program sums."""


def _chunk_of(width: int) -> int:
    """Channels of a chunk: a power of two that divides the width."""
    return min(_LARGEST_CHUNK, width & -width)


def is_supported_width(width: int) -> bool:
    """Whether a program can hold rows of so many channels."""
    return width % 16 == 0 and width // _chunk_of(width) <= _MOST_CHUNKS


@kernel
def _load_chunks(rows, at_R, used_R, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """All channels of some rows."""
    chunks = ()
    for c in tl.static_range(WIDTH // CHUNK):
        place = at_R[:, None] * WIDTH + (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        chunks += (tl.load(rows + place, mask=used_R[:, None], other=0.0),)
    return chunks


@kernel
def _store_chunks(rows, chunks, at_R, used_R, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    for c in tl.static_range(WIDTH // CHUNK):
        place = at_R[:, None] * WIDTH + (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        tl.store(rows + place, chunks[c].to(rows.dtype.element_ty), mask=used_R[:, None])


class Normal(NamedTuple):
    """Rows of zero mean and unit variance."""

    rows_KRC: Tensor
    rstd_KR: Tensor
    """One over the deviation that they had."""


class Gradient(NamedTuple):
    """The gradient of the residual stream somewhere, in the forms that the branch before needs."""

    rows_KRC: Tensor
    rounded_KRC: Tensor
    """In the dtype of the products."""
    sums_KTC: Tensor
    """Over the rows of each tile; over all of them it is the gradient of a bias."""


def normalize_stream(rows_KRC: Tensor, eps: float, dtype: torch.dtype) -> Normal:
    """The stream as the first branch sees it."""
    normal = _empty_normal(rows_KRC, dtype)
    _stream(rows_KRC, None, None, None, normal, eps)
    return normal


def add_branch(
    rows_KRC: Tensor, branch_KRC: Tensor, bias_KC: Tensor | None, eps: float | None
) -> tuple[Tensor, Normal | None]:
    """The stream with what a branch and its bias add to it; and as the next branch sees it, if its `eps` is given."""
    out_KRC = torch.empty_like(rows_KRC)
    normal = None if eps is None else _empty_normal(rows_KRC, branch_KRC.dtype)
    _stream(rows_KRC, branch_KRC, bias_KC, out_KRC, normal, eps or 0.0)
    return out_KRC, normal


def start_back(rows_KRC: Tensor, dtype: torch.dtype) -> Gradient:
    """The gradient of the stream's end, as the last branch needs it."""
    return _stream_back(rows_KRC, None, None, dtype)


def norm_back(gradient: Gradient, branch_KRC: Tensor, normal: Normal) -> Gradient:
    """The stream's gradient before a branch, from that after it and that of the branch's normalised input."""
    return _stream_back(gradient.rows_KRC, branch_KRC, normal, branch_KRC.dtype)


def _empty_normal(rows_KRC: Tensor, dtype: torch.dtype) -> Normal:
    return Normal(torch.empty_like(rows_KRC, dtype=dtype), rows_KRC.new_empty(rows_KRC.shape[:2]))


def _stream(
    rows_KRC: Tensor,
    branch_KRC: Tensor | None,
    bias_KC: Tensor | None,
    out_KRC: Tensor | None,
    normal: Normal | None,
    eps: float,
) -> None:
    num_cells, num_rows, width = rows_KRC.shape
    _stream_kernel[(-(-num_rows // _ROWS_FORWARD), num_cells)](
        rows_KRC, branch_KRC, bias_KC, out_KRC, *(normal or (None, None)), num_rows,
        0 if bias_KC is None else bias_KC.stride(0), eps,
        WIDTH=width, CHUNK=_chunk_of(width), ROWS=_ROWS_FORWARD, num_warps=4,
    )  # fmt: skip


def _stream_back(rows_KRC: Tensor, branch_KRC: Tensor | None, normal: Normal | None, dtype: torch.dtype) -> Gradient:
    num_cells, num_rows, width = rows_KRC.shape
    num_tiles = -(-num_rows // _ROWS_BACKWARD)
    # Without a branch the stream's gradient stays what it is.
    out_KRC = rows_KRC if branch_KRC is None else torch.empty_like(rows_KRC)
    rounded_KRC = torch.empty_like(rows_KRC, dtype=dtype)
    sums_KTC = torch.empty(num_cells, num_tiles, width, device=rows_KRC.device)
    _stream_back_kernel[(num_tiles, num_cells)](
        rows_KRC, branch_KRC, *(normal or (None, None)), out_KRC, rounded_KRC, sums_KTC, num_rows,
        WIDTH=width, CHUNK=_chunk_of(width), ROWS=_ROWS_BACKWARD, num_warps=4,
    )  # fmt: skip
    return Gradient(out_KRC, rounded_KRC, sums_KTC)


@kernel
def _stream_kernel(
    rows, branch, bias, out, normal, rstd, num_rows, bias_k, eps,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used_R = row_R < num_rows
    at_R = cell * num_rows + row_R
    chunks = _load_chunks(rows, at_R, used_R, WIDTH, CHUNK)
    if branch is not None:
        added = _load_chunks(branch, at_R, used_R, WIDTH, CHUNK)
        new = ()
        for c in tl.static_range(WIDTH // CHUNK):
            total = chunks[c].to(tl.float32) + added[c].to(tl.float32)
            if bias is not None:
                total += tl.load(bias + cell * bias_k + c * CHUNK + tl.arange(0, CHUNK))[None, :]
            new += (total,)
        chunks = new
        _store_chunks(out, chunks, at_R, used_R, WIDTH, CHUNK)
    if normal is not None:
        total_R = tl.zeros([ROWS], tl.float32)
        for c in tl.static_range(WIDTH // CHUNK):
            total_R += tl.sum(chunks[c].to(tl.float32), 1)
        mean_R1 = (total_R / WIDTH)[:, None]
        spread_R = tl.zeros([ROWS], tl.float32)
        for c in tl.static_range(WIDTH // CHUNK):
            away = chunks[c].to(tl.float32) - mean_R1
            spread_R += tl.sum(away * away, 1)
        rstd_R = 1.0 / tl.sqrt(spread_R / WIDTH + eps)
        tl.store(rstd + at_R, rstd_R, mask=used_R)
        normals = ()
        for c in tl.static_range(WIDTH // CHUNK):
            normals += ((chunks[c].to(tl.float32) - mean_R1) * rstd_R[:, None],)
        _store_chunks(normal, normals, at_R, used_R, WIDTH, CHUNK)


@kernel
def _stream_back_kernel(
    rows, branch, normal, rstd, out, rounded, sums, num_rows,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    cell = tl.program_id(1).to(tl.int64)
    row_R = tile * ROWS + tl.arange(0, ROWS)
    used_R = row_R < num_rows
    at_R = cell * num_rows + row_R
    chunks = _load_chunks(rows, at_R, used_R, WIDTH, CHUNK)
    if branch is not None:
        gradients = _load_chunks(branch, at_R, used_R, WIDTH, CHUNK)
        normals = _load_chunks(normal, at_R, used_R, WIDTH, CHUNK)
        along_R = tl.zeros([ROWS], tl.float32)
        mean_R = tl.zeros([ROWS], tl.float32)
        for c in tl.static_range(WIDTH // CHUNK):
            along_R += tl.sum(gradients[c].to(tl.float32) * normals[c].to(tl.float32), 1)
            mean_R += tl.sum(gradients[c].to(tl.float32), 1)
        rstd_R1 = tl.load(rstd + at_R, mask=used_R, other=0.0)[:, None]
        new = ()
        for c in tl.static_range(WIDTH // CHUNK):
            inner = gradients[c].to(tl.float32) - (mean_R / WIDTH)[:, None]
            inner -= normals[c].to(tl.float32) * (along_R / WIDTH)[:, None]
            new += (chunks[c].to(tl.float32) + rstd_R1 * inner,)
        chunks = new
        _store_chunks(out, chunks, at_R, used_R, WIDTH, CHUNK)
    _store_chunks(rounded, chunks, at_R, used_R, WIDTH, CHUNK)
    for c in tl.static_range(WIDTH // CHUNK):
        place = (cell * tl.num_programs(0) + tile) * WIDTH + c * CHUNK + tl.arange(0, CHUNK)
        tl.store(sums + place, tl.sum(chunks[c].to(tl.float32), 0))


def gelu_forward(hidden_KRM: Tensor, bias_KM: Tensor) -> Tensor:
    """gelu(hidden + bias)."""
    num_cells, num_rows, width = hidden_KRM.shape
    out_KRM = torch.empty_like(hidden_KRM)
    columns = _chunk_of(width)
    _gelu_kernel[(-(-num_rows // _ROWS), width // columns, num_cells)](
        hidden_KRM, bias_KM, out_KRM, num_rows, WIDTH=width, COLUMNS=columns, ROWS=_ROWS, num_warps=4
    )
    return out_KRM


def gelu_backward(gradient_KRM: Tensor, hidden_KRM: Tensor, bias_KM: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the hidden units, and its sums over the rows of each tile, [K, T, M]."""
    num_cells, num_rows, width = hidden_KRM.shape
    out_KRM = torch.empty_like(hidden_KRM)
    num_tiles, columns = -(-num_rows // _ROWS), _chunk_of(width)
    sums_KTM = torch.empty(num_cells, num_tiles, width, device=hidden_KRM.device)
    _gelu_back_kernel[(num_tiles, width // columns, num_cells)](
        gradient_KRM, hidden_KRM, bias_KM, out_KRM, sums_KTM, num_rows,
        WIDTH=width, COLUMNS=columns, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return out_KRM, sums_KTM


@kernel
def _normal_distribution(x):
    """Density and distribution of the standard normal.

    Libraries' erf takes some 40 instructions, so many that it would cost as much as the memory. That of Abramowitz and
    Stegun (7.1.26, error below 1.5e-7) shares its exponential with the density that the gradient needs.
    """
    bell = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * bell
    return bell * 0.3989422804014327, tl.where(x < 0, tail, 1.0 - tail)


@kernel
def _gelu_kernel(hidden, bias, out, num_rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
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
def _gelu_back_kernel(
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


def sum_rows(rows_KRC: Tensor) -> Tensor:
    """The sum over R, float32 [K, C], as the gradient of a bias. They may be some of the channels of longer rows."""
    num_cells, num_rows, width = rows_KRC.shape
    row = rows_KRC.stride(1)
    assert rows_KRC.stride() == (num_rows * row, row, 1)
    num_parts, columns = -(-num_rows // (_ROWS * _TILES)), _chunk_of(width)
    sums_KTC = torch.empty(num_cells, num_parts, width, device=rows_KRC.device)
    _sum_kernel[(num_parts, width // columns, num_cells)](
        rows_KRC, sums_KTC, num_rows, ROW=row, WIDTH=width, COLUMNS=columns, ROWS=_ROWS, TILES=_TILES, num_warps=4
    )
    return sums_KTC.sum(1)


@kernel
def _sum_kernel(
    rows, sums, num_rows,
    ROW: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    cell = tl.program_id(2).to(tl.int64)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row_R = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        place_RC = (cell * num_rows + row_R)[:, None] * ROW + column_C[None, :]
        total_RC += tl.load(rows + place_RC, mask=(row_R < num_rows)[:, None], other=0.0).to(tl.float32)
    tl.store(sums + (cell * tl.num_programs(0) + part) * WIDTH + column_C, tl.sum(total_RC, 0))
