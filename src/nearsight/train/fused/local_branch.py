"""The attention branch of blocks with LocAt: its projection also gives the widths and strengths of the local bias.

Shape suffixes: K cells, R rows (tokens) of a cell, C channels, o and i channels of a matrix, P channels out with those
for what queries give, E weights of the heads by which they give it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.train.fused.branches import AttentionBranch, Back, WeightGradients, Weights
from nearsight.train.fused.folding import fold
from nearsight.train.fused.given import fold_given, unfold_given
from nearsight.train.fused.local_attention import local_attention_backward, local_attention_forward
from nearsight.train.fused.local_bias import LocalBias
from nearsight.train.fused.sums import sum_rows


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
