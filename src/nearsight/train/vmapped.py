"""The forward of a stack by `torch.vmap`: for any model, whatever it does with its weights.

`torch.vmap` over `functional_call` runs any module with weights that have a leading axis K. Left alone it loses speed
in two places, where a small function mode steps in while the module runs: linear layers on inputs of more than two
dimensions (each image would get its own copy of the weights) and attention (a Python loop over K). Numerics are those
of the module itself.

Shape suffixes: K cells, B samples, C channels or classes, H rows, W columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode


def vmapped_forward(model: nn.Module, weights_K: dict[str, Tensor], images_KBCHW: Tensor) -> Tensor:
    """Outputs [K, B, …] of K models, each with its own weights on its own images."""

    def one_cell(weights: dict[str, Tensor], images_BCHW: Tensor) -> Tensor:
        output: Tensor = functional_call(model, weights, (images_BCHW,))
        return output

    with _StackFriendly():
        stacked: Tensor = torch.vmap(one_cell, randomness="error")(weights_K, images_KBCHW)
        return stacked


class _StackFriendly(TorchFunctionMode):
    """Says the same with operations that batch well over a leading axis of weights."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = F.linear(input.flatten(0, -2), weight, bias)
    return flat.view(*input.shape[:-1], flat.shape[-1])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is None and not (dropout_p or is_causal or enable_gqa) and query.dim() == 4:
        folded: Tensor = _FoldedAttention.apply(query, key, value, scale)
        return folded
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


class _FoldedAttention(torch.autograd.Function):
    """Attention has no weights, so a stack of K batches is one batch K times as large."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *saved, ctx.scale = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Reached only when nothing is stacked: under vmap autograd sees the folded call itself.
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            output = F.scaled_dot_product_attention(query, key, value, scale=ctx.scale)
        return *torch.autograd.grad(output, (query, key, value), gradient), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> tuple[Tensor, int]:
        def folded(tensor: Tensor, dim: int | None) -> Tensor:
            stacked = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return stacked.flatten(0, 1)

        query, key, value = (folded(*pair) for pair in zip((query, key, value), in_dims[:3], strict=True))
        attended = F.scaled_dot_product_attention(query, key, value, scale=scale)
        return attended.view(info.batch_size, -1, *attended.shape[1:]), 0
