"""Attention with Gaussians as one operation of torch.

It is a registered operation: `torch.compile` leaves it whole, and `torch.vmap` makes one launch of a stack.

Shape suffixes: B images, H heads, N tokens, P patches, d head size, 2 the axes y and x.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nearsight.locat.grid import Grid
from nearsight.locat.kernels.launch import Geometry, Inputs, backward, forward, new_gradients, new_results
from nearsight.triton_language import INTERPRETED, runs_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 128
_MOST_NUMBERS = 2**31  # from a head's first token to its last: kernels count them in 32 bits


def is_supported(query_BHNd: Tensor, grid: Grid) -> bool:
    """Whether `gaussian_attention` works on such queries, and keys and values like them."""
    _, num_heads, num_tokens, head_size = query_BHNd.shape
    fits = 1 <= head_size <= _LARGEST_HEAD and num_tokens == grid.num_tokens and grid.num_patches >= 1
    near = num_tokens * max(query_BHNd.stride(2), num_heads * head_size) < _MOST_NUMBERS
    return fits and near and query_BHNd.dtype in _DTYPES and runs_on(query_BHNd.device)


def gaussian_attention(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    precision_BHP2: Tensor,
    strength_BHP: Tensor,
    grid: Grid,
    *,
    scale: float,
    largest_half_square: float = math.inf,
) -> Tensor:
    """softmax(scale · Q Kᵀ + S) V, with S[p, t] = strength_p · exp(−Σ_axis precision_p,axis · Δ²_axis) between patches.

    Args:
        query_BHNd: bfloat16, float16 or float32, of any strides; what `is_supported` says yes to.
        key_BHNd: likewise, of the same shape and dtype.
        value_BHNd: likewise.
        precision_BHP2: float32, ½ / variance by y and by x, in grid cells; 0 or more, of any strides.
        strength_BHP: float32, of any strides.
        grid: where tokens lie; from and to prefix tokens, S is 0.
        scale: of the products of queries and keys; above 0.
        largest_half_square: ½ Δ² of an axis counts as no more than this.

    Returns:
        [B, H, N, d] in the dtype of the queries, laid out as [B, N, H, d]. Sums and the softmax are float32; weights,
        and gradients of logits, are rounded to that dtype before they are multiplied with values, queries and keys.
    """
    assert is_supported(query_BHNd, grid)
    assert query_BHNd.shape == key_BHNd.shape == value_BHNd.shape
    assert query_BHNd.dtype == key_BHNd.dtype == value_BHNd.dtype
    assert precision_BHP2.shape == (*query_BHNd.shape[:2], grid.num_patches, 2)
    assert strength_BHP.shape == precision_BHP2.shape[:3]
    assert precision_BHP2.dtype == strength_BHP.dtype == torch.float32
    assert scale > 0  # else the largest logit would not be that of the largest product
    dtype, matrices = query_BHNd.dtype, (query_BHNd, key_BHNd, value_BHNd)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter would multiply the bits
        matrices = query_BHNd.float(), key_BHNd.float(), value_BHNd.float()
    geometry = Geometry(grid.rows, grid.cols, grid.num_prefix, float(scale), float(largest_half_square))
    out_BHNd: Tensor = _attend(*matrices, precision_BHP2, strength_BHP, *geometry)[0]
    return out_BHNd.to(dtype)


@torch.library.custom_op("nearsight::gaussian_attention", mutates_args=())
def _attend(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    precision_BHP2: Tensor,
    strength_BHP: Tensor,
    rows: int,
    cols: int,
    num_prefix: int,
    scale: float,
    largest_half_square: float,
) -> tuple[Tensor, Tensor]:
    return forward(
        Inputs(query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP),
        Geometry(rows, cols, num_prefix, scale, largest_half_square),
    )


@torch.library.custom_op("nearsight::gaussian_attention_backward", mutates_args=())
def _attend_back(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    precision_BHP2: Tensor,
    strength_BHP: Tensor,
    rows: int,
    cols: int,
    num_prefix: int,
    scale: float,
    largest_half_square: float,
    out_BHNd: Tensor,
    log_sum_BHN: Tensor,
    out_grad_BHNd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, precision, strength = backward(
        Inputs(query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP),
        Geometry(rows, cols, num_prefix, scale, largest_half_square),
        out_BHNd,
        log_sum_BHN,
        out_grad_BHNd,
    )
    return query, key, value, precision, strength


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.geometry = inputs[5:]


def _differentiate(ctx: Any, out_grad_BHNd: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out_BHNd, log_sum_BHN = ctx.saved_tensors
    grads = _attend_back(*inputs, *ctx.geometry, out_BHNd, log_sum_BHN, out_grad_BHNd)
    return *grads, *(None for _ in ctx.geometry)


def _fold_stack(operation: Any) -> None:
    """Attention has no weights: under `torch.vmap`, a stack of batches is one batch."""

    def of_stack(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        def folded(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            stacked = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            return stacked.flatten(0, 1)

        results = operation(*map(folded, values, in_dims))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), tuple(0 for _ in results)

    operation.register_vmap(of_stack)


_attend.register_fake(lambda *arguments: new_results(Inputs(*arguments[:5])))
_attend_back.register_fake(lambda *arguments: tuple(new_gradients(Inputs(*arguments[:5]))))
_attend.register_autograd(_differentiate, setup_context=_keep)
_fold_stack(_attend)
_fold_stack(_attend_back)
