"""The residual stream between two branches: what one adds to it and the norm before the next, and the same backwards.

One pass over memory each. Layer norms have no scale and shift here: those are part of the projection after them
(`folding`).

Shape suffixes: K cells, R rows (tokens) of a cell, C channels, T tiles of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nearsight.train.fused.tiles import chunk_of, load_chunks, store_chunks
from nearsight.triton_language import kernel, tl

_ROWS_FORWARD = 32
_ROWS_BACKWARD = 64


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
    _forward(rows_KRC, None, None, None, normal, eps)
    return normal


def add_branch(
    rows_KRC: Tensor, branch_KRC: Tensor, bias_KC: Tensor | None, eps: float | None
) -> tuple[Tensor, Normal | None]:
    """The stream with what a branch and its bias add to it; and as the next branch sees it, if its `eps` is given."""
    out_KRC = torch.empty_like(rows_KRC)
    normal = None if eps is None else _empty_normal(rows_KRC, branch_KRC.dtype)
    _forward(rows_KRC, branch_KRC, bias_KC, out_KRC, normal, eps or 0.0)
    return out_KRC, normal


def start_back(rows_KRC: Tensor, dtype: torch.dtype) -> Gradient:
    """The gradient of the stream's end, as the last branch needs it."""
    return _backward(rows_KRC, None, None, dtype)


def norm_back(gradient: Gradient, branch_KRC: Tensor, normal: Normal) -> Gradient:
    """The stream's gradient before a branch, from that after it and that of the branch's normalised input."""
    return _backward(gradient.rows_KRC, branch_KRC, normal, branch_KRC.dtype)


def _empty_normal(rows_KRC: Tensor, dtype: torch.dtype) -> Normal:
    return Normal(torch.empty_like(rows_KRC, dtype=dtype), rows_KRC.new_empty(rows_KRC.shape[:2]))


def _forward(
    rows_KRC: Tensor,
    branch_KRC: Tensor | None,
    bias_KC: Tensor | None,
    out_KRC: Tensor | None,
    normal: Normal | None,
    eps: float,
) -> None:
    num_cells, num_rows, width = rows_KRC.shape
    _forward_kernel[(-(-num_rows // _ROWS_FORWARD), num_cells)](
        rows_KRC,
        branch_KRC,
        bias_KC,
        out_KRC,
        *(normal or (None, None)),
        num_rows,
        0 if bias_KC is None else bias_KC.stride(0),
        eps,
        WIDTH=width,
        CHUNK=chunk_of(width),
        ROWS=_ROWS_FORWARD,
        num_warps=4,
    )


def _backward(rows_KRC: Tensor, branch_KRC: Tensor | None, normal: Normal | None, dtype: torch.dtype) -> Gradient:
    num_cells, num_rows, width = rows_KRC.shape
    num_tiles = -(-num_rows // _ROWS_BACKWARD)
    # Without a branch the stream's gradient stays what it is.
    out_KRC = rows_KRC if branch_KRC is None else torch.empty_like(rows_KRC)
    rounded_KRC = torch.empty_like(rows_KRC, dtype=dtype)
    sums_KTC = torch.empty(num_cells, num_tiles, width, device=rows_KRC.device)
    _backward_kernel[(num_tiles, num_cells)](
        rows_KRC,
        branch_KRC,
        *(normal or (None, None)),
        out_KRC,
        rounded_KRC,
        sums_KTC,
        num_rows,
        WIDTH=width,
        CHUNK=chunk_of(width),
        ROWS=_ROWS_BACKWARD,
        num_warps=4,
    )
    return Gradient(out_KRC, rounded_KRC, sums_KTC)


@kernel
def _forward_kernel(
    rows,
    branch,
    bias,
    out,
    normal,
    rstd,
    num_rows,
    bias_k,
    eps,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    cell = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used_R = row_R < num_rows
    at_R = cell * num_rows + row_R
    chunks = load_chunks(rows, at_R, used_R, WIDTH, CHUNK)
    if branch is not None:
        added = load_chunks(branch, at_R, used_R, WIDTH, CHUNK)
        new = ()
        for c in tl.static_range(WIDTH // CHUNK):
            total = chunks[c].to(tl.float32) + added[c].to(tl.float32)
            if bias is not None:
                total += tl.load(bias + cell * bias_k + c * CHUNK + tl.arange(0, CHUNK))[None, :]
            new += (total,)
        chunks = new
        store_chunks(out, chunks, at_R, used_R, WIDTH, CHUNK)
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
        store_chunks(normal, normals, at_R, used_R, WIDTH, CHUNK)


@kernel
def _backward_kernel(
    rows,
    branch,
    normal,
    rstd,
    out,
    rounded,
    sums,
    num_rows,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile = tl.program_id(0)
    cell = tl.program_id(1).to(tl.int64)
    row_R = tile * ROWS + tl.arange(0, ROWS)
    used_R = row_R < num_rows
    at_R = cell * num_rows + row_R
    chunks = load_chunks(rows, at_R, used_R, WIDTH, CHUNK)
    if branch is not None:
        gradients = load_chunks(branch, at_R, used_R, WIDTH, CHUNK)
        normals = load_chunks(normal, at_R, used_R, WIDTH, CHUNK)
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
        store_chunks(out, chunks, at_R, used_R, WIDTH, CHUNK)
    store_chunks(rounded, chunks, at_R, used_R, WIDTH, CHUNK)
    for c in tl.static_range(WIDTH // CHUNK):
        place = (cell * tl.num_programs(0) + tile) * WIDTH + c * CHUNK + tl.arange(0, CHUNK)
        tl.store(sums + place, tl.sum(chunks[c].to(tl.float32), 0))
