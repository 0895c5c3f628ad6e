"""The branches of pre-norm transformer blocks: what each makes of the normalised residual stream, and its backward; and
a chain of them as one operation.

Matrix products are the library's; what lies between them is one kernel each. The forward keeps what the backward cannot
make again cheaply: packed queries, keys and values, attended rows, and the MLP's hidden units.

Shape suffixes: K cells, R rows (tokens) of a cell, C channels, M hidden units, o and i channels of a matrix.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearsight.train.fused.attention import attention_backward, attention_forward
from nearsight.train.fused.folding import fold, unfold_gradients
from nearsight.train.fused.rows import (
    Gradient,
    Normal,
    add_branch,
    gelu_backward,
    gelu_forward,
    norm_back,
    normalize_stream,
    start_back,
    sum_rows,
)

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
        """The gradient of the normalised stream, and what makes those of the weights, which are not needed yet."""
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
    mask_NM: Tensor | None = field(default=None, kw_only=True)
    """Which keys a query may attend to, if not all."""

    def middle(self, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Tensor:
        packed, bias = self.by_image(projected_KRo, 3), self._packed(bias_Ko)
        attended = attention_forward(packed, bias, self.scale, self.mask_NM)
        return attended.view(*projected_KRo.shape[:2], -1)

    def middle_back(self, gradient_KRi: Tensor, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Back:
        packed, bias = self.by_image(projected_KRo, 3), self._packed(bias_Ko)
        gradient = attention_backward(packed, bias, self.by_image(gradient_KRi), self.scale, self.mask_NM)
        return Back(gradient.view(projected_KRo.shape))

    def sum_of(self, back: Back, outer_sum_KC: Tensor, second_KCi: Tensor) -> Tensor:
        # A bias of all keys moves every logit of a query equally, which softmax does not see; and since its weights sum
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


T = TypeVar("T")


class _Beside:
    """A second stream of a CUDA device; elsewhere, work is done at once.

    Gradients of a block's weights are wanted at the end of the backward, not before the next block. With few cells
    their products are small and leave most of a GPU idle, so they run beside the work that others wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[object] = []

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, once it is done: `join` before it is used."""
        if self._stream is None:
            return work()
        # What it works on must keep its memory until it is done, and is not known to the allocator to be in use.
        self._held.append(work)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Let the current stream wait for all work that was begun."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._held.clear()


def run_chain(rows_KRC: Tensor, branches: Sequence[Branch], weights: Sequence[Weights], dtype: torch.dtype) -> Tensor:
    """The residual stream after these branches; float32, with products in `dtype`."""
    flat = [tensor for of_branch in weights for tensor in of_branch.all]
    result: Tensor = _Chain.apply(rows_KRC, tuple(branches), dtype, *flat)
    return result


class _Chain(torch.autograd.Function):
    """What is added to the stream and the norm before the next branch are one kernel, and so is what goes the other
    way: that is why branches are not operations of their own."""

    @staticmethod
    def forward(
        ctx: Any, rows_KRC: Tensor, branches: tuple[Branch, ...], dtype: torch.dtype, *flat: Tensor | None
    ) -> Tensor:
        keep = any(ctx.needs_input_grad)
        weights = _by_branch(flat, branches)
        normals, kept = [normalize_stream(rows_KRC, branches[0].eps, dtype)], []
        for (branch, following), of_branch in zip(pairwise((*branches, None)), weights, strict=True):
            assert branch is not None
            added_KRC, saved = branch.forward(normals[-1].rows_KRC, of_branch)
            rows_KRC, normal = add_branch(
                rows_KRC, added_KRC, of_branch.second_bias_Ko, following.eps if following else None
            )
            if keep:
                kept.append(saved)
            if normal is not None:
                normals = [*normals, normal] if keep else [normal]
        if keep:
            ctx.branches, ctx.dtype = branches, dtype
            ctx.present = [tensor is not None for tensor in flat]
            saved_tensors = [tensor for saved in kept for tensor in saved]
            ctx.num_kept = len(kept[0])
            ctx.save_for_backward(
                *(tensor for tensor in flat if tensor is not None),
                *(tensor for normal in normals for tensor in normal),
                *saved_tensors,
            )
        return rows_KRC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_KRC: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        branches: tuple[Branch, ...] = ctx.branches
        weights = _by_branch([next(saved) if present else None for present in ctx.present], branches)
        normals = [Normal(next(saved), next(saved)) for _ in branches]
        kept = [tuple(next(saved) for _ in range(ctx.num_kept)) for _ in branches]
        gradient = start_back(gradient_KRC.contiguous(), ctx.dtype)
        beside = _Beside(gradient_KRC.device)
        flat: list[Tensor | None] = []
        for branch, of_branch, normal, of_forward in zip(
            reversed(branches), reversed(weights), reversed(normals), reversed(kept), strict=True
        ):
            branch_gradient, weight_gradients = branch.backward(gradient, normal, of_forward, of_branch)
            flat = [*beside.run(weight_gradients), *flat]
            gradient = norm_back(gradient, branch_gradient, normal)
        beside.join()
        return gradient.rows_KRC, None, None, *flat


def _by_branch(flat: Sequence[Any], branches: Sequence[Branch]) -> list[Weights]:
    tensors = iter(flat)
    return [Weights.taken_from(tensors, branch) for branch in branches]
