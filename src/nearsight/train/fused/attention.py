"""Attention among few tokens on a GPU, forward and backward: one launch each, and no map in memory.

Of an image of up to 144 tokens, one program holds a head's whole keys and values, and the whole map of some queries. So
there is no running softmax, and the backward makes maps again from queries and keys: the forward leaves it nothing.

Tiles have sides that are powers of two. 65 tokens as one tile of 128 would be four times the work, so the keys are a
main block of 64 and a tail of 16, each with its tiles of a map. Kernels have them as tuples, the main block first.

Programs with neighbouring numbers do neighbouring heads of an image: a row of 24 numbers is not whole sectors of
memory, and what two heads have of one then comes from the cache.

Of the biases of a projection to queries, keys and values, only the first has to be added before the softmax. A key's is
the same for all keys of a query and changes no weight; a value's comes through as it is, since weights add up to 1.

Shape suffixes: R images, N queries, M keys, H heads, d head size. Names in capitals are known to the compiler.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.triton_language import INTERPRETED, kernel, runs_on, tl

_LEAST_SIDE = 16  # of a tile that matrix units take
_MOST_TOKENS = 128 + _LEAST_SIDE
_LARGEST_HEAD = 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_supported(num_tokens: int, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attention_forward` and `attention_backward` work on such tensors."""
    fits = 1 <= num_tokens <= _MOST_TOKENS and 1 <= head_size <= _LARGEST_HEAD
    return fits and dtype in _DTYPES and runs_on(device)


def attention_forward(qkv_RN3Hd: Tensor, bias_K3Hd: Tensor, scale: float) -> Tensor:
    """softmax(scale · Q Kᵀ) V of every image and head: contiguous [R, N, H, d], in the dtype of the input.

    Args:
        qkv_RN3Hd: contiguous, as a projection to queries, keys and values gives it before its bias.
        bias_K3Hd: that bias, float32; the first R / K images are of the first cell, and so on.
        scale: of the products of queries and keys; above 0.

    Sums and the softmax are float32; weights are rounded to the dtype of the values that they weigh.
    """
    num_images, num_tokens, _, num_heads, head_size = qkv_RN3Hd.shape
    out_RNHd = qkv_RN3Hd.new_empty(num_images, num_tokens, num_heads, head_size)
    _launch(_forward_kernel, [qkv_RN3Hd], bias_K3Hd, [out_RNHd], scale)
    return out_RNHd


def attention_backward(qkv_RN3Hd: Tensor, bias_K3Hd: Tensor, out_grad_RNHd: Tensor, scale: float) -> Tensor:
    """The gradient by `qkv_RN3Hd`, laid out as it is, from that by the result of `attention_forward`.

    Args:
        qkv_RN3Hd: what `attention_forward` was given.
        bias_K3Hd: likewise.
        out_grad_RNHd: contiguous, of the same dtype.
        scale: what `attention_forward` was given.
    """
    assert out_grad_RNHd.shape == (*qkv_RN3Hd.shape[:2], *qkv_RN3Hd.shape[3:])
    assert out_grad_RNHd.dtype == qkv_RN3Hd.dtype
    qkv_grad = torch.empty_like(qkv_RN3Hd)
    _launch(_backward_kernel, [qkv_RN3Hd, out_grad_RNHd], bias_K3Hd, [qkv_grad], scale)
    return qkv_grad


def _launch(run: Any, inputs: list[Tensor], bias_K3Hd: Tensor, results: list[Tensor], scale: float) -> None:
    """Fill `results` for all images and heads; the first of the inputs is `qkv_RN3Hd`.

    The number of images is no argument of the kernels: none of it asks for another one to be compiled.
    """
    num_images, num_tokens, packed, num_heads, head_size = inputs[0].shape
    dtype, device = inputs[0].dtype, inputs[0].device
    assert is_supported(num_tokens, head_size, dtype, device)
    assert num_images % len(bias_K3Hd) == 0
    assert bias_K3Hd.shape[1:] == (3, num_heads, head_size)
    assert packed == 3
    assert scale > 0  # else the largest logit would not be that of the largest product
    assert all(x.is_contiguous() for x in (*inputs, bias_K3Hd))
    tiling = _tiling(num_tokens, head_size, dtype, backward=run is _backward_kernel)
    assert num_heads % tiling.heads == 0
    written = results
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16
        inputs, written = [x.float() for x in inputs], [x.float() for x in results]
    with torch.cuda.device_of(inputs[0]):
        run[(num_images * num_heads // tiling.heads,)](
            *inputs,
            bias_K3Hd,
            *written,
            float(scale),
            num_images // len(bias_K3Hd),
            TOKENS=num_tokens,
            HEADS=num_heads,
            WIDTH=head_size,
            WIDTH_BLOCK=_side_of_tile(head_size),
            MAIN=tiling.main,
            TAIL=_LEAST_SIDE,
            QUERIES=tiling.queries,
            LOOPED=num_tokens if tiling.queries <= 2 * _LEAST_SIDE else min(num_tokens, tiling.main),
            HEADS_PER_PROGRAM=tiling.heads,
            PRECISION="ieee" if INTERPRETED else "tf32x3",
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            maxnreg=tiling.registers,
        )
    for result, new in zip(results, written, strict=True):
        if new is not result:
            result.copy_(new)


class _Tiling(NamedTuple):
    main: int
    """Keys of the main block; those that are left are the tail."""
    queries: int
    """Queries of a tile, a divisor of the main block. If they are many, those of the tail are a tile of their own."""
    warps: int
    heads: int = 1
    """Heads that a program does one after the other; a divisor of their number."""
    stages: int = 2
    registers: int | None = None


def _tiling(num_tokens: int, head_size: int, dtype: torch.dtype, *, backward: bool) -> _Tiling:
    """What was fastest on an H200 for 65 tokens and heads of 24; else the fewest instructions to issue, by what the
    compiler makes, without much register spilling.

    A program of one warp needs no barriers and no sums between warps, as long as its sums stay in its registers.
    Shared memory is at most 99 KiB, which smaller GPUs have too; for float32 and more than 80 tokens, 192 KiB.
    """
    side, width = _side_of_tile(num_tokens), _side_of_tile(head_size)
    # With fewer than 64 tokens, a block and its tail would be as large as the next block, or nearly.
    has_tail = 64 <= side // 2 < num_tokens <= side // 2 + _LEAST_SIDE
    main = side // 2 if has_tail else side
    if dtype == torch.float32:
        return _Tiling(main, queries=main, warps=4 if main <= 64 else 8)
    if not backward and main * width <= 64 * 64:
        return _Tiling(main, queries=min(main, 32), warps=1)
    if backward and main <= 32:
        return _Tiling(main, queries=_LEAST_SIDE, warps=1)
    if backward and main * width <= 64 * 32:
        return _Tiling(main, queries=32, warps=2)
    return _Tiling(main, queries=32 if backward and main * width > 64 * 64 else min(main, 64), warps=4)


def _side_of_tile(number: int) -> int:
    return max(_LEAST_SIDE, 1 << (number - 1).bit_length())


@kernel
def _forward_kernel(
    qkv,
    bias,
    out,
    scale,
    num_images_per_cell,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    QUERIES: tl.constexpr,
    LOOPED: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROW: tl.constexpr = HEADS * WIDTH
    image, first_head = _image_and_head(HEADS, HEADS_PER_PROGRAM)
    for i in range(HEADS_PER_PROGRAM):
        query = qkv + image * (TOKENS * 3 * ROW) + (first_head + i) * WIDTH
        head_out = out + image * (TOKENS * ROW) + (first_head + i) * WIDTH
        head_bias = bias + image // num_images_per_cell * (3 * ROW) + (first_head + i) * WIDTH
        query_bias_d = _load_bias(head_bias, WIDTH, WIDTH_BLOCK)
        value_bias_d = _load_bias(head_bias + 2 * ROW, WIDTH, WIDTH_BLOCK)
        keys = _load_all(query + ROW, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        values = _load_all(query + 2 * ROW, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        for start in range(0, LOOPED, QUERIES):
            _attend(
                query, query_bias_d, keys, values, value_bias_d, head_out, scale, start, QUERIES, ROW, TOKENS, WIDTH,
                WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip
        if TOKENS > LOOPED:
            _attend(
                query, query_bias_d, keys, values, value_bias_d, head_out, scale, MAIN, TAIL, ROW, TOKENS, WIDTH,
                WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip


@kernel
def _attend(
    query, query_bias_d, keys, values, value_bias_d, out, scale, start, QUERIES, ROW, TOKENS, WIDTH,
    WIDTH_BLOCK, MAIN, PRECISION,
):  # fmt: skip
    """Write the results of the queries from `start` on."""
    query_Nd = _add_bias(_load(query, start, QUERIES, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK), query_bias_d)
    weights, sum_N = _softmax(query_Nd, keys, scale, TOKENS, MAIN, PRECISION)
    out_Nd = tl.zeros(query_Nd.shape, tl.float32)
    for j in tl.static_range(len(keys)):
        out_Nd = tl.dot(weights[j].to(query_Nd.dtype), values[j], out_Nd, input_precision=PRECISION)
    out_Nd = out_Nd * (1.0 / sum_N)[:, None] + value_bias_d[None, :]
    _store(out, out_Nd, start, ROW, TOKENS, WIDTH, WIDTH_BLOCK)


@kernel
def _backward_kernel(
    qkv,
    out_grad,
    bias,
    qkv_grad,
    scale,
    num_images_per_cell,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    QUERIES: tl.constexpr,
    LOOPED: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROW: tl.constexpr = HEADS * WIDTH
    image, first_head = _image_and_head(HEADS, HEADS_PER_PROGRAM)
    for i in range(HEADS_PER_PROGRAM):
        query = qkv + image * (TOKENS * 3 * ROW) + (first_head + i) * WIDTH
        query_grad = qkv_grad + image * (TOKENS * 3 * ROW) + (first_head + i) * WIDTH
        head_out_grad = out_grad + image * (TOKENS * ROW) + (first_head + i) * WIDTH
        head_bias = bias + image // num_images_per_cell * (3 * ROW) + (first_head + i) * WIDTH
        query_bias_d = _load_bias(head_bias, WIDTH, WIDTH_BLOCK)
        keys = _load_all(query + ROW, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        values = _load_all(query + 2 * ROW, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        totals = _zeros_like(keys), _zeros_like(values)
        for start in range(0, LOOPED, QUERIES):
            totals = _attend_back(
                totals, query, query_bias_d, keys, values, head_out_grad, query_grad, scale, start, QUERIES, ROW,
                TOKENS, WIDTH, WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip
        if TOKENS > LOOPED:
            totals = _attend_back(
                totals, query, query_bias_d, keys, values, head_out_grad, query_grad, scale, MAIN, TAIL, ROW,
                TOKENS, WIDTH, WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip
        key_grads, value_grads = totals
        for j in tl.static_range(len(keys)):
            _store(query_grad + ROW, key_grads[j] * scale, j * MAIN, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK)
            _store(query_grad + 2 * ROW, value_grads[j], j * MAIN, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK)


@kernel
def _attend_back(
    totals, query, query_bias_d, keys, values, out_grad, query_grad, scale, start, QUERIES, ROW, TOKENS, WIDTH,
    WIDTH_BLOCK, MAIN, PRECISION,
):  # fmt: skip
    """Write the gradients of the queries from `start` on; `totals` (gradients of keys, and of values) with what
    these add.

    Queries past the last token add nothing: the gradient of their output is 0.
    """
    query_Nd = _add_bias(_load(query, start, QUERIES, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK), query_bias_d)
    out_grad_Nd = _load(out_grad, start, QUERIES, ROW, TOKENS, WIDTH, WIDTH_BLOCK)
    weights, sum_N = _softmax(query_Nd, keys, scale, TOKENS, MAIN, PRECISION)
    inverse_N1 = (1.0 / sum_N)[:, None]
    shares = ()
    share_grads = ()
    mean_grad_N = tl.zeros_like(sum_N)
    for j in tl.static_range(len(keys)):
        shares += (weights[j] * inverse_N1,)
        share_grads += (tl.dot(out_grad_Nd, tl.trans(values[j]), input_precision=PRECISION),)
        mean_grad_N += tl.sum(shares[j] * share_grads[j], 1)

    key_grads, value_grads = totals
    new_key_grads = ()
    new_value_grads = ()
    query_grad_Nd = tl.zeros(query_Nd.shape, tl.float32)
    for j in tl.static_range(len(keys)):
        share_MN = tl.trans(shares[j].to(query_Nd.dtype))
        logit_grad_NM = (shares[j] * (share_grads[j] - mean_grad_N[:, None])).to(query_Nd.dtype)
        new_value_grads += (tl.dot(share_MN, out_grad_Nd, value_grads[j], input_precision=PRECISION),)
        new_key_grads += (tl.dot(tl.trans(logit_grad_NM), query_Nd, key_grads[j], input_precision=PRECISION),)
        query_grad_Nd = tl.dot(logit_grad_NM, keys[j], query_grad_Nd, input_precision=PRECISION)
    _store(query_grad, query_grad_Nd * scale, start, 3 * ROW, TOKENS, WIDTH, WIDTH_BLOCK)
    return new_key_grads, new_value_grads


@kernel
def _softmax(query_Nd, keys, scale, TOKENS, MAIN, PRECISION):
    """Weights of all keys relative to the largest, a tile per block of keys, and their sum."""
    products = ()
    for j in tl.static_range(len(keys)):
        product_NM = tl.dot(query_Nd, tl.trans(keys[j]), input_precision=PRECISION)
        if j * MAIN + keys[j].shape[0] > TOKENS:
            key_M = j * MAIN + tl.arange(0, keys[j].shape[0])
            product_NM = tl.where((key_M < TOKENS)[None, :], product_NM, float("-inf"))
        products += (product_NM,)
    peak_N = tl.max(products[0], 1)
    for j in tl.static_range(1, len(keys)):
        peak_N = tl.maximum(peak_N, tl.max(products[j], 1))
    scale *= 1.4426950408889634  # for powers of 2 instead of e
    weights = ()
    sum_N = tl.zeros_like(peak_N)
    for j in tl.static_range(len(keys)):
        weights += (tl.exp2(products[j] * scale - (peak_N * scale)[:, None]),)
        sum_N += tl.sum(weights[j], 1)
    return weights, sum_N


@kernel
def _zeros_like(blocks):
    zeros = ()
    for j in tl.static_range(len(blocks)):
        zeros += (tl.zeros(blocks[j].shape, tl.float32),)
    return zeros


@kernel
def _image_and_head(HEADS, HEADS_PER_PROGRAM):
    """The image of a program, and the first of its heads."""
    image = (tl.program_id(0) // (HEADS // HEADS_PER_PROGRAM)).to(tl.int64)
    return image, tl.program_id(0) % (HEADS // HEADS_PER_PROGRAM) * HEADS_PER_PROGRAM


@kernel
def _load_all(matrix, ROW, TOKENS, WIDTH, WIDTH_BLOCK, MAIN, TAIL):
    """The rows of all tokens: those of the main block, and those of the tail if there is one."""
    blocks = (_load(matrix, 0, MAIN, ROW, TOKENS, WIDTH, WIDTH_BLOCK),)
    if TOKENS > MAIN:
        blocks += (_load(matrix, MAIN, TAIL, ROW, TOKENS, WIDTH, WIDTH_BLOCK),)
    return blocks


@kernel
def _load_bias(bias, WIDTH, WIDTH_BLOCK):
    width_d = tl.arange(0, WIDTH_BLOCK)
    return tl.load(bias + width_d, mask=width_d < WIDTH, other=0.0)


@kernel
def _add_bias(rows_Nd, bias_d):
    return rows_Nd + bias_d.to(rows_Nd.dtype)[None, :]


@kernel
def _load(matrix, start, SIZE, ROW, TOKENS, WIDTH, WIDTH_BLOCK):
    """The rows of SIZE tokens; 0 past the last token and past the last number of a row."""
    offset_Nd, used_Nd = _offsets(start, SIZE, ROW, TOKENS, WIDTH, WIDTH_BLOCK)
    return tl.load(matrix + offset_Nd, mask=used_Nd, other=0.0)


@kernel
def _store(matrix, rows_Nd, start, ROW, TOKENS, WIDTH, WIDTH_BLOCK):
    offset_Nd, used_Nd = _offsets(start, rows_Nd.shape[0], ROW, TOKENS, WIDTH, WIDTH_BLOCK)
    tl.store(matrix + offset_Nd, rows_Nd.to(matrix.dtype.element_ty), mask=used_Nd)


@kernel
def _offsets(start, SIZE, ROW, TOKENS, WIDTH, WIDTH_BLOCK):
    """Where tokens lie in a matrix with rows that are ROW numbers apart, and what of them there is."""
    token_N1 = start + tl.arange(0, SIZE)[:, None]
    width_1d = tl.arange(0, WIDTH_BLOCK)[None, :]
    return token_N1 * ROW + width_1d, (token_N1 < TOKENS) & (width_1d < WIDTH)
