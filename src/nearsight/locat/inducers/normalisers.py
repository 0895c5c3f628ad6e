"""Inducers that stand for the softmax: entmax-1.5, ConViT's gated positional attention, and LSA.

Shape suffixes: B images, W windows, H heads, T queries, M keys, K logits of a row, 2 (by row, by column).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearsight.errors import check_flag, check_number, check_positive
from nearsight.lazy import torch
from nearsight.locat.inducers.base import SAME_PLACE, Asked, Frame, Inducer, register_locality

if TYPE_CHECKING:
    from torch import Tensor, nn

_LOWEST = -2.0
"""Half a logit, relative to the largest: from −1 on a weight is 0, whatever the other keys are."""


def softmax_or_zeros(logits_K: Tensor) -> Tensor:
    """0 in rows all of whose keys are hidden."""
    nothing = logits_K.amax(-1, keepdim=True) == -math.inf
    return logits_K.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def entmax15(logits_K: Tensor) -> Tensor:
    """1.5-entmax over the last axis (Peters et al. 2019), exactly, by sorting: [z/2 − τ]₊² with the τ that makes it sum
    to 1. A key far below the best has a weight of exactly 0."""
    half_K = (logits_K - logits_K.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logits_K.dtype).min)) / 2
    with torch.no_grad():
        support_K = half_K > _threshold(half_K)
    # Given which keys have a weight, τ is the smaller root of Σ (z/2 − τ)² = 1 over these, and it can be derived.
    count = support_K.sum(-1, keepdim=True).clamp(min=1)
    kept_K = torch.where(support_K, half_K, 0.0)
    mean = kept_K.sum(-1, keepdim=True) / count
    spread = torch.where(support_K, half_K - mean, 0.0).square().sum(-1, keepdim=True)
    tau = mean - ((1 - spread).clamp(min=0) / count).sqrt()
    return torch.where(support_K, (half_K - tau), 0.0).clamp(min=0).square()


def _threshold(half_K: Tensor) -> Tensor:
    """τ, by the largest number of keys that go together with it."""
    sorted_K = half_K.clamp(min=_LOWEST).sort(-1, descending=True).values
    count_K = torch.arange(1, half_K.shape[-1] + 1, device=half_K.device, dtype=half_K.dtype)
    mean_K = sorted_K.cumsum(-1) / count_K
    spread_K = sorted_K.square().cumsum(-1) - count_K * mean_K.square()
    tau_K = mean_K - ((1 - spread_K) / count_K).clamp(min=0).sqrt()
    size = (tau_K <= sorted_K).sum(-1, keepdim=True)
    return tau_K.gather(-1, size - 1)


@register_locality
@dataclass(frozen=True, kw_only=True)
class Entmax15(Inducer):
    """1.5-entmax instead of the softmax (Peters et al. 2019): a row's attention is sparse.

    Nothing is learned, and there is no gate: it takes effect at once. It makes attention sparse, not local as such.
    """

    name = "entmax15"
    about = "1.5-entmax instead of the softmax: sparse rows; takes effect at once"
    starts_plain = False
    normalises = True

    def weights(self, own: Any, asked: Asked, logits_BWHTM: Tensor) -> Tensor:
        return entmax15(logits_BWHTM)


@register_locality
@dataclass(frozen=True, kw_only=True)
class GatedPositions(Inducer):
    """ConViT's gated positional attention (d'Ascoli et al. 2021): a row is (1 − σ(λ)) of the softmax of its content and
    σ(λ) of a softmax of positions, which at first is centred on one neighbour of the query in each head.

    σ(λ) is never 0, so there is no start without effect; with gate=-8 it begins at 0.0003. Rows and columns of tokens
    that are not patches have no positions: such rows stay, and σ(λ) of a patch's attention goes to patches alone.
    """

    name = "gpsa"
    about = "ConViT's gated positional attention; its gate σ(λ) is never 0"
    starts_plain = False
    normalises = True

    gate: float = 1.0
    """λ at first, of all heads."""
    strength: float = 1.0
    """How sharply positions are centred at first: the factor of the squared distance."""

    def __post_init__(self) -> None:
        check_number("gate", self.gate)
        check_positive("strength", self.strength)

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        side = max(1, math.isqrt(frame.num_heads))
        centres_H2 = torch.zeros(frame.num_heads, 2)
        for head in range(side * side):
            centres_H2[head] = torch.tensor([head // side, head % side]) - (side - 1) / 2
        # −s·|step − centre|² without the part that is the same for all keys, of (row, column, squared distance).
        start_H3 = self.strength * torch.cat([2 * centres_H2, -torch.ones(frame.num_heads, 1)], dim=1)
        return {"gate": torch.full((frame.num_heads,), float(self.gate)), "positions": start_H3}

    def weights(self, own: Any, asked: Asked, logits_BWHTM: Tensor) -> Tensor:
        content = softmax_or_zeros(logits_BWHTM)
        steps_WTM2 = asked.steps / asked.growth
        by_row, by_col, by_square = (own.positions.view(-1, 1, 1, 3)[..., axis] for axis in range(3))
        down_W1TM, right_W1TM = steps_WTM2[:, None].unbind(-1)
        by_position = by_row * down_W1TM + by_col * right_W1TM + by_square * (down_W1TM**2 + right_W1TM**2)
        # What a mask hides from the content is hidden here too.
        hidden = ~asked.are_patches[:, None] | (logits_BWHTM == -math.inf)
        positional = softmax_or_zeros(by_position.masked_fill(hidden, -math.inf))
        has_place = positional.sum(-1, keepdim=True) > 0
        share = torch.where(has_place, own.gate.view(-1, 1, 1).sigmoid(), 0.0)
        return (1 - share) * content + share * positional


@register_locality
@dataclass(frozen=True, kw_only=True)
class LocalitySelfAttention(Inducer):
    """LSA (Lee et al. 2021): a patch does not attend to itself, and the logits have a learned temperature.

    Each head's logits are multiplied by exp(t), and t is learned from 0 on. The mask takes effect at once; without it
    (diagonal=False) the start is that of the plain model. CLS and registers go on attending to themselves.
    """

    name = "lsa"
    about = "LSA: a patch does not attend to itself, and the temperature is learned; takes effect at once"
    starts_plain = False
    normalises = True

    diagonal: bool = True
    """Whether a patch's own key is hidden."""

    def __post_init__(self) -> None:
        check_flag("diagonal", self.diagonal)

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        asked = Asked(frame.queries_WN2, frame.keys_WM2, frame.extent, frame.extent)
        others_WN = (asked.are_patches & ~self._own_key(asked)).sum(-1) + asked.keys_WM2[:, None, :, 0].isnan().sum(-1)
        if self.diagonal and bool((others_WN[asked.queries_WT2[..., 0].isfinite()] < 1).any()):
            raise self.refuse(f"a patch of {frame.layer_name} has no key but its own; leave that layer out")
        return {"temperature": torch.zeros(frame.num_heads)}

    def _own_key(self, asked: Asked) -> Tensor:
        return asked.are_patches & (asked.distances < SAME_PLACE)

    def weights(self, own: Any, asked: Asked, logits_BWHTM: Tensor) -> Tensor:
        hidden = logits_BWHTM == -math.inf
        if self.diagonal:
            hidden = hidden | self._own_key(asked)[:, None]
        tempered = logits_BWHTM.masked_fill(hidden, 0.0) * own.temperature.view(-1, 1, 1).exp()
        return softmax_or_zeros(tempered.masked_fill(hidden, -math.inf))
