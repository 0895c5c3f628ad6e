"""A chain of residual branches as one operation with its own backward.

What is added to the stream and the norm before the next branch are one kernel, and so is what goes the other way: that
is why branches are not operations of their own.

Shape suffixes: K cells, R rows (tokens) of a cell, C channels.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearsight.train.fused.beside import Beside
from nearsight.train.fused.branches import Branch, Weights
from nearsight.train.fused.residual import Normal, add_branch, norm_back, normalize_stream, start_back


def run_chain(rows_KRC: Tensor, branches: Sequence[Branch], weights: Sequence[Weights], dtype: torch.dtype) -> Tensor:
    """The residual stream after these branches; float32, with products in `dtype`."""
    flat = [tensor for of_branch in weights for tensor in of_branch.all]
    result: Tensor = _Chain.apply(rows_KRC, tuple(branches), dtype, *flat)
    return result


class _Chain(torch.autograd.Function):
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
        beside = Beside(gradient_KRC.device)
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
