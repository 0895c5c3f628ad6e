"""What each key receives of fused attention, on a GPU: two launches per layer, and no map in memory.

Sums along the columns of a map need the divisor of each row first. So one kernel makes the logits tile by tile and
keeps the logarithm of each query's sum; a second one, whose programs have some keys each, makes them again and adds up
the weights of all queries. Neither needs distances or entropies, so each does less per pair of tokens than the kernel
of `nearsight.lens.kernels`.

Shape suffixes: B images, W windows, H heads, N queries, M keys, d head size, X sets of queries.
"""

import math

import torch
from torch import Tensor

from nearsight.triton_language import INTERPRETED, kernel, tl

_LOW = -1e30
"""The logit of a masked key: finite, because −∞ less −∞ is NaN."""


def fused_attention_columns(
    query_BWHNd: Tensor, key_BWHMd: Tensor, *, scale: float, sets_XWN: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Sums over one or two sets of queries of what each key receives from them: float32 [X, B, W, H, M].

    Args:
        query_BWHNd: of any strides; float32, bfloat16 or float16; heads of a size up to 256.
        key_BWHMd: as the queries, with as many heads.
        scale: of the products of queries and keys.
        sets_XWN: float32, 1 for the queries of a set and 0 for others.
        bias: what is added to the logits, broadcast to [B, W, H, N, M]; bool: False is −∞, as is anything under −1e30.

    Attention is the whole of it, to patches and to other tokens. A query whose every key is masked gives nothing.
    """
    query_BWHNd, key_BWHMd = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_BWHNd, key_BWHMd))
    batch, windows, heads, num_queries, width = query_BWHNd.shape
    num_keys, num_sets, sets_XWN = key_BWHMd.shape[3], len(sets_XWN), sets_XWN.contiguous()
    assert num_sets <= 2
    if bias is not None:
        bias = bias.expand(batch, windows, heads, num_queries, num_keys)
    in_half = query_BWHNd.dtype != torch.float32
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16
        query_BWHNd, key_BWHMd = query_BWHNd.float(), key_BWHMd.float()
    side = 64 if width <= 64 or (in_half and width <= 128) else 32
    constants = {
        "WIDTH": width,
        "WIDTH_BLOCK": max(16, 1 << (width - 1).bit_length()),
        "SIDE": side,
        "BIAS": "none" if bias is None else "mask" if bias.dtype == torch.bool else "sum",
        "PRECISION": "ieee" if INTERPRETED or in_half else "tf32x3",
        "LOW": _LOW,
        "num_warps": 4,
    }
    sizes = (windows, heads, num_queries, num_keys)
    strides = (*query_BWHNd.stride()[:4], *key_BWHMd.stride()[:4], *(bias.stride() if bias is not None else [0] * 5))
    sums_BWHN = torch.empty(batch, windows, heads, num_queries, dtype=torch.float32, device=query_BWHNd.device)
    columns_XBWHM = torch.empty(num_sets, batch, windows, heads, num_keys, device=query_BWHNd.device)
    given = (query_BWHNd, key_BWHMd, bias, scale * math.log2(math.e))
    maps = batch * windows * heads
    with torch.cuda.device_of(sums_BWHN):
        _rows[(-(-num_queries // side), maps)](*given, sums_BWHN, *sizes, *strides, **constants)
        _columns[(-(-num_keys // side), maps)](
            *given, sums_BWHN, sets_XWN, columns_XBWHM, *sizes, maps * num_keys, *strides, SETS=num_sets, **constants
        )
    return columns_XBWHM


@kernel
def _rows(
    query, key, bias, scale, log_sums, num_windows, num_heads, num_queries, num_keys,
    query_b, query_w, query_h, query_n, key_b, key_w, key_h, key_m, bias_b, bias_w, bias_h, bias_n, bias_m,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, SIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """For some queries of a map, log₂ of the sum of 2^logit over all keys; ∞ where there are none."""
    image, window, head, this_map = _place(num_windows, num_heads)
    query += image * query_b + window * query_w + head * query_h
    key += image * key_b + window * key_w + head * key_h
    row_N = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    query_Nd = _tokens(query, row_N, num_queries, query_n, WIDTH, WIDTH_BLOCK)
    if BIAS != "none":
        bias += image * bias_b + window * bias_w + head * bias_h
    peak_N = tl.full([SIDE], LOW, tl.float32)
    sum_N = tl.full([SIDE], 0.0, tl.float32)
    for start in range(0, num_keys, SIDE):
        column_M = start + tl.arange(0, SIDE)
        key_Md = _tokens(key, column_M, num_keys, key_m, WIDTH, WIDTH_BLOCK)
        logit_NM = _logits(
            query_Nd, key_Md, bias, row_N, column_M, num_queries, num_keys, bias_n, bias_m, scale, BIAS, PRECISION, LOW
        )
        new_peak_N = tl.maximum(peak_N, tl.max(logit_NM, 1))
        # Of a query that has only seen masked keys, these weigh 2^LOW and not 2^(LOW − LOW).
        base_N = tl.where(new_peak_N > LOW / 2, new_peak_N, 0.0)
        sum_N = sum_N * tl.exp2(peak_N - new_peak_N) + tl.sum(tl.exp2(logit_NM - base_N[:, None]), 1)
        peak_N = new_peak_N
    log_N = tl.where(peak_N > LOW / 2, peak_N + tl.log2(sum_N), float("inf"))
    log_N = tl.where(sum_N == sum_N, log_N, float("nan"))
    tl.store(log_sums + this_map * num_queries + row_N, log_N, mask=row_N < num_queries)


@kernel
def _columns(
    query, key, bias, scale, log_sums, sets, columns, num_windows, num_heads, num_queries, num_keys, num_columns,
    query_b, query_w, query_h, query_n, key_b, key_w, key_h, key_m, bias_b, bias_w, bias_h, bias_n, bias_m,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, SIDE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    LOW: tl.constexpr, SETS: tl.constexpr,
):  # fmt: skip
    """For some keys of a map, the sums of their weights over the queries of each set."""
    image, window, head, this_map = _place(num_windows, num_heads)
    query += image * query_b + window * query_w + head * query_h
    key += image * key_b + window * key_w + head * key_h
    column_M = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    key_Md = _tokens(key, column_M, num_keys, key_m, WIDTH, WIDTH_BLOCK)
    if BIAS != "none":
        bias += image * bias_b + window * bias_w + head * bias_h
    first_M = tl.full([SIDE], 0.0, tl.float32)
    second_M = tl.full([SIDE], 0.0, tl.float32)
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
        first_M += tl.sum(weight_NM * own_N[:, None], 0)
        if SETS == 2:
            other_N = tl.load(sets + (num_windows + window) * num_queries + row_N, mask=used_N, other=0.0)
            second_M += tl.sum(weight_NM * other_N[:, None], 0)
    used_M = column_M < num_keys
    tl.store(columns + this_map * num_keys + column_M, first_M, mask=used_M)
    if SETS == 2:
        tl.store(columns + num_columns + this_map * num_keys + column_M, second_M, mask=used_M)


@kernel
def _place(num_windows, num_heads):
    """(image, window, head) of a program, and the number of the map."""
    this_map = tl.program_id(1).to(tl.int64)
    return this_map // (num_windows * num_heads), this_map // num_heads % num_windows, this_map % num_heads, this_map


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
