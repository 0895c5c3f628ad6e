"""The attention branch of blocks with LocAt, whose projection also gives the widths and strengths of the local bias;
and how it is found among operations that wait.

Shape suffixes: K cells, R rows (tokens) of a cell, B images, N tokens, C channels, o and i channels of a matrix, P
channels out with those for what queries give, E weights of the heads by which they give it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nearsight.locat.attention import attend_locally
from nearsight.locat.gaussian import GaussianHeads, Grid
from nearsight.train.fused.attention_parts import is_supported
from nearsight.train.fused.branches import AttentionBranch, Back, Branch, WeightGradients, Weights
from nearsight.train.fused.folding import fold, fold_given, unfold_given
from nearsight.train.fused.local_attention import local_attention_backward, local_attention_forward
from nearsight.train.fused.local_bias import LocalBias
from nearsight.train.fused.rows import sum_rows
from nearsight.train.fused.waiting import Operation, Pending, before, evaluated, is_norm_of, weights_of
from nearsight.train.stackedweight import StackedWeight, plainly


@dataclass(frozen=True)
class LocalAttentionBranch(AttentionBranch):
    """qkv → attention with a local bias → projection.

    Further weights are those of the heads by which queries give their widths, then their strengths, as far as they do:
    a matrix [K, numbers, head size] and a bias [K, numbers] each.
    """

    local: LocalBias

    @property
    def num_further(self) -> int:
        return 2 * (bool(self.local.num_axes) + self.local.learns_strength)

    def fold(self, weights: Weights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        first_Koi, bias_Ko, scale_KC, shift_KC = weights.first_Koi, weights.first_bias_Ko, *weights[:2]
        folded_KPi, shifted_KP = fold(first_Koi, bias_Ko, scale_KC, shift_KC, dtype, num_more=self._num_more)
        if weights.further:
            fold_given(folded_KPi, shifted_KP, first_Koi, scale_KC, _side_by_side(weights.further), self.local)
        return folded_KPi, shifted_KP

    def unfold(
        self, product_Koi: Tensor, sum_Ko: Tensor, shifted_Ko: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor, WeightGradients]:
        further: WeightGradients = ()
        if weights.further:
            heads_gradient_KE = unfold_given(
                product_Koi,
                sum_Ko,
                shifted_Ko,
                weights.first_Koi,
                weights.scale_KC,
                _side_by_side(weights.further),
                self.local,
            )
            parts = heads_gradient_KE.split([weight[0].numel() for weight in weights.further], dim=1)
            further = tuple(part.view(weight.shape) for part, weight in zip(parts, weights.further, strict=True))
        width_out = weights.first_Koi.shape[1]
        return product_Koi[:, :width_out], sum_Ko[:, :width_out], further

    def middle(self, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Tensor:
        attended = local_attention_forward(
            self._by_token(projected_KRo), bias_Ko, self.num_heads, self.scale, self.local
        )
        return attended.view(*projected_KRo.shape[:2], -1)

    def middle_back(self, gradient_KRi: Tensor, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Back:
        packed, attended_gradient = self._by_token(projected_KRo), self.by_image(gradient_KRi)
        gradient = local_attention_backward(packed, bias_Ko, attended_gradient, self.scale, self.local)
        return Back(gradient.view(projected_KRo.shape))

    def sum_of(self, back: Back, outer_sum_KC: Tensor, second_KCi: Tensor) -> Tensor:
        # What is said of plain attention still holds: widths and strengths come from queries, not from keys and values.
        of_packed_Ko = super().sum_of(back, outer_sum_KC, second_KCi)
        if self._num_more == 0:
            return of_packed_Ko
        return torch.cat([of_packed_Ko, sum_rows(back.gradient_KRo[..., -self._num_more :])], dim=1)

    @property
    def _num_more(self) -> int:
        """Rows that the projection has for what queries give."""
        return self.num_heads * self.local.room(self.num_heads)

    def _by_token(self, rows_KRC: Tensor) -> Tensor:
        """[K, R, C] → [images of all cells, tokens, C]."""
        return rows_KRC.view(-1, self.num_tokens, rows_KRC.shape[2])


def _side_by_side(weights_K: Sequence[Tensor]) -> Tensor:
    """All weights of a cell, [K, …]."""
    return torch.cat([weight.flatten(1) for weight in weights_K], dim=1)


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
