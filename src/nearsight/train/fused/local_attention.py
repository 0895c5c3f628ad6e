"""Attention with LocAt's local bias among few tokens: one launch each way, and neither maps nor biases in memory.

As `attention`, whose way of holding whole maps this is, with what GAug adds (`nearsight.locat`): the numbers that each
query gives become its widths and strength, and a kernel of the distance between patches is added to the logits.

The order of tokens does not matter to attention. In the kernels patches come first, and tokens that are none (CLS,
registers) after them: the patches of an 8 × 8 grid are the main block of keys, and the tail has no bias at all.

Shape suffixes: K cells, R images, N tokens (queries), M keys, H heads, d head size, P = 3Hd numbers of queries, keys
and values, and then room for what the query of each head gives. Names in capitals are known to the compiler.
"""

import torch
from torch import Tensor

from nearsight.train.fused.attention_parts import (
    Shape,
    add_bias,
    image_and_head,
    launch,
    load,
    load_all,
    load_numbers,
    shares_of,
    store,
    tiling_of,
    weighed,
    weights_of,
    without_empty_slots,
    zeros_like,
)
from nearsight.train.fused.local_bias import (
    LocalBias,
    add_bump,
    add_bump_sums,
    bumps_of,
    gradients_from_sums,
    load_given,
    store_given,
)
from nearsight.triton_language import kernel, tl


def local_attention_forward(
    packed_RNP: Tensor, bias_KP: Tensor, num_heads: int, scale: float, local: LocalBias
) -> Tensor:
    """softmax(scale · Q Kᵀ + S) V of every image and head: contiguous [R, N, H, d], in the dtype of the input.

    Args:
        packed_RNP: contiguous, before its bias is added.
        bias_KP: that bias, float32; the first R / K images are of the first cell, and so on.
        scale: of the products of queries and keys; above 0.
        local: what S is.

    Sums, S and the softmax are float32; weights are rounded to the dtype of the values that they weigh.
    """
    shape = _shape(packed_RNP, num_heads, local)
    out_RNHd = packed_RNP.new_empty(shape)
    _launch(_forward_kernel, [packed_RNP], bias_KP, [out_RNHd], scale, shape, local)
    return out_RNHd


def local_attention_backward(
    packed_RNP: Tensor, bias_KP: Tensor, out_grad_RNHd: Tensor, scale: float, local: LocalBias
) -> Tensor:
    """The gradient by `packed_RNP`, laid out as it is, from that by the result of `local_attention_forward`.

    Args:
        packed_RNP: what `local_attention_forward` was given.
        bias_KP: likewise.
        out_grad_RNHd: contiguous, of the same dtype.
        scale: what `local_attention_forward` was given.
        local: likewise.
    """
    shape = _shape(packed_RNP, out_grad_RNHd.shape[2], local)
    assert tuple(out_grad_RNHd.shape) == tuple(shape)
    packed_grad = torch.empty_like(packed_RNP)
    _launch(_backward_kernel, [packed_RNP, out_grad_RNHd], bias_KP, [packed_grad], scale, shape, local)
    return packed_grad


def _shape(packed_RNP: Tensor, num_heads: int, local: LocalBias) -> Shape:
    num_images, num_tokens, width = packed_RNP.shape
    return Shape(num_images, num_tokens, num_heads, (width // num_heads - local.room(num_heads)) // 3)


def _launch(
    run: object,
    inputs: list[Tensor],
    bias_KP: Tensor,
    results: list[Tensor],
    scale: float,
    shape: Shape,
    local: LocalBias,
) -> None:
    room = local.room(shape.num_heads)
    assert shape.num_tokens == local.grid.num_tokens
    assert inputs[0].shape[2] == bias_KP.shape[1] == shape.num_heads * (3 * shape.head_size + room)
    tiling = tiling_of(shape.num_tokens, shape.head_size, inputs[0].dtype, backward=run is _backward_kernel)
    launch(run, inputs, bias_KP, results, (scale, *local.numbers), shape, tiling, ROOM=room, **local.constants)


@kernel
def _forward_kernel(
    packed, bias, out, scale, most, shift, eps, furthest, num_images_per_cell,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, QUERIES: tl.constexpr, LOOPED: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr, ROOM: tl.constexpr, PATCHES: tl.constexpr, COLS: tl.constexpr, KERNEL: tl.constexpr,
    AXES: tl.constexpr, LEARNED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = HEADS * WIDTH
    PACKED: tl.constexpr = 3 * ROW + HEADS * ROOM
    FIRST: tl.constexpr = TOKENS - PATCHES
    TAIL_KERNEL: tl.constexpr = KERNEL if MAIN < PATCHES else "none"  # of queries that are no patches
    image, first_head = image_and_head(HEADS, HEADS_PER_PROGRAM)
    numbers = most, shift, eps, furthest
    packed += image * (TOKENS * PACKED)
    out += image * (TOKENS * ROW)
    bias += image // num_images_per_cell * PACKED
    for i in range(HEADS_PER_PROGRAM):
        at = (first_head + i) * WIDTH
        given_at = 3 * ROW + (first_head + i) * ROOM
        query_bias_d = load_numbers(bias + at, WIDTH, WIDTH_BLOCK)
        value_bias_d = load_numbers(bias + 2 * ROW + at, WIDTH, WIDTH_BLOCK)
        keys = load_all(packed + ROW + at, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        values = load_all(packed + 2 * ROW + at, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        for start in range(0, LOOPED, QUERIES):
            _attend(
                packed + at, query_bias_d, packed + given_at, bias + given_at, keys, values, value_bias_d, out + at,
                scale, numbers, start, QUERIES, ROW, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, PRECISION, COLS,
                KERNEL, AXES, LEARNED, CLAMPED,
            )  # fmt: skip
        if TOKENS > LOOPED:
            _attend(
                packed + at, query_bias_d, packed + given_at, bias + given_at, keys, values, value_bias_d, out + at,
                scale, numbers, MAIN, TAIL, ROW, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, PRECISION, COLS,
                TAIL_KERNEL, AXES, LEARNED, CLAMPED,
            )  # fmt: skip


@kernel
def _attend(
    query, query_bias_d, given, given_bias, keys, values, value_bias_d, out, scale, numbers, start, QUERIES, ROW,
    PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, PRECISION, COLS, KERNEL, AXES, LEARNED, CLAMPED,
):  # fmt: skip
    """Write the results of the queries from `start` on."""
    query_Nd = add_bias(load(query, start, QUERIES, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK), query_bias_d)
    position_N = start + tl.arange(0, QUERIES)
    given_N = load_given(given, given_bias, start, QUERIES, PACKED, TOKENS, FIRST, AXES, LEARNED)
    bumps = bumps_of(given_N, position_N, numbers, TOKENS - FIRST, AXES, LEARNED)
    weights, sum_N = _softmax(
        query_Nd, position_N, keys, bumps, scale, numbers, TOKENS, FIRST, MAIN, PRECISION, COLS, KERNEL, CLAMPED
    )
    out_Nd = weighed(weights, sum_N, values, PRECISION) + value_bias_d[None, :]
    store(out, out_Nd, start, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)


@kernel
def _backward_kernel(
    packed, out_grad, bias, packed_grad, scale, most, shift, eps, furthest, num_images_per_cell,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, QUERIES: tl.constexpr, LOOPED: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr, ROOM: tl.constexpr, PATCHES: tl.constexpr, COLS: tl.constexpr, KERNEL: tl.constexpr,
    AXES: tl.constexpr, LEARNED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = HEADS * WIDTH
    PACKED: tl.constexpr = 3 * ROW + HEADS * ROOM
    FIRST: tl.constexpr = TOKENS - PATCHES
    TAIL_KERNEL: tl.constexpr = KERNEL if MAIN < PATCHES else "none"  # of queries that are no patches
    image, first_head = image_and_head(HEADS, HEADS_PER_PROGRAM)
    numbers = most, shift, eps, furthest
    packed += image * (TOKENS * PACKED)
    packed_grad += image * (TOKENS * PACKED)
    out_grad += image * (TOKENS * ROW)
    bias += image // num_images_per_cell * PACKED
    for i in range(HEADS_PER_PROGRAM):
        at = (first_head + i) * WIDTH
        given_at = 3 * ROW + (first_head + i) * ROOM
        query_bias_d = load_numbers(bias + at, WIDTH, WIDTH_BLOCK)
        keys = load_all(packed + ROW + at, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        values = load_all(packed + 2 * ROW + at, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        totals = zeros_like(keys), zeros_like(values)
        for start in range(0, LOOPED, QUERIES):
            totals = _attend_back(
                totals, packed + at, query_bias_d, packed + given_at, bias + given_at, keys, values, out_grad + at,
                packed_grad + at, packed_grad + given_at, scale, numbers, start, QUERIES, ROW, PACKED, TOKENS, FIRST,
                WIDTH, WIDTH_BLOCK, MAIN, PRECISION, ROOM, COLS, KERNEL, AXES, LEARNED, CLAMPED,
            )  # fmt: skip
        if TOKENS > LOOPED:
            totals = _attend_back(
                totals, packed + at, query_bias_d, packed + given_at, bias + given_at, keys, values, out_grad + at,
                packed_grad + at, packed_grad + given_at, scale, numbers, MAIN, TAIL, ROW, PACKED, TOKENS, FIRST,
                WIDTH, WIDTH_BLOCK, MAIN, PRECISION, ROOM, COLS, TAIL_KERNEL, AXES, LEARNED, CLAMPED,
            )  # fmt: skip
        key_grads, value_grads = totals
        for j in tl.static_range(len(keys)):
            store(packed_grad + ROW + at, key_grads[j] * scale, j * MAIN, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)
            store(packed_grad + 2 * ROW + at, value_grads[j], j * MAIN, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)


@kernel
def _attend_back(
    totals, query, query_bias_d, given, given_bias, keys, values, out_grad, query_grad, given_grad, scale, numbers,
    start, QUERIES, ROW, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, PRECISION, ROOM, COLS, KERNEL, AXES, LEARNED,
    CLAMPED,
):  # fmt: skip
    """Write the gradients of the queries from `start` on, and of what they give; `totals` (gradients of keys, and of
    values) with what these add.

    Queries past the last token add nothing: the gradient of their output is 0.
    """
    PATCHES: tl.constexpr = TOKENS - FIRST
    query_Nd = add_bias(load(query, start, QUERIES, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK), query_bias_d)
    out_grad_Nd = load(out_grad, start, QUERIES, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)
    position_N = start + tl.arange(0, QUERIES)
    given_N = load_given(given, given_bias, start, QUERIES, PACKED, TOKENS, FIRST, AXES, LEARNED)
    bumps = bumps_of(given_N, position_N, numbers, PATCHES, AXES, LEARNED)
    weights, sum_N = _softmax(
        query_Nd, position_N, keys, bumps, scale, numbers, TOKENS, FIRST, MAIN, PRECISION, COLS, KERNEL, CLAMPED
    )
    shares, share_grads, mean_grad_N = shares_of(weights, sum_N, values, out_grad_Nd, PRECISION)
    key_grads, value_grads = totals
    new_key_grads = ()
    new_value_grads = ()
    query_grad_Nd = tl.zeros(query_Nd.shape, tl.float32)
    sums = tl.zeros_like(sum_N), tl.zeros_like(sum_N), tl.zeros_like(sum_N)
    for j in tl.static_range(len(keys)):
        exact_NM = shares[j] * (share_grads[j] - mean_grad_N[:, None])
        if KERNEL != "none" and j * MAIN < PATCHES:
            sums = add_bump_sums(sums, exact_NM, bumps, position_N, j * MAIN, numbers, PATCHES, COLS, KERNEL, CLAMPED)
        share_MN = tl.trans(shares[j].to(query_Nd.dtype))
        logit_grad_NM = exact_NM.to(query_Nd.dtype)
        new_value_grads += (tl.dot(share_MN, out_grad_Nd, value_grads[j], input_precision=PRECISION),)
        new_key_grads += (tl.dot(tl.trans(logit_grad_NM), query_Nd, key_grads[j], input_precision=PRECISION),)
        query_grad_Nd = tl.dot(logit_grad_NM, keys[j], query_grad_Nd, input_precision=PRECISION)
    store(query_grad, query_grad_Nd * scale, start, PACKED, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)
    if ROOM > 0:
        given_grads = ()
        if KERNEL != "none":
            given_grads = gradients_from_sums(bumps, sums, AXES, LEARNED)
        store_given(given_grad, given_grads, start, QUERIES, PACKED, TOKENS, FIRST, ROOM)
    return new_key_grads, new_value_grads


@kernel
def _softmax(
    query_Nd, position_N, keys, bumps, scale, numbers, TOKENS, FIRST, MAIN, PRECISION, COLS, KERNEL, CLAMPED
):  # fmt: skip
    """Weights of all keys relative to the largest, a tile per block of keys, and their sum."""
    logits = ()  # / scale
    for j in tl.static_range(len(keys)):
        logit_NM = tl.dot(query_Nd, tl.trans(keys[j]), input_precision=PRECISION)
        if KERNEL != "none" and j * MAIN < TOKENS - FIRST:
            logit_NM = add_bump(
                logit_NM, bumps, position_N, scale, j * MAIN, numbers, TOKENS - FIRST, COLS, KERNEL, CLAMPED
            )
        logits += (without_empty_slots(logit_NM, j * MAIN, TOKENS),)
    return weights_of(logits, scale)
