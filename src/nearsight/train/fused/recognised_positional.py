"""Values weighed by maps that all images share, among operations that wait, and the branch that this is part of.

Shape suffixes: B images, N tokens, C channels, H heads, d head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.train.fused.branches import Branch, Weights
from nearsight.train.fused.positional_branch import PositionalBranch
from nearsight.train.fused.recognised import before, behind_reshapes, is_norm_of, lies, weights_of
from nearsight.train.fused.waiting import Operation, Pending
from nearsight.train.stackedweight import StackedWeight

_WEIGHED = "hnm,bmhd->bnhd"


def weighed_by_maps(func: Any, equation: Any, *operands: Any) -> Any:
    """The rule for `torch.einsum`."""
    if equation != _WEIGHED or not isinstance(operands[0], StackedWeight) or not isinstance(operands[1], Pending):
        return NotImplemented
    maps_HNM, value_BMHd = operands
    num_images, num_keys, num_heads, size = value_BMHd.shape
    if tuple(maps_HNM.shape) != (num_heads, num_keys, num_keys):
        return NotImplemented
    dtype = value_BMHd.operation.dtype
    shape = torch.empty((num_images, num_keys, num_heads, size), dtype=dtype, device="meta")
    return Pending.of(Operation(func, (equation, maps_HNM, value_BMHd), {}, shape, dtype), value_BMHd)


def positional_branch(stream_BNC: Tensor, projection: Operation) -> tuple[Branch, Weights] | None:
    """projection(weighed by maps(values(norm(stream)))), if that is what waits."""
    heads_together = before(projection, F.linear)
    weighed = behind_reshapes(heads_together)
    if heads_together is None or weighed is None or weighed.func is not torch.einsum:
        return None
    _, maps_HNM, value_BMHd = weighed.args
    by_head = value_BMHd.operation
    values = behind_reshapes(by_head)
    norm = before(values, F.linear)
    if values is None or not is_norm_of(norm, stream_BNC):
        return None
    batch, tokens, heads, size = weighed.shape.shape
    width = heads * size
    as_usual = (
        values.shape.shape == (batch, tokens, width)
        and lies(by_head, values.shape, 0, (batch, tokens, heads, size), (tokens * width, width, size, 1))
        and lies(heads_together, weighed.shape, 0, (batch, tokens, width), (tokens * width, width, 1))
    )
    if not as_usual:
        return None
    return PositionalBranch(norm.args[4], tokens, heads), weights_of(norm, values, projection, [maps_HNM])
