"""Where fused attention goes, by the kind of key, and what each key receives of it, on a GPU: no map in memory.

Sums along the columns of a map need the divisor of each row first. So one kernel makes the logits tile by tile and
keeps the logarithm of each query's sum; a second one, whose programs have some keys each, makes them again and adds up
the weights of all queries. If the cells of queries and keys are given, the first one also keeps the weight on the
query's own cell, on those around it, on its row and column, and so on: whether a key is there follows from two
differences, which cost little beside the exponential.

Shape suffixes: B images, W windows, H heads, N queries, M keys, d head size, X sets of queries, S shares.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nearsight.lens.kernels import place_of
from nearsight.triton_language import INTERPRETED, Prepared, kernel, launch, tl

_LOW = -1e30
"""The logit of a masked key: finite, because −∞ less −∞ is NaN."""
SHARES = ("own", "near", "row", "column", "edge", "breadth", "self", "neighbours", "cls", "registers")
"""What is known of each query. `own` to `edge` are shares of its attention on patches: on its own cell, on that and the
8 around it, on its row, on its column, on the edge; `breadth` is as in `nearsight.metrics.KindShares`. Then, of its
whole attention: on its own cell, on the 8 around it, on CLS and on registers."""
OF_WHOLE = SHARES[SHARES.index("self") :]
"""Those of the whole attention, which take half the sums."""


class Cells(NamedTuple):
    """In which cell of a grid each token lies, and which keys are what."""

    queries_WN2: Tensor
    """float32 (row, column); NaN for one that is not a patch, of which nothing is said."""
    keys_WM2: Tensor
    kinds_3WM: Tensor
    """float32, 1 for keys at the edge, for CLS and for registers, and 0 for others."""


def fused_attention_shares(
    query_BWHNd: Tensor, key_BWHMd: Tensor, *, scale: float, cells: Cells, only_of_whole: bool = False
) -> tuple[Tensor, Tensor]:
    """`SHARES`, or of these `OF_WHOLE` alone, summed over the queries of a tile that are patches, float32
    [S, B, W, H, T], the tiles being `side_of` queries each; and log₂ of the sum of 2^logit over all keys, float32
    [B, W, H, N], as `fused_attention_columns` takes it.

    Queries and keys are as for that one. Every window has a patch among its keys.
    """
    query_BWHNd, key_BWHMd = _ready(query_BWHNd), _ready(key_BWHMd)
    log_sums_BWHN = torch.empty(query_BWHNd.shape[:-1], dtype=torch.float32, device=query_BWHNd.device)
    tiles = -(-query_BWHNd.shape[3] // side_of(query_BWHNd))
    num_shares = len(OF_WHOLE if only_of_whole else SHARES)
    shares_SBWHT = log_sums_BWHN.new_empty(num_shares, *log_sums_BWHN.shape[:-1], tiles)
    given = (query_BWHNd, key_BWHMd, None, log_sums_BWHN, *cells, shares_SBWHT, scale * math.log2(math.e))
    constants = {"CELLS": True, "PLACES": not only_of_whole}
    launch(_rows, given, lambda: _prepared(query_BWHNd, key_BWHMd, None, of_queries=True, **constants))
    return shares_SBWHT, log_sums_BWHN


def fused_attention_columns(
    query_BWHNd: Tensor,
    key_BWHMd: Tensor,
    *,
    scale: float,
    sets_XWN: Tensor,
    bias: Tensor | None = None,
    log_sums_BWHN: Tensor | None = None,
) -> Tensor:
    """Sums over one or two sets of queries of what each key receives from them: float32 [X, B, W, H, M].

    Args:
        query_BWHNd: of any strides; float32, bfloat16 or float16; heads of a size up to 256.
        key_BWHMd: as the queries, with as many heads.
        scale: of the products of queries and keys.
        sets_XWN: float32, 1 for the queries of a set and 0 for others.
        bias: what is added to the logits, broadcast to [B, W, H, N, M]; bool: False is −∞, as is anything under −1e30.
        log_sums_BWHN: of all queries, if they are known (`fused_attention_shares`).

    Attention is the whole of it, to patches and to other tokens. A query whose every key is masked gives nothing.
    """
    query_BWHNd, key_BWHMd, sets_XWN = _ready(query_BWHNd), _ready(key_BWHMd), sets_XWN.contiguous()
    num_sets = len(sets_XWN)
    assert num_sets <= 2
    if bias is not None:
        bias = bias.expand(*query_BWHNd.shape[:-1], key_BWHMd.shape[3])
    log_scale = scale * math.log2(math.e)
    if log_sums_BWHN is None:
        log_sums_BWHN = torch.empty(query_BWHNd.shape[:-1], dtype=torch.float32, device=query_BWHNd.device)
        given = (query_BWHNd, key_BWHMd, bias, log_sums_BWHN, None, None, None, None, log_scale)
        launch(
            _rows, given, lambda: _prepared(query_BWHNd, key_BWHMd, bias, of_queries=True, CELLS=False, PLACES=False)
        )
    columns_XBWHM = torch.empty(num_sets, *key_BWHMd.shape[:-1], dtype=torch.float32, device=query_BWHNd.device)
    received = (query_BWHNd, key_BWHMd, bias, log_sums_BWHN, sets_XWN, columns_XBWHM, log_scale)
    launch(_columns, received, lambda: _prepared(query_BWHNd, key_BWHMd, bias, of_queries=False, SETS=num_sets))
    return columns_XBWHM


def sinks_by_kernel(received_BWHM: Tensor, patches: slice, times: float) -> Tensor:
    """`nearsight.metrics.sink_patches` among the keys that are patches, bool [B, W, H, K]."""
    received_BWHM, num_patches = received_BWHM.contiguous(), patches.stop - patches.start
    sinks_BWHK = torch.empty(*received_BWHM.shape[:-1], num_patches, dtype=torch.bool, device=received_BWHM.device)
    launch(
        _sinks,
        (received_BWHM, sinks_BWHK, times / num_patches, patches.start),
        lambda: Prepared(
            programs=received_BWHM.shape[:-1].numel(),
            numbers=[received_BWHM.shape[-1], num_patches],
            constants={"BLOCK": max(16, 1 << (num_patches - 1).bit_length())},
            options={"num_warps": 1 if num_patches <= 512 else 4},
        ),
    )
    return sinks_BWHK


def side_of(query_BWHNd: Tensor) -> int:
    """How many queries, and how many keys, a program has at a time."""
    width, in_half = query_BWHNd.shape[-1], query_BWHNd.dtype != torch.float32
    return 64 if width <= 64 or (in_half and width <= 128) else 32


def _ready(tokens_BWHNd: Tensor) -> Tensor:
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16
        tokens_BWHNd = tokens_BWHNd.float()
    return tokens_BWHNd if tokens_BWHNd.stride(-1) == 1 else tokens_BWHNd.contiguous()


def _prepared(query: Tensor, key: Tensor, bias: Tensor | None, *, of_queries: bool, **constants: int) -> Prepared:
    batch, windows, heads, num_queries, width = query.shape
    side, in_half = side_of(query), query.dtype != torch.float32
    is_narrow = in_half and width <= 64
    tiles = -(-query.shape[3] // side) if of_queries else -(-key.shape[3] // side)
    return Prepared(
        programs=tiles * batch * windows * heads,
        numbers=[
            *(tiles, windows, heads, num_queries, key.shape[3], batch * windows * heads),
            *(*query.stride()[:4], *key.stride()[:4], *(bias.stride() if bias is not None else [0] * 5)),
        ],
        constants={
            "WIDTH": width,
            "WIDTH_BLOCK": max(16, 1 << (width - 1).bit_length()),
            "SIDE": side,
            "BIAS": "none" if bias is None else "mask" if bias.dtype == torch.bool else "sum",
            "PRECISION": "ieee" if INTERPRETED or in_half else "tf32x3",
            "LOW": _LOW,
            **constants,
        },
        # Columns then take 117 registers instead of 154 (compiled for sm_90, heads of 64, two sets), so that four
        # programs fit a multiprocessor and not three; wider heads, biases and rows with cells would spill.
        options={"num_warps": 4, "maxnreg": 128 if is_narrow and bias is None and not of_queries else None},
    )


@kernel
def _rows(
    query, key, bias, log_sums, query_cells, key_cells, key_kinds, shares, scale,
    num_tiles, num_windows, num_heads, num_queries, num_keys, num_maps,
    query_b, query_w, query_h, query_n, key_b, key_w, key_h, key_m, bias_b, bias_w, bias_h, bias_n, bias_m,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, SIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    LOW: tl.constexpr, CELLS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """For some queries of a map, log₂ of the sum of 2^logit over all keys, ∞ where there are none; with CELLS also
    `OF_WHOLE`, and with PLACES all `SHARES`. Then the sum over patches is kept apart from that over other keys, so that
    a query which gives almost nothing to patches is still seen exactly."""
    tile, image, window, head, this_map = _place(num_tiles, num_windows, num_heads)
    query += image * query_b + window * query_w + head * query_h
    key += image * key_b + window * key_w + head * key_h
    row_N = tile * SIDE + tl.arange(0, SIDE)
    used_N = row_N < num_queries
    query_Nd = _tokens(query, row_N, num_queries, query_n, WIDTH, WIDTH_BLOCK)
    if BIAS != "none":
        bias += image * bias_b + window * bias_w + head * bias_h
    zero_N = tl.full([SIDE], 0.0, tl.float32)
    peak_N, sum_N = zero_N + LOW, zero_N
    if CELLS:
        row_y_N, row_x_N = place_of(query_cells + window * num_queries * 2, row_N, used_N)
        key_cells += window * num_keys * 2
        other_peak_N, other_N, cls_N, registers_N = zero_N + LOW, zero_N, zero_N, zero_N
        log_N, own_N, around_N, along_N, across_N, edge_N = zero_N, zero_N, zero_N, zero_N, zero_N, zero_N
        num_patches = 0
    for start in range(0, num_keys, SIDE):
        column_M = start + tl.arange(0, SIDE)
        key_Md = _tokens(key, column_M, num_keys, key_m, WIDTH, WIDTH_BLOCK)
        logit_NM = _logits(
            query_Nd, key_Md, bias, row_N, column_M, num_queries, num_keys, bias_n, bias_m, scale, BIAS, PRECISION, LOW
        )
        if CELLS:
            used_M = column_M < num_keys
            y_M, x_M = place_of(key_cells, column_M, used_M)
            is_other_M = used_M & (y_M != y_M)
            if tl.max(is_other_M.to(tl.int32), 0) > 0:
                other_NM = tl.where(is_other_M[None, :], logit_NM, LOW)
                other_peak_N, other_shrink_N, other_NM, _ = _weights(other_peak_N, other_NM, LOW)
                other_N = other_N * other_shrink_N + tl.sum(other_NM, 1)
                kinds_M = key_kinds + (num_windows + window) * num_keys + column_M
                cls_M = tl.load(kinds_M, mask=used_M, other=0.0)
                register_M = tl.load(kinds_M + num_windows * num_keys, mask=used_M, other=0.0)
                cls_N = cls_N * other_shrink_N + tl.sum(other_NM * cls_M[None, :], 1)
                registers_N = registers_N * other_shrink_N + tl.sum(other_NM * register_M[None, :], 1)
            logit_NM = tl.where((y_M == y_M)[None, :], logit_NM, LOW)
        new_peak_N, shrink_N, weight_NM, relative_NM = _weights(peak_N, logit_NM, LOW)
        if CELLS:
            num_patches += tl.sum((y_M == y_M).to(tl.int32), 0)
            # No difference to what is not a patch is 0, or small: it is NaN.
            down_NM = tl.abs(row_y_N[:, None] - y_M[None, :])
            right_NM = tl.abs(row_x_N[:, None] - x_M[None, :])
            in_row_NM = tl.where(down_NM == 0, weight_NM, 0.0)
            own_NM = tl.where(right_NM == 0, in_row_NM, 0.0)
            near_NM = tl.where((down_NM <= 1) & (right_NM <= 1), weight_NM, 0.0)
            own_N = own_N * shrink_N + tl.sum(own_NM, 1)
            around_N = around_N * shrink_N + tl.sum(near_NM - own_NM, 1)
            if PLACES:
                edge_M = tl.load(key_kinds + window * num_keys + column_M, mask=used_M, other=0.0)
                log_N = (log_N + sum_N * (peak_N - new_peak_N)) * shrink_N + tl.sum(weight_NM * relative_NM, 1)
                along_N = along_N * shrink_N + tl.sum(in_row_NM, 1)
                across_N = across_N * shrink_N + tl.sum(tl.where(right_NM == 0, weight_NM, 0.0), 1)
                edge_N = edge_N * shrink_N + tl.sum(weight_NM * edge_M[None, :], 1)
        sum_N = sum_N * shrink_N + tl.sum(weight_NM, 1)
        peak_N = new_peak_N
    if CELLS:
        top_N = tl.maximum(peak_N, other_peak_N)
        patches_N, others_N = tl.exp2(peak_N - top_N), tl.exp2(other_peak_N - top_N)
        whole_N = sum_N * patches_N + other_N * others_N
        first, step = shares + this_map * num_tiles + tile, num_maps * num_tiles
        if PLACES:  # of what goes to patches; the rest is of all
            entropy_N = tl.log(sum_N) - log_N / sum_N * 0.6931471805599453
            breadth_N = (tl.exp(entropy_N) - 1) / tl.maximum(num_patches - 1, 1)
            _store(first, 0, step, own_N / sum_N, row_y_N)
            _store(first, 1, step, (own_N + around_N) / sum_N, row_y_N)
            _store(first, 2, step, along_N / sum_N, row_y_N)
            _store(first, 3, step, across_N / sum_N, row_y_N)
            _store(first, 4, step, edge_N / sum_N, row_y_N)
            _store(first, 5, step, breadth_N, row_y_N)
        of_whole: tl.constexpr = 6 if PLACES else 0
        _store(first, of_whole, step, own_N * patches_N / whole_N, row_y_N)
        _store(first, of_whole + 1, step, around_N * patches_N / whole_N, row_y_N)
        _store(first, of_whole + 2, step, cls_N * others_N / whole_N, row_y_N)
        _store(first, of_whole + 3, step, registers_N * others_N / whole_N, row_y_N)
        peak_N, sum_N = top_N, whole_N
    log_sum_N = tl.where(peak_N > LOW / 2, peak_N + tl.log2(sum_N), float("inf"))
    log_sum_N = tl.where(sum_N == sum_N, log_sum_N, float("nan"))
    tl.store(log_sums + this_map * num_queries + row_N, log_sum_N, mask=used_N)


@kernel
def _weights(peak_N, logit_NM, LOW: tl.constexpr):
    """The largest logit so far; what makes earlier sums relative to it; the weights 2^(logit − largest), and their
    logarithms."""
    new_peak_N = tl.maximum(peak_N, tl.max(logit_NM, 1))
    # Of a query that has only seen masked keys, these weigh 2^LOW and not 2^(LOW − LOW).
    relative_NM = logit_NM - tl.where(new_peak_N > LOW / 2, new_peak_N, 0.0)[:, None]
    return new_peak_N, tl.exp2(peak_N - new_peak_N), tl.exp2(relative_NM), relative_NM


@kernel
def _store(first, share: tl.constexpr, step, values_N, row_y_N):
    """The sum over queries that are patches."""
    tl.store(first + share * step.to(tl.int64), tl.sum(tl.where(row_y_N == row_y_N, values_N, 0.0), 0))


@kernel
def _columns(
    query, key, bias, log_sums, sets, columns, scale,
    num_tiles, num_windows, num_heads, num_queries, num_keys, num_maps,
    query_b, query_w, query_h, query_n, key_b, key_w, key_h, key_m, bias_b, bias_w, bias_h, bias_n, bias_m,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, SIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    LOW: tl.constexpr, SETS: tl.constexpr,
):  # fmt: skip
    """For some keys of a map, the sums of their weights over the queries of each set."""
    tile, image, window, head, this_map = _place(num_tiles, num_windows, num_heads)
    query += image * query_b + window * query_w + head * query_h
    key += image * key_b + window * key_w + head * key_h
    column_M = tile * SIDE + tl.arange(0, SIDE)
    key_Md = _tokens(key, column_M, num_keys, key_m, WIDTH, WIDTH_BLOCK)
    if BIAS != "none":
        bias += image * bias_b + window * bias_w + head * bias_h
    # Threads have the same places in every tile: between them there is one sum at the end.
    first_NM = tl.full([SIDE, SIDE], 0.0, tl.float32)
    second_NM = tl.full([SIDE, SIDE], 0.0, tl.float32)
    for start in range(0, num_queries, SIDE):
        row_N = start + tl.arange(0, SIDE)
        used_N = row_N < num_queries
        query_Nd = _tokens(query, row_N, num_queries, query_n, WIDTH, WIDTH_BLOCK)
        logit_NM = _logits(
            query_Nd, key_Md, bias, row_N, column_M, num_queries, num_keys, bias_n, bias_m, scale, BIAS, PRECISION, LOW
        )
        log_N = tl.load(log_sums + this_map * num_queries + row_N, mask=used_N, other=float("inf"))
        weight_NM = tl.exp2(logit_NM - log_N[:, None])
        own_N = tl.load(sets + window * num_queries + row_N, mask=used_N, other=0.0)
        first_NM += weight_NM * own_N[:, None]
        if SETS == 2:
            other_N = tl.load(sets + (num_windows + window) * num_queries + row_N, mask=used_N, other=0.0)
            second_NM += weight_NM * other_N[:, None]
    used_M = column_M < num_keys
    tl.store(columns + this_map * num_keys + column_M, tl.sum(first_NM, 0), mask=used_M)
    if SETS == 2:
        second = columns + (num_maps + this_map) * num_keys + column_M
        tl.store(second, tl.sum(second_NM, 0), mask=used_M)


@kernel
def _sinks(received, sinks, times, num_before, num_keys, num_patches, BLOCK: tl.constexpr):
    """Of a map, which patches receive more than so many times the sum of all."""
    this_map, number_K = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    used_K = number_K < num_patches
    received_K = tl.load(received + this_map * num_keys + num_before + number_K, mask=used_K, other=0.0)
    tl.store(sinks + this_map * num_patches + number_K, received_K > tl.sum(received_K, 0) * times, mask=used_K)


@kernel
def _place(num_tiles, num_windows, num_heads):
    """(tile, image, window, head) of a program, and the number of the map."""
    this_map = (tl.program_id(0) // num_tiles).to(tl.int64)
    image, window = this_map // (num_windows * num_heads), this_map // num_heads % num_windows
    return tl.program_id(0) % num_tiles, image, window, this_map % num_heads, this_map


@kernel
def _tokens(first, token, num_tokens, step, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr):
    """Some queries or keys of a map; 0 past the last one."""
    width_d = tl.arange(0, WIDTH_BLOCK)
    used = (token < num_tokens)[:, None] & (width_d < WIDTH)[None, :]
    return tl.load(first + token.to(tl.int64)[:, None] * step + width_d[None, :], mask=used, other=0.0)


@kernel
def _logits(
    query_Nd, key_Md, bias, row_N, column_M, num_queries, num_keys, bias_n, bias_m, scale,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """To the base 2; LOW for keys that are masked, or past the last one."""
    logit_NM = tl.dot(query_Nd, tl.trans(key_Md), input_precision=PRECISION) * scale
    used_NM = (row_N < num_queries)[:, None] & (column_M < num_keys)[None, :]
    if BIAS != "none":
        place_NM = row_N.to(tl.int64)[:, None] * bias_n + column_M.to(tl.int64)[None, :] * bias_m
        bias_NM = tl.load(bias + place_NM, mask=used_NM, other=0)
        if BIAS == "mask":
            logit_NM = tl.where(bias_NM != 0, logit_NM, LOW)
        else:
            logit_NM += bias_NM.to(tl.float32) * 1.4426950408889634
            logit_NM = tl.where(logit_NM < LOW, LOW, logit_NM)
    return tl.where((column_M < num_keys)[None, :], logit_NM, LOW)
