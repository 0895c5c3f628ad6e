"""The branches of pre-norm transformer blocks: what each makes of the normalised residual stream, and its backward.

Matrix products are the library's; what lies between them is one kernel each. The forward keeps what the backward cannot
make again cheaply: packed queries, keys and values, attended rows, and the MLP's hidden units.

Shape suffixes: K cells, R rows (tokens) of a cell, C channels, M hidden units, o and i channels of a matrix.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.train.fused.attention import attention_backward, attention_forward
from nearsight.train.fused.folding import fold, unfold_gradients
from nearsight.train.fused.gelu import gelu_backward, gelu_forward
from nearsight.train.fused.residual import Gradient, Normal
from nearsight.train.fused.sums import sum_rows

Kept = tuple[Tensor, ...]
WeightGradients = tuple[Tensor | None, ...]
"""In the order of `Weights.all`."""


class Back(NamedTuple):
    """What `Branch.middle_back` gives."""

    gradient_KRo: Tensor
    """Of the first projection's result."""
    sums: Tensor | None = None
    """What it already knows of that gradient's sum over all rows, for `sum_of`."""
    further: WeightGradients = ()
    """Of further weights, if it is here that they are used."""


class Weights(NamedTuple):
    """Of a branch, float32, cell by cell."""

    scale_KC: Tensor
    """Of the norm."""
    shift_KC: Tensor
    first_Koi: Tensor
    first_bias_Ko: Tensor | None
    second_Koi: Tensor
    second_bias_Ko: Tensor | None
    further: tuple[Tensor, ...] = ()
    """Those that only some branches have."""

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        """One after the other."""
        return *self[:-1], *self.further

    @classmethod
    def taken_from(cls, tensors: Iterator[Any], branch: "Branch") -> "Weights":
        """The next ones of several branches', all after each other."""
        own = list(islice(tensors, len(cls._fields) - 1))
        return cls._make([*own, tuple(islice(tensors, branch.num_further))])


@dataclass(frozen=True)
class Branch(ABC):
    """norm → first projection → something → second projection, without the second's bias."""

    eps: float
    """Of the norm."""

    @property
    def num_further(self) -> int:
        """How many further weights it has."""
        return 0

    def forward(self, normal_KRC: Tensor, weights: Weights) -> tuple[Tensor, Kept]:
        """What the branch adds to the stream, and what its backward will need."""
        folded_Koi, shifted_Ko = self.fold(weights, normal_KRC.dtype)
        rounded_Koi = weights.second_Koi.to(normal_KRC.dtype)
        projected_KRo = torch.bmm(normal_KRC, folded_Koi.mT)
        middle_KRi = self.middle(projected_KRo, shifted_Ko, weights)
        added_KRC = torch.bmm(middle_KRi, rounded_Koi.mT)
        return added_KRC, (projected_KRo, middle_KRi, folded_Koi, shifted_Ko, rounded_Koi)

    def backward(
        self, gradient: Gradient, normal: Normal, kept: Kept, weights: Weights
    ) -> tuple[Tensor, Callable[[], WeightGradients]]:
        """The gradient of the normalised stream, and what makes those of the weights, for which nobody waits."""
        projected_KRo, middle_KRi, folded_Koi, shifted_Ko, rounded_Koi = kept
        middle_gradient = torch.bmm(gradient.rounded_KRC, rounded_Koi)
        back = self.middle_back(middle_gradient, projected_KRo, shifted_Ko, weights)

        def weight_gradients() -> WeightGradients:
            outer_sum_KC = gradient.sums_KTC.sum(1)
            sum_Ko = self.sum_of(back, outer_sum_KC, weights.second_Koi)
            product_Koi = sum_of_products(back.gradient_KRo, normal.rows_KRC)
            product_Koi, sum_Ko, further = self.unfold(product_Koi, sum_Ko, shifted_Ko, weights)
            first_gradient_Koi, scale_gradient_KC, shift_gradient_KC = unfold_gradients(
                product_Koi, sum_Ko, weights.first_Koi, weights.scale_KC, weights.shift_KC
            )
            return (
                scale_gradient_KC,
                shift_gradient_KC,
                first_gradient_Koi,
                None if weights.first_bias_Ko is None else sum_Ko,
                sum_of_products(gradient.rounded_KRC, middle_KRi),
                None if weights.second_bias_Ko is None else outer_sum_KC,
                *(further or back.further),
            )

        return torch.bmm(back.gradient_KRo, folded_Koi), weight_gradients

    def fold(self, weights: Weights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first projection, in `dtype`, and its bias, of the normalised stream."""
        return fold(weights.first_Koi, weights.first_bias_Ko, weights.scale_KC, weights.shift_KC, dtype)

    def unfold(
        self, product_Koi: Tensor, sum_Ko: Tensor, shifted_Ko: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor, WeightGradients]:
        """Sums over all rows, of the first projection's gradient times the normalised stream and of it alone, without
        what `fold` added to the weights; and the gradients of further weights, if it is there that they are used.
        """
        return product_Koi, sum_Ko, ()

    @abstractmethod
    def middle(self, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Tensor:
        """What the second projection gets of the first's result, to which its bias is still to be added."""

    @abstractmethod
    def middle_back(self, gradient_KRi: Tensor, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Back:
        """From the gradient of what `middle` gives."""

    @abstractmethod
    def sum_of(self, back: Back, outer_sum_KC: Tensor, second_KCi: Tensor) -> Tensor:
        """The sum of the first projection's gradient over all rows, where that of the branch's result is known."""


@dataclass(frozen=True)
class MlpBranch(Branch):
    """fc1 → GELU → fc2."""

    def middle(self, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Tensor:
        return gelu_forward(projected_KRo, bias_Ko)

    def middle_back(self, gradient_KRi: Tensor, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Back:
        return Back(*gelu_backward(gradient_KRi, projected_KRo, bias_Ko))

    def sum_of(self, back: Back, outer_sum_KC: Tensor, second_KCi: Tensor) -> Tensor:
        assert back.sums is not None
        return back.sums.sum(1)


@dataclass(frozen=True)
class AttentionBranch(Branch):
    """qkv → attention → projection."""

    num_tokens: int
    num_heads: int
    scale: float
    """Of the products of queries and keys."""

    def middle(self, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Tensor:
        attended = attention_forward(self.by_image(projected_KRo, 3), self._packed(bias_Ko), self.scale)
        return attended.view(*projected_KRo.shape[:2], -1)

    def middle_back(self, gradient_KRi: Tensor, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Back:
        packed, bias = self.by_image(projected_KRo, 3), self._packed(bias_Ko)
        gradient = attention_backward(packed, bias, self.by_image(gradient_KRi), self.scale)
        return Back(gradient.view(projected_KRo.shape))

    def sum_of(self, back: Back, outer_sum_KC: Tensor, second_KCi: Tensor) -> Tensor:
        # A bias of all keys moves every logit of a query alike, which softmax does not see; and since its weights sum
        # to 1, a bias of all values moves every result by itself.
        of_values_Ki = torch.bmm(outer_sum_KC.unsqueeze(1), second_KCi).squeeze(1)
        of_queries_Ki = sum_rows(back.gradient_KRo[..., : of_values_Ki.shape[1]])
        return torch.cat([of_queries_Ki, torch.zeros_like(of_values_Ki), of_values_Ki], dim=1)

    def by_image(self, rows_KRC: Tensor, *parts: int) -> Tensor:
        """[K, R, C] → [images of all cells, tokens, *parts, heads, head size]."""
        head_size = rows_KRC.shape[2] // math.prod((*parts, self.num_heads))
        return rows_KRC.view(-1, self.num_tokens, *parts, self.num_heads, head_size)

    def _packed(self, bias_Ko: Tensor) -> Tensor:
        return bias_Ko.view(len(bias_Ko), 3, self.num_heads, -1)


def sum_of_products(gradient_KRo: Tensor, rows_KRi: Tensor) -> Tensor:
    """Σ over rows of gradientᵀ · rows, float32 [K, o, i]."""
    if gradient_KRo.dtype == torch.float32:
        return torch.bmm(gradient_KRo.mT, rows_KRi)
    if not gradient_KRo.is_cuda:  # elsewhere torch gives products no other precision
        return torch.bmm(gradient_KRo.float().mT, rows_KRi.float())
    return torch.bmm(gradient_KRo.mT, rows_KRi, out_dtype=torch.float32)
