"""Attention with LocAt's local bias among few tokens: one launch each way, and neither maps nor biases in memory.

As `attention`, whose way of holding whole maps this is, with what GAug adds (`nearsight.locat`): the numbers that each
query gives become its widths and strength, and a kernel of the distance between patches is added to the logits.

Shape suffixes: K cells, R images, N tokens, H heads, d head size, P = 3Hd numbers of queries, keys and values, and then
room for what the query of each head gives.
"""

import torch
from torch import Tensor

from nearsight.train.fused.attention_launch import Shape, launch, tiling_of
from nearsight.train.fused.local_bias import LocalBias
from nearsight.train.fused.local_kernels import backward_kernel, forward_kernel


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
    _launch(forward_kernel, [packed_RNP], bias_KP, [out_RNHd], scale, shape, local)
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
    _launch(backward_kernel, [packed_RNP, out_grad_RNHd], bias_KP, [packed_grad], scale, shape, local)
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
    tiling = tiling_of(shape.num_tokens, shape.head_size, inputs[0].dtype, backward=run is backward_kernel)
    launch(run, inputs, bias_KP, results, (scale, *local.numbers), shape, tiling, ROOM=room, **local.constants)
