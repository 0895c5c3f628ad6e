"""Operations that wait for what comes after them, so that a chain of them can be done as one.

A block's code says `x + mlp(norm(x))`, one operation at a time. Here a layer norm of stacked weights gives a `Pending`
instead of numbers, as do projections, GELU, attention and reshapes of a pending one. When it is added to the residual
stream, the branch is known: if it is one there are fused kernels for, the sum is pending too, and the next block goes
on from it. Whenever anything else is done with a pending result, it is made: a stream by its branches, anything else by
its ordinary operations. Models need not know.

Shape suffixes: K cells, B images, N tokens, C channels, H heads, d head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.locat.attention import attend_locally
from nearsight.train.fused.attention_parts import is_supported
from nearsight.train.fused.branches import AttentionBranch, Branch, MlpBranch, Weights, run_chain
from nearsight.train.fused.local_branch import local_attention, local_attention_branch
from nearsight.train.fused.positional_branch import positional_branch, weighed_by_maps
from nearsight.train.fused.rows import is_supported_width
from nearsight.train.fused.waiting import (
    RULES,
    Operation,
    Pending,
    before,
    behind_reshapes,
    evaluated,
    is_norm_of,
    lies,
    weights_of,
)
from nearsight.train.stackedweight import StackedWeight, plainly, rules_replaced
from nearsight.triton_language import runs_on


@contextmanager
def fusing(dtype: torch.dtype) -> Iterator[None]:
    """Let blocks of stacked models run as fused branches, with products in this dtype."""
    with rules_replaced({F.layer_norm: partial(_norm, dtype)}):
        yield


@dataclass(eq=False)
class _Stream(Operation):
    """The residual stream `args[0]` with one more branch."""

    branch: Branch | None = None
    weights: Weights | None = None

    def make(self) -> Tensor:
        """The result by fused kernels: all branches since the last one that is done."""
        streams, rows_BNC = [self], self.args[0]
        while isinstance(rows_BNC, Pending) and rows_BNC.operation.done is None:
            assert isinstance(rows_BNC.operation, _Stream)
            streams.insert(0, rows_BNC.operation)
            rows_BNC = rows_BNC.operation.args[0]
        rows_BNC = evaluated(rows_BNC)
        num_cells = len(cast("Weights", self.weights).scale_KC)
        rows_KRC = rows_BNC.contiguous().view(num_cells, -1, rows_BNC.shape[-1])
        branches = [cast("Branch", stream.branch) for stream in streams]
        result = run_chain(rows_KRC, branches, [cast("Weights", stream.weights) for stream in streams], self.dtype)
        return result.view(rows_BNC.shape)


def _norm(
    dtype: torch.dtype,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    args = (input, normalized_shape, weight, bias, eps)
    waits = (
        isinstance(weight, StackedWeight)
        and isinstance(bias, StackedWeight)
        and input.dim() == 3
        and tuple(normalized_shape) == tuple(input.shape[-1:])
        and input.dtype == torch.float32
        and runs_on(input.device)
        and is_supported_width(input.shape[-1])
    )
    if not waits:
        result: Tensor = plainly(F.layer_norm, *evaluated(args))
        return result
    shape = torch.empty(input.shape, dtype=torch.float32, device="meta")
    return Pending.of(Operation(F.layer_norm, args, {}, shape, dtype), input)


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(input, Pending) or not isinstance(weight, StackedWeight):
        return NotImplemented
    before = input.operation
    shape = torch.empty((*before.shape.shape[:-1], weight.shape[0]), dtype=before.dtype, device="meta")
    return Pending.of(Operation(func, (input, weight, bias), {}, shape, before.dtype), input)


def _gelu(func: Any, input: Pending, *, approximate: str = "none") -> Any:
    if approximate != "none":
        return NotImplemented
    before = input.operation
    return Pending.of(Operation(func, (input,), {}, torch.empty_like(before.shape), before.dtype), input)


def _attention(func: Any, query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
    scale = options.get("scale")
    extra = others or options.get("is_causal") or options.get("dropout_p")
    ordinary = not extra and (scale is None or scale > 0) and _is_one_for_all(options.get("attn_mask"), query)
    same_shape = all(isinstance(tensor, Pending) and tensor.shape == query.shape for tensor in (query, key, value))
    if not (ordinary and same_shape and query.dim() == 4):
        return NotImplemented
    batch, heads, tokens, size = query.shape
    root = torch.empty((batch, tokens, heads, size), dtype=query.dtype, device="meta")
    operation = Operation(func, (query, key, value), options, root.transpose(1, 2), query.operation.dtype, root=root)
    return Pending.of(operation, query)


def _is_one_for_all(mask: Tensor | None, query_BHNd: Tensor) -> bool:
    """Whether a mask says of each pair of tokens, for all images and heads, whether one attends to the other."""
    if mask is None:
        return True
    num_tokens = query_BHNd.shape[-2]
    is_plain = type(mask) is Tensor and mask.dtype == torch.bool and mask.is_contiguous()
    return is_plain and tuple(mask.shape) == (num_tokens, num_tokens)


def _reshape(func: Any, input: Pending, *args: Any, **kwargs: Any) -> Any:
    before = input.operation
    whole = func(before.shape, *args, **kwargs)
    if isinstance(whole, Tensor):
        return Pending.of(Operation(func, (input, *args), kwargs, whole, before.dtype, reshapes=before), input)
    return tuple(
        Pending.of(Operation(_part, (func, number, input, *args), kwargs, shape, before.dtype, reshapes=before), input)
        for number, shape in enumerate(whole)
    )


def _part(func: Any, number: int, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = func(*args, **kwargs)[number]
    return result


def _dropout(func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return input if p == 0 or not training else NotImplemented


def _select(func: Any, input: Pending, index: Any) -> Any:
    """Rows are selected before they are normalised: a classifier that reads one token needs only that one's norm."""
    norm = input.operation
    index = index if isinstance(index, tuple) else (index,)
    if norm.func is not F.layer_norm or len(index) >= input.dim() or not all(isinstance(i, slice | int) for i in index):
        return NotImplemented
    rows, *others = norm.args
    return plainly(F.layer_norm, rows[index], *others)


def _norm_of_stream(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Pending) or not isinstance(input.operation, _Stream):
        return NotImplemented
    return _norm(input.operation.dtype, input, *args, **kwargs)


def _mlp_branch(stream_BNC: Tensor, second: Operation) -> tuple[Branch, Weights] | None:
    """fc2(gelu(fc1(norm(stream)))), if that is what waits."""
    first = before(before(second, F.linear), F.gelu)
    norm = before(first, F.linear)
    if first is None or not is_norm_of(norm, stream_BNC) or not is_supported_width(first.shape.shape[-1]):
        return None
    return MlpBranch(norm.args[4]), weights_of(norm, first, second)


def _attention_branch(stream_BNC: Tensor, projection: Operation) -> tuple[Branch, Weights] | None:
    """projection(attention(qkv(norm(stream)))), if that is what waits."""
    heads_together = before(projection, F.linear)
    attention = behind_reshapes(heads_together)
    if heads_together is None or attention is None or attention.func is not F.scaled_dot_product_attention:
        return None
    parts = [tensor.operation for tensor in attention.args]
    packed = behind_reshapes(parts[0])
    norm = before(packed, F.linear)
    if packed is None or not is_norm_of(norm, stream_BNC):
        return None
    batch, heads, tokens, size = attention.shape.shape
    width = heads * size
    part_strides = (tokens * 3 * width, size, 3 * width, 1)
    as_usual = (
        packed.shape.shape == (batch, tokens, 3 * width)
        and all(
            lies(part, packed.shape, number * width, attention.shape.shape, part_strides)
            for number, part in enumerate(parts)
        )
        and lies(heads_together, attention.root, 0, (batch, tokens, width), (tokens * width, width, 1))
        and is_supported(tokens, size, projection.dtype, stream_BNC.device)
    )
    if not as_usual:
        return None
    scale = attention.kwargs.get("scale")
    branch = AttentionBranch(
        norm.args[4], tokens, heads, size**-0.5 if scale is None else scale, mask_NM=attention.kwargs.get("attn_mask")
    )
    return branch, weights_of(norm, packed, projection)


def _add(func: Any, one: Any, other: Any, **options: Any) -> Any:
    if options:
        return NotImplemented
    for stream, pending in ((one, other), (other, one)):
        if isinstance(pending, Pending) and isinstance(stream, Tensor) and stream.shape == pending.shape:
            for recognised in (_mlp_branch, _attention_branch, local_attention_branch, positional_branch):
                if (found := recognised(stream, pending.operation)) is not None:
                    branch, weights = found
                    shape = torch.empty(stream.shape, dtype=torch.float32, device="meta")
                    dtype = pending.operation.dtype
                    operation = _Stream(func, (stream,), {}, shape, dtype, branch=branch, weights=weights)
                    return Pending.of(operation, stream)
    return NotImplemented


RULES.update({
    F.layer_norm: _norm_of_stream,
    F.linear: _linear,
    F.gelu: _gelu,
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    attend_locally: local_attention,
    torch.einsum: weighed_by_maps,
    Tensor.__getitem__: _select,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys(
        (
            Tensor.reshape, Tensor.view, Tensor.permute, Tensor.transpose, Tensor.flatten, Tensor.unflatten,
            Tensor.unbind, torch.reshape, torch.permute, torch.transpose, torch.flatten, torch.unbind,
        ),
        _reshape,
    ),
})  # fmt: skip
