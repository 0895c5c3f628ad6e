"""Which branches of transformer blocks there are fused kernels for, among operations that wait.

Shape suffixes: B images, N tokens, C channels.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor

from nearsight.train.fused.attention_launch import is_supported as attention_is_supported
from nearsight.train.fused.branches import AttentionBranch, Branch, MlpBranch, Weights
from nearsight.train.fused.tiles import is_supported_width
from nearsight.train.fused.waiting import Operation, Pending
from nearsight.train.stackedweight import plain


def mlp_branch(stream_BNC: Tensor, second: Operation) -> tuple[Branch, Weights] | None:
    """fc2(gelu(fc1(norm(stream)))), if that is what waits."""
    first = before(before(second, F.linear), F.gelu)
    norm = before(first, F.linear)
    if first is None or not is_norm_of(norm, stream_BNC) or not is_supported_width(first.shape.shape[-1]):
        return None
    return MlpBranch(norm.args[4]), weights_of(norm, first, second)


def attention_branch(stream_BNC: Tensor, projection: Operation) -> tuple[Branch, Weights] | None:
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
        and attention_is_supported(tokens, size, projection.dtype, stream_BNC.device)
    )
    if not as_usual:
        return None
    scale = attention.kwargs.get("scale")
    branch = AttentionBranch(norm.args[4], tokens, heads, size**-0.5 if scale is None else scale)
    return branch, weights_of(norm, packed, projection)


def weights_of(norm: Operation, first: Operation, second: Operation, further: Sequence[Tensor] = ()) -> Weights:
    """Those of the operations of a branch, and some that only it has."""
    stacked = (*norm.args[2:4], *first.args[1:], *second.args[1:])
    tensors = [None if weight is None else _dense(plain(weight)) for weight in stacked]
    return Weights._make([*tensors, tuple(_dense(plain(weight)) for weight in further)])


def _dense(weight_K: Tensor) -> Tensor:
    """With each cell's numbers one after the other, as kernels read them; cells may lie apart."""
    return weight_K if weight_K[0].is_contiguous() else weight_K.contiguous()


def before(operation: Operation | None, func: Any) -> Operation | None:
    """What waits before this operation, if this is the one named."""
    if operation is None or operation.func is not func or not isinstance(operation.args[0], Pending):
        return None
    return operation.args[0].operation


def behind_reshapes(operation: Operation | None) -> Operation | None:
    """What was reshaped, if this is a reshape, or one of one; else the operation itself."""
    while operation is not None and operation.reshapes is not None:
        operation = operation.reshapes
    return operation


def lies(operation: Operation, root: Tensor | None, offset: int, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a result is this view of `root`."""
    view = operation.shape
    same_memory = view is root or view._base is root
    return same_memory and (view.storage_offset(), *view.shape, *view.stride()) == (offset, *shape, *strides)


def is_norm_of(operation: Operation | None, rows: Tensor) -> TypeGuard[Operation]:
    return operation is not None and operation.func is F.layer_norm and operation.args[0] is rows
