"""LocAt's attention among operations that wait, and the branch that it is part of.

Shape suffixes: B images, N tokens, C channels, P = 3C numbers of queries, keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nearsight.locat.attention import attend_locally
from nearsight.locat.gaussian import GaussianHeads, Grid
from nearsight.train.fused.attention_launch import is_supported
from nearsight.train.fused.branches import Branch, Weights
from nearsight.train.fused.local_bias import LocalBias
from nearsight.train.fused.local_branch import LocalAttentionBranch
from nearsight.train.fused.recognised import before, is_norm_of, weights_of
from nearsight.train.fused.waiting import Operation, Pending, evaluated
from nearsight.train.stackedweight import StackedWeight, plainly


@dataclass(eq=False)
class _LocalAttention(Operation):
    """`attend_locally`, with the weights that its heads have now: when it is made, the model may have others again."""

    heads: Mapping[str, Tensor] | None = None
    local: LocalBias | None = None

    def make(self) -> Any:
        packed_BNP, gaug, *others = self.args
        assert self.heads is not None
        weights = {f"gaug.{name}": weight for name, weight in self.heads.items()}
        args = (evaluated(packed_BNP), *others)
        return plainly(functional_call, _Attending(gaug), weights, args, self.kwargs)


class _Attending(nn.Module):
    def __init__(self, gaug: GaussianHeads) -> None:
        super().__init__()
        self.gaug = gaug

    def forward(self, packed_BNP: Tensor, grid: Grid, *, scale: float) -> Tensor:
        return attend_locally(packed_BNP, self.gaug, grid, scale=scale)


def local_attention(func: Any, packed_BNP: Pending, gaug: GaussianHeads, grid: Grid, *, scale: float) -> Any:
    """The rule for `attend_locally`."""
    local = LocalBias.of(gaug, grid)
    heads = dict(gaug.named_parameters())
    if local is None or scale <= 0 or not _are_as_usual(heads, local):
        return NotImplemented
    batch, tokens, width = packed_BNP.shape
    dtype = packed_BNP.operation.dtype
    shape = torch.empty((batch, tokens, width // 3), dtype=dtype, device="meta")
    args, options = (packed_BNP, gaug, grid), {"scale": scale}
    return Pending.of(_LocalAttention(func, args, options, shape, dtype, heads=heads, local=local), packed_BNP)


def _are_as_usual(heads: Mapping[str, Tensor], local: LocalBias) -> bool:
    """Whether the weights are those that `LocalAttentionBranch` takes, in its order."""
    there = (("log_var", local.num_axes > 0), ("log_alpha", local.learns_strength))
    names = [f"{name}.{part}" for name, is_there in there if is_there for part in ("weight", "bias")]
    return list(heads) == names and all(isinstance(weight, StackedWeight) for weight in heads.values())


def local_attention_branch(stream_BNC: Tensor, projection: Operation) -> tuple[Branch, Weights] | None:
    """projection(attend_locally(qkv(norm(stream)))), if that is what waits."""
    attention = before(projection, F.linear)
    packed = before(attention, attend_locally)
    norm = before(packed, F.linear)
    if not isinstance(attention, _LocalAttention) or packed is None or not is_norm_of(norm, stream_BNC):
        return None
    assert attention.heads is not None
    assert attention.local is not None
    _, gaug, grid = attention.args
    size, rest = divmod(attention.shape.shape[-1], gaug.num_heads)
    as_usual = (
        rest == 0
        and packed.shape.shape == (*attention.shape.shape[:-1], 3 * gaug.num_heads * size)
        and attention.shape.shape[1] == grid.num_tokens
        and is_supported(grid.num_tokens, size, projection.dtype, stream_BNC.device)
    )
    if not as_usual:
        return None
    branch = LocalAttentionBranch(
        norm.args[4], grid.num_tokens, gaug.num_heads, attention.kwargs["scale"], attention.local
    )
    return branch, weights_of(norm, packed, projection, list(attention.heads.values()))
