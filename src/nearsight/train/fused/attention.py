"""Attention among few tokens on a GPU, forward and backward: one launch each, and no map in memory.

Of an image of up to 144 tokens, one program holds a head's whole keys and values, and the whole map of some queries. So
there is no running softmax, and the backward makes maps again from queries and keys: the forward leaves it nothing.

Programs with neighbouring numbers do neighbouring heads of an image: a row of 24 numbers is not whole sectors of
memory, and what two heads have of one then comes from the cache.

Of the biases of a projection to queries, keys and values, only the first has to be added before the softmax. A key's is
the same for all keys of a query and changes no weight; a value's comes through as it is, since weights add up to 1.

Shape suffixes: R images, N queries, M keys, H heads, d head size. Names in capitals are known to the compiler.
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
from nearsight.triton_language import kernel, tl


def attention_forward(qkv_RN3Hd: Tensor, bias_K3Hd: Tensor, scale: float, mask_NM: Tensor | None = None) -> Tensor:
    """softmax(scale · Q Kᵀ) V of every image and head: contiguous [R, N, H, d], in the dtype of the input.

    Args:
        qkv_RN3Hd: contiguous, as a projection to queries, keys and values gives it before its bias.
        bias_K3Hd: that bias, float32; the first R / K images are of the first cell, and so on.
        scale: of the products of queries and keys; above 0.
        mask_NM: bool, contiguous, of all images and heads: which keys a query may attend to, at least one.

    Sums and the softmax are float32; weights are rounded to the dtype of the values that they weigh.
    """
    num_images, num_tokens, _, num_heads, head_size = qkv_RN3Hd.shape
    out_RNHd = qkv_RN3Hd.new_empty(num_images, num_tokens, num_heads, head_size)
    _launch(_forward_kernel, [qkv_RN3Hd], bias_K3Hd, [out_RNHd], scale, mask_NM)
    return out_RNHd


def attention_backward(
    qkv_RN3Hd: Tensor, bias_K3Hd: Tensor, out_grad_RNHd: Tensor, scale: float, mask_NM: Tensor | None = None
) -> Tensor:
    """The gradient by `qkv_RN3Hd`, laid out as it is, from that by the result of `attention_forward`.

    Args:
        qkv_RN3Hd: what `attention_forward` was given.
        bias_K3Hd: likewise.
        out_grad_RNHd: contiguous, of the same dtype.
        scale: what `attention_forward` was given.
        mask_NM: likewise.
    """
    assert out_grad_RNHd.shape == (*qkv_RN3Hd.shape[:2], *qkv_RN3Hd.shape[3:])
    qkv_grad = torch.empty_like(qkv_RN3Hd)
    _launch(_backward_kernel, [qkv_RN3Hd, out_grad_RNHd], bias_K3Hd, [qkv_grad], scale, mask_NM)
    return qkv_grad


def _launch(
    run: object,
    inputs: list[Tensor],
    bias_K3Hd: Tensor,
    results: list[Tensor],
    scale: float,
    mask_NM: Tensor | None,
) -> None:
    num_images, num_tokens, packed, num_heads, head_size = inputs[0].shape
    assert packed == 3
    assert bias_K3Hd.shape[1:] == (3, num_heads, head_size)
    shape = Shape(num_images, num_tokens, num_heads, head_size)
    tiling = tiling_of(num_tokens, head_size, inputs[0].dtype, backward=run is _backward_kernel)
    mask = None
    if mask_NM is not None:
        assert mask_NM.shape == (num_tokens, num_tokens)
        assert mask_NM.is_contiguous()
        mask = mask_NM.view(torch.uint8)
    launch(run, inputs, bias_K3Hd, results, [scale], shape, tiling, mask=mask)


@kernel
def _forward_kernel(
    qkv, bias, out, scale, num_images_per_cell, mask,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, QUERIES: tl.constexpr, LOOPED: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = HEADS * WIDTH
    image, first_head = image_and_head(HEADS, HEADS_PER_PROGRAM)
    for i in range(HEADS_PER_PROGRAM):
        query = qkv + image * (TOKENS * 3 * ROW) + (first_head + i) * WIDTH
        head_out = out + image * (TOKENS * ROW) + (first_head + i) * WIDTH
        head_bias = bias + image // num_images_per_cell * (3 * ROW) + (first_head + i) * WIDTH
        query_bias_d = load_numbers(head_bias, WIDTH, WIDTH_BLOCK)
        value_bias_d = load_numbers(head_bias + 2 * ROW, WIDTH, WIDTH_BLOCK)
        keys = load_all(query + ROW, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        values = load_all(query + 2 * ROW, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        for start in range(0, LOOPED, QUERIES):
            _attend(
                query, query_bias_d, keys, values, value_bias_d, mask, head_out, scale, start, QUERIES, ROW, TOKENS,
                WIDTH, WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip
        if TOKENS > LOOPED:
            _attend(
                query, query_bias_d, keys, values, value_bias_d, mask, head_out, scale, MAIN, TAIL, ROW, TOKENS,
                WIDTH, WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip


@kernel
def _attend(
    query, query_bias_d, keys, values, value_bias_d, mask, out, scale, start, QUERIES, ROW, TOKENS, WIDTH,
    WIDTH_BLOCK, MAIN, PRECISION,
):  # fmt: skip
    """Write the results of the queries from `start` on."""
    query_Nd = add_bias(load(query, start, QUERIES, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK), query_bias_d)
    weights, sum_N = _softmax(query_Nd, keys, mask, scale, start, TOKENS, MAIN, PRECISION)
    out_Nd = weighed(weights, sum_N, values, PRECISION) + value_bias_d[None, :]
    store(out, out_Nd, start, ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK)


@kernel
def _backward_kernel(
    qkv, out_grad, bias, qkv_grad, scale, num_images_per_cell, mask,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, QUERIES: tl.constexpr, LOOPED: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = HEADS * WIDTH
    image, first_head = image_and_head(HEADS, HEADS_PER_PROGRAM)
    for i in range(HEADS_PER_PROGRAM):
        query = qkv + image * (TOKENS * 3 * ROW) + (first_head + i) * WIDTH
        query_grad = qkv_grad + image * (TOKENS * 3 * ROW) + (first_head + i) * WIDTH
        head_out_grad = out_grad + image * (TOKENS * ROW) + (first_head + i) * WIDTH
        head_bias = bias + image // num_images_per_cell * (3 * ROW) + (first_head + i) * WIDTH
        query_bias_d = load_numbers(head_bias, WIDTH, WIDTH_BLOCK)
        keys = load_all(query + ROW, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        values = load_all(query + 2 * ROW, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK, MAIN, TAIL)
        totals = zeros_like(keys), zeros_like(values)
        for start in range(0, LOOPED, QUERIES):
            totals = _attend_back(
                totals, query, query_bias_d, keys, values, mask, head_out_grad, query_grad, scale, start, QUERIES,
                ROW, TOKENS, WIDTH, WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip
        if TOKENS > LOOPED:
            totals = _attend_back(
                totals, query, query_bias_d, keys, values, mask, head_out_grad, query_grad, scale, MAIN, TAIL, ROW,
                TOKENS, WIDTH, WIDTH_BLOCK, MAIN, PRECISION,
            )  # fmt: skip
        key_grads, value_grads = totals
        for j in tl.static_range(len(keys)):
            store(query_grad + ROW, key_grads[j] * scale, j * MAIN, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK)
            store(query_grad + 2 * ROW, value_grads[j], j * MAIN, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK)


@kernel
def _attend_back(
    totals, query, query_bias_d, keys, values, mask, out_grad, query_grad, scale, start, QUERIES, ROW, TOKENS,
    WIDTH, WIDTH_BLOCK, MAIN, PRECISION,
):  # fmt: skip
    """Write the gradients of the queries from `start` on; `totals` (gradients of keys, and of values) with what
    these add.

    Queries past the last token add nothing: the gradient of their output is 0.
    """
    query_Nd = add_bias(load(query, start, QUERIES, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK), query_bias_d)
    out_grad_Nd = load(out_grad, start, QUERIES, ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK)
    weights, sum_N = _softmax(query_Nd, keys, mask, scale, start, TOKENS, MAIN, PRECISION)
    shares, share_grads, mean_grad_N = shares_of(weights, sum_N, values, out_grad_Nd, PRECISION)
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
    store(query_grad, query_grad_Nd * scale, start, 3 * ROW, TOKENS, 0, WIDTH, WIDTH_BLOCK)
    return new_key_grads, new_value_grads


@kernel
def _softmax(query_Nd, keys, mask, scale, start, TOKENS, MAIN, PRECISION):
    """Weights of all keys relative to the largest, a tile per block of keys, and their sum."""
    products = ()
    for j in tl.static_range(len(keys)):
        product_NM = tl.dot(query_Nd, tl.trans(keys[j]), input_precision=PRECISION)
        if mask is not None:
            product_NM = _without_hidden(product_NM, mask, start, j * MAIN, TOKENS)
        products += (without_empty_slots(product_NM, j * MAIN, TOKENS),)
    return weights_of(products, scale)


@kernel
def _without_hidden(product_NM, mask, start, first_key, TOKENS):
    """The products of queries from `start` on with keys from `first_key` on, with none left where the mask is 0.

    A query past the last token sees all: with nothing to attend to, its weights would be NaN.
    """
    query_N1 = (start + tl.arange(0, product_NM.shape[0]))[:, None]
    key_1M = (first_key + tl.arange(0, product_NM.shape[1]))[None, :]
    there_NM = (query_N1 < TOKENS) & (key_1M < TOKENS)
    shown_NM = tl.load(mask + query_N1 * TOKENS + key_1M, mask=there_NM, other=1)
    return tl.where(shown_NM != 0, product_NM, float("-inf"))
