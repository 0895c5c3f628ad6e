"""Distance and entropy of fused attention on a GPU: one launch per layer, and no map in memory.

Fused attention never shows its maps, but its queries and keys are all that the maps are made of. The kernel makes the
logits again, tile by tile, as flash attention does, and keeps four numbers per query instead of a weighted sum of
values: the largest logit so far, Σ w, Σ w·d and Σ w·s, with weights w = 2ˢ relative to that largest.

What it costs is the arithmetic on each pair of tokens, not the matrix product. A distance (a root, and four operations
more) is the same for all images and heads, so a program makes a tile of distances once for several of them.

On an H200, for ViT-B/16 in bfloat16, it takes about as long as the model's own fused attention: 0.054, 0.149 and
0.546 ms for 64 × 197, 16 × 1,025 and 4 × 4,097 tokens (attention: 0.049, 0.178 and 0.511 ms). Forwards with it, and
nothing else around it, took 1.1, 1.2 and 1.5 times as long as without.

Shape suffixes: B images, W windows, H heads, N queries, M keys, d head size; L columns that sums are kept apart for.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nearsight.triton_language import INTERPRETED, Prepared, launch, tl, triton

if TYPE_CHECKING:
    from typing import no_type_check as jit  # kernels are Python by their syntax alone
else:
    # Otherwise another kernel would be compiled for sizes that are 1 or multiples of 16, and be no faster.
    whatever_value = ("batch", "windows", "heads", "heads_per_key", "num_queries", "num_keys", "query_tiles")
    jit = partial(triton.jit, do_not_specialize=whatever_value) if triton is not None else lambda kernel: kernel


def fused_attention_rows(
    query_BWHNd: Tensor,
    key_BWHMd: Tensor,
    *,
    scale: float,
    query_places_WN2: Tensor,
    key_places_WM2: Tensor,
    bias: Tensor | None = None,
    hidden_BWHM: Tensor | None = None,
) -> Tensor:
    """Distance and entropy of every query, in grid cells and in nats: float32 [2, B, W, H, N].

    Args:
        query_BWHNd: of any strides; float32, bfloat16 or float16; heads of a size up to 256.
        key_BWHMd: as the queries; if it has fewer heads, each is shared by neighbouring heads of the queries.
        scale: of the products of queries and keys.
        query_places_WN2: float32 (y, x) in grid cells. NaN: this token is not a patch, and its results are NaN.
        key_places_WM2: as above; attention is renormalised over the patches because other tokens are left out.
        bias: what is added to the logits, broadcast to [B, W, H, N, M]; bool: False is −∞, as is anything under −1e30.
        hidden_BWHM: bool, keys that are left out. Where a map is all of its head's, one without any is not computed
            (NaN): whoever leaves keys out knows what it is without that.

    A query whose every patch key is masked has NaN results, and so has one with a NaN among what it looks at.

    Sums are float32, and so are products of float32 (three TF32 products each). Against float64 on the same inputs, for
    any dtype and 1,036 patches, the mean error of a head's queries was at most 2e-7 of their mean, and 1e-6 with logits
    up to ±60; that of a single query was at most 3e-6, and 3e-5 (of its distance or entropy + 0.01).
    """
    if scale <= 0:  # the kernel scales last: the largest logit has to be that of the largest product
        query_BWHNd, scale = query_BWHNd * (-1 if scale else 0), -scale or 1.0
    query_BWHNd, key_BWHMd = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_BWHNd, key_BWHMd))
    batch, windows, heads, num_queries, _ = query_BWHNd.shape
    if bias is not None:
        bias = bias.expand(batch, windows, heads, num_queries, key_BWHMd.shape[3])
    rows_2BWHN = torch.empty(2, batch, windows, heads, num_queries, dtype=torch.float32, device=query_BWHNd.device)
    places = query_places_WN2.contiguous(), key_places_WM2.contiguous()
    hidden = None if hidden_BWHM is None else hidden_BWHM.contiguous()
    tiling = _tiling(query_BWHNd.shape[4], key_BWHMd.shape[3], query_BWHNd.dtype, with_bias=bias is not None)
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16
        query_BWHNd, key_BWHMd = query_BWHNd.float(), key_BWHMd.float()
    given = (query_BWHNd, key_BWHMd, bias, hidden, *places, rows_2BWHN, scale * math.log2(math.e))
    launch(_rows_kernel, given, lambda: _prepared(query_BWHNd, key_BWHMd, bias, hidden, tiling))
    return rows_2BWHN


def _prepared(query: Tensor, key: Tensor, bias: Tensor | None, hidden: Tensor | None, tiling: "_Tiling") -> Prepared:
    batch, windows, heads, num_queries, width = query.shape
    query_tiles = -(-num_queries // tiling.queries)
    return Prepared(
        programs=query_tiles * windows * -(-batch * heads // tiling.maps),
        numbers=[
            *(batch, windows, heads, heads // key.shape[2], num_queries, key.shape[3], query_tiles),
            *(*query.stride()[:4], *key.stride()[:4], *(bias.stride() if bias is not None else [0] * 5)),
        ],
        constants={
            "WIDTH": width,
            "WIDTH_BLOCK": max(16, 1 << (width - 1).bit_length()),
            "QUERIES": tiling.queries,
            "KEYS": tiling.keys,
            "MAPS": tiling.maps,
            "BIAS": "none" if bias is None else "mask" if bias.dtype == torch.bool else "sum",
            "HIDES": hidden is not None,
            "PRECISION": "ieee" if INTERPRETED else tiling.precision,
            "LANES": 8,  # in a product of matrix units, the columns of a thread and its neighbours, again and again
            "SCAN": 1024,
            "LOW": -1e30,  # the logit of a masked key: finite, because 0 · −∞ is NaN
        },
        options={"num_warps": tiling.warps, "num_stages": 2, "maxnreg": tiling.registers},
    )


class _Tiling(NamedTuple):
    queries: int
    keys: int
    maps: int
    """Images and heads that share a tile of distances."""
    warps: int
    registers: int | None
    precision: str = "ieee"


def _tiling(width: int, num_keys: int, dtype: torch.dtype, *, with_bias: bool) -> _Tiling:
    """What was fastest on an H200, among what fits the 99 KiB of shared memory that smaller GPUs have."""
    if dtype == torch.float32:
        queries, keys = (64, 64) if width <= 64 else (64, 32) if width <= 128 else (32, 16)
        return _Tiling(queries, keys, maps=1, warps=4, registers=None, precision="tf32x3")
    if width > 64:
        registers = None if with_bias else 128
        return _Tiling(queries=64, keys=64 if width <= 128 else 32, maps=1, warps=4, registers=registers)
    if with_bias and num_keys <= 64:  # windows
        return _Tiling(queries=64, keys=32, maps=2, warps=4, registers=168)
    return _Tiling(queries=64, keys=64, maps=1 if with_bias else 2, warps=4, registers=128)


@jit
def _rows_kernel(
    query, key, bias, hidden, query_places, key_places, rows, scale, batch, windows, heads, heads_per_key, num_queries,
    num_keys, query_tiles,
    query_b, query_w, query_h, query_n, key_b, key_w, key_h, key_m, bias_b, bias_w, bias_h, bias_n, bias_m,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MAPS: tl.constexpr,
    BIAS: tl.constexpr, HIDES: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr, SCAN: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of a window, for MAPS of its images and heads."""
    tile = tl.program_id(0) % query_tiles
    window = (tl.program_id(0) // query_tiles % windows).to(tl.int64)
    group = tl.program_id(0) // query_tiles // windows
    query_places += window * num_queries * 2
    key_places += window * num_keys * 2

    # Prefix tokens are stepped over: 1 + 1024 tokens are 16 tiles of 64, not 17.
    first_query = _count_before_patches(query_places, num_queries, QUERIES)
    first_key = _count_before_patches(key_places, num_keys, KEYS)
    row_N = first_query + tile * QUERIES + tl.arange(0, QUERIES)
    there_N = row_N < num_queries
    used_N = there_N
    row_y_N, row_x_N = place_of(query_places, row_N, there_N)
    end = tl.where(first_query + tile * QUERIES < num_queries, num_keys, first_key)
    hidden_keys = ()
    hides = ()
    if HIDES:
        any_hides = 0
        for i in tl.static_range(MAPS):
            image, head = _image_and_head(group * MAPS + i, batch, heads)
            hidden_keys += (hidden + ((image * windows + window) * heads + head) * num_keys,)
            hides += (tl.maximum(_any(hidden_keys[i], num_keys, SCAN), tl.where(windows > 1, 1, 0)),)
            any_hides += hides[i]
        end = tl.where(any_hides > 0, end, first_key)
        used_N = row_N < tl.where(any_hides > 0, num_queries, 0)

    width_d = tl.arange(0, WIDTH_BLOCK)
    queries_Nd = ()
    keys = ()
    biases_N = ()
    sums = ()
    for i in tl.static_range(MAPS):
        image, head = _image_and_head(group * MAPS + i, batch, heads)
        query_N = query + image * query_b + window * query_w + head * query_h + row_N.to(tl.int64) * query_n
        used_Nd = used_N[:, None] & (width_d < WIDTH)[None, :]
        queries_Nd += (tl.load(query_N[:, None] + width_d[None, :], mask=used_Nd, other=0.0),)
        keys += (key + image * key_b + window * key_w + head // heads_per_key * key_h,)
        if BIAS != "none":
            biases_N += (bias + image * bias_b + window * bias_w + head * bias_h + row_N.to(tl.int64) * bias_n,)
        zero_NL = tl.full([QUERIES, LANES], 0.0, tl.float32)
        sums += ((tl.full([QUERIES], LOW, tl.float32) * scale, zero_NL, zero_NL, zero_NL),)

    # As far as tokens are patches without a gap, tiles of keys need no masks.
    whole = first_key + (_end_of_patches(key_places, first_key, end, SCAN) - first_key) // KEYS * KEYS
    for start in range(first_key, whole, KEYS):
        sums = _add_tile(
            sums, queries_Nd, keys, biases_N, hidden_keys, used_N, row_y_N, row_x_N, key_places, start, num_keys, key_m,
            bias_m, scale, WIDTH, WIDTH_BLOCK, QUERIES, KEYS, MAPS, BIAS, HIDES, PRECISION, LANES, LOW, True,
        )  # fmt: skip
    for start in range(whole, end, KEYS):
        sums = _add_tile(
            sums, queries_Nd, keys, biases_N, hidden_keys, used_N, row_y_N, row_x_N, key_places, start, num_keys, key_m,
            bias_m, scale, WIDTH, WIDTH_BLOCK, QUERIES, KEYS, MAPS, BIAS, HIDES, PRECISION, LANES, LOW, False,
        )  # fmt: skip

    for i in tl.static_range(MAPS):
        peak_N, weight_NL, distance_NL, log_NL = sums[i]
        weight_N = tl.sum(weight_NL, 1)
        seen_N = (peak_N > LOW / 2 * scale) & (row_y_N == row_y_N)
        if HIDES:
            seen_N = seen_N & (row_N < tl.where(hides[i] > 0, num_queries, 0))
        distance_N = tl.sum(distance_NL, 1) / weight_N
        entropy_N = tl.log(weight_N) - tl.sum(log_NL, 1) / weight_N * 0.6931471805599453
        entropy_N = tl.where(entropy_N < 0, 0.0, entropy_N)
        image, head = _image_and_head(group * MAPS + i, batch, heads)
        distances = rows + ((image * windows + window) * heads + head) * num_queries
        entropies = distances + tl.cast(batch, tl.int64) * windows * heads * num_queries
        tl.store(distances + row_N, tl.where(seen_N, distance_N, float("nan")), mask=there_N)
        tl.store(entropies + row_N, tl.where(seen_N, entropy_N, float("nan")), mask=there_N)
        prefix_N = tl.arange(0, QUERIES)
        if tile == 0:
            tl.store(distances + prefix_N, float("nan"), mask=prefix_N < tl.minimum(first_query, num_queries))
            tl.store(entropies + prefix_N, float("nan"), mask=prefix_N < tl.minimum(first_query, num_queries))


@jit
def _add_tile(
    sums, queries_Nd, keys, biases_N, hidden_keys, used_N, row_y_N, row_x_N, key_places, start, num_keys, key_m, bias_m,
    scale,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MAPS: tl.constexpr,
    BIAS: tl.constexpr, HIDES: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr, LOW: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The sums of all maps with the keys from `start` on. WHOLE: all of these are patches."""
    column_M = tl.arange(0, KEYS)
    width_d = tl.arange(0, WIDTH_BLOCK)
    used_M = (column_M >= 0) if WHOLE else (start + column_M < num_keys)
    y_M, x_M = place_of(key_places + 2 * start, column_M, used_M)
    patch_M = y_M == y_M
    if not WHOLE:
        y_M = tl.where(patch_M, y_M, 0.0)
        x_M = tl.where(patch_M, x_M, 0.0)
    dy_NM = row_y_N[:, None] - y_M[None, :]
    dx_NM = row_x_N[:, None] - x_M[None, :]
    distance_NM = tl.sqrt(dy_NM * dy_NM + dx_NM * dx_NM)

    new_sums = ()
    for i in tl.static_range(MAPS):
        key_dM = keys[i] + tl.cast(start, tl.int64) * key_m + column_M[None, :] * key_m + width_d[:, None]
        key_dM = tl.load(key_dM, mask=used_M[None, :] & (width_d < WIDTH)[:, None], other=0.0)
        # As what the products are added to, a bias comes to the threads that have the products, and not they to it.
        logit_NM = tl.full([QUERIES, KEYS], 0.0, tl.float32)
        if BIAS != "none":
            bias_NM = biases_N[i][:, None] + (start + column_M).to(tl.int64)[None, :] * bias_m
            bias_NM = tl.load(bias_NM, mask=used_N[:, None] & used_M[None, :], other=0)
            if BIAS == "mask":
                logit_NM = tl.where(bias_NM != 0, 0.0, LOW)
            else:
                logit_NM = bias_NM.to(tl.float32) * (1.4426950408889634 / scale)
                logit_NM = tl.where(logit_NM < LOW, LOW, logit_NM)
        logit_NM = tl.dot(queries_Nd[i], key_dM, logit_NM, input_precision=PRECISION)
        if not WHOLE:
            logit_NM = tl.where(patch_M[None, :], logit_NM, LOW)
        if HIDES:
            shown_M = tl.load(hidden_keys[i] + start + column_M, mask=used_M, other=1) == 0
            logit_NM = tl.where(shown_M[None, :], logit_NM, LOW)

        peak_N, weight_NL, far_NL, log_NL = sums[i]
        new_peak_N = tl.maximum(peak_N, tl.max(logit_NM, 1) * scale)
        # A query that has only seen masked keys has seen nothing: their weights are 2^LOW, not 2^(LOW - LOW).
        log_NM = logit_NM * scale - tl.where(new_peak_N > LOW / 2 * scale, new_peak_N, 0.0)[:, None]
        weight_NM = tl.exp2(log_NM)
        shift_N1 = (peak_N - new_peak_N)[:, None]
        shrink_N1 = tl.exp2(shift_N1)
        new_sums += (
            (
                new_peak_N,
                weight_NL * shrink_N1 + _sum(weight_NM, QUERIES, KEYS, LANES),
                far_NL * shrink_N1 + _sum(weight_NM * distance_NM, QUERIES, KEYS, LANES),
                (log_NL + weight_NL * shift_N1) * shrink_N1 + _sum(weight_NM * log_NM, QUERIES, KEYS, LANES),
            ),
        )
    return new_sums


@jit
def _sum(values_NM, QUERIES: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr):
    """Sums over keys that lie LANES apart. A thread has all of these itself; only the last sum is between threads."""
    return tl.sum(tl.reshape(values_NM, (QUERIES, KEYS // LANES, LANES)), 1)


@jit
def place_of(places, token, used):
    """(y, x) of tokens, in one load for both; NaN where not used."""
    both = tl.load(places.to(tl.pointer_type(tl.int64)) + token, mask=used, other=0x7FC000007FC00000)
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def _count_before_patches(places, num_tokens, AMONG: tl.constexpr):
    """Tokens before the first patch, as far as they are among the first few."""
    token = tl.arange(0, AMONG)
    y, _ = place_of(places, token, token < num_tokens)
    return tl.min(tl.where(y == y, token, AMONG), 0)


@jit
def _end_of_patches(places, start, end, SCAN: tl.constexpr):
    """The first token from `start` on that is not a patch, or the end."""
    gap = end
    for position in range(start, end, SCAN):
        token = position + tl.arange(0, SCAN)
        y, _ = place_of(places, token, token < end)
        gap = tl.minimum(gap, tl.min(tl.where(y == y, end, token), 0))
    return gap


@jit
def _any(flags, count, SCAN: tl.constexpr):
    """1 if any of so many flags is set, or 0."""
    found = tl.full([SCAN], 0, tl.int32)
    for start in range(0, count, SCAN):
        place = start + tl.arange(0, SCAN)
        found |= (tl.load(flags + place, mask=place < count, other=0) != 0).to(tl.int32)
    return tl.max(found, 0)


@jit
def _image_and_head(chosen, batch, heads):
    """Past the last one, the last: its program does it twice, with the same result."""
    chosen = tl.minimum(chosen, batch * heads - 1)
    return (chosen // heads).to(tl.int64), (chosen % heads).to(tl.int64)
