"""How far a head looks, and how selectively: mean attention distance and normalised entropy (S1 §3).

S1 is "Inducing Spatial Locality in Vision Transformers through the Training Protocol" (arXiv 2605.16390). Shape
suffixes: N tokens (prefix tokens such as CLS and registers first, then patches row by row), P patches; leading axes
(batch, heads, …) are carried through.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nearsight.errors import InputError, check_at_least
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def grid_distances(
    grid_size: tuple[int, int], start: int = 0, stop: int | None = None, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Euclidean distance between patches, in units of the grid's diagonal (S1 Eq. 3): float64 [P, P].

    With `start` and `stop`, only the rows of those patches: [stop - start, P].
    """
    rows, cols = grid_size
    diagonal = _diagonal(grid_size)
    row = torch.arange(rows, dtype=torch.float64, device=device).repeat_interleave(cols)
    col = torch.arange(cols, dtype=torch.float64, device=device).repeat(rows)
    return torch.hypot(row[start:stop, None] - row, col[start:stop, None] - col) / diagonal


def within_reach(
    grid_size: tuple[int, int], reach: float, *, num_prefix_tokens: int = 1, device: torch.device | str = "cpu"
) -> Tensor:
    """Which tokens a token may attend to where patches see `reach` patches far: bool [N, N], queries × keys.

    That is patches whose centres are at most so many patches away, itself among them, and all prefix tokens; these
    attend to all tokens.
    """
    check_grid(grid_size)
    if not reach >= 0:  # also true for NaN
        raise InputError(f"reach is {reach}, but must be at least 0")
    rows, cols = grid_size
    row = torch.arange(rows, dtype=torch.float64, device=device).repeat_interleave(cols)
    col = torch.arange(cols, dtype=torch.float64, device=device).repeat(rows)
    # The root of a whole number is rounded correctly, so that a reach of math.sqrt(5) includes a knight's move.
    near_PP = ((row[:, None] - row).square() + (col[:, None] - col).square()).sqrt() <= reach
    num_tokens = num_prefix_tokens + rows * cols
    within_NN = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
    within_NN[num_prefix_tokens:, num_prefix_tokens:] = near_PP
    return within_NN


def uniform_attention_distance(grid_size: tuple[int, int]) -> float:
    """The MAD of uniform attention: 0.417848 on an 8×8 grid."""
    rows, cols = grid_size
    diagonal = _diagonal(grid_size)
    # Distances depend on offsets alone, and an offset of k cells fits n − |k| times: few numbers, for any grid.
    row = torch.arange(1 - rows, rows, dtype=torch.float64)[:, None]
    col = torch.arange(1 - cols, cols, dtype=torch.float64)
    pairs = (rows - row.abs()) * (cols - col.abs())
    return float((pairs * torch.hypot(row, col)).sum() / pairs.sum() / diagonal)


def next_patch_distance(grid_size: tuple[int, int]) -> float:
    """How far the next patch is, in units of the grid's diagonal: 0.101015 on an 8×8 grid; infinite for one patch."""
    diagonal = _diagonal(grid_size)
    return 1 / diagonal if math.prod(grid_size) > 1 else math.inf


def _diagonal(grid_size: tuple[int, int]) -> float:
    """The grid's longest distance, in patches; 1 for a single patch, where all distances are 0."""
    check_grid(grid_size)
    rows, cols = grid_size
    return math.hypot(rows - 1, cols - 1) or 1.0


def attention_distance(
    attn: Tensor, grid_size: tuple[int, int], *, num_prefix_tokens: int = 1, renormalize: bool = True
) -> Tensor:
    """Mean attention distance per head, in units of the grid's diagonal (S1 Eq. 2–4; Dosovitskiy et al. 2021).

    Args:
        attn: attention after the softmax, [..., heads, N, N].
        grid_size: rows and columns of the patch grid.
        num_prefix_tokens: leading tokens that are not patches (CLS, registers); their rows and columns are dropped.
        renormalize: let each query's attention to patches sum to 1 again after that, as S1 does. Without it the
            distance is understated by whatever the prefix tokens receive; widely copied notebooks do that.

    Returns:
        [..., heads], float64, the mean over query patches. A query that gives patches no attention at all looks nowhere
        and is left out of a renormalised mean; a head with no other queries is NaN.
    """
    patch_attn = attention_on_grid(attn, grid_size, num_prefix_tokens)
    distance_PP = grid_distances(grid_size, device=patch_attn.device)
    distance = (patch_attn * distance_PP).sum(-1)
    if not renormalize:
        return distance.mean(-1)
    mass = patch_attn.sum(-1)
    return mean_over_looking(distance / mass_or_one(mass), mass)


def attention_entropy(attn: Tensor, *, num_prefix_tokens: int = 1, eps: float = 1e-12) -> Tensor:
    """Entropy of each head's attention over patches, divided by its maximum log P (S1 Eq. 5–6).

    0: each query attends to one patch; 1: to all equally. `attn` is [..., heads, N, N] after the softmax; the result is
    [..., heads] in float64. Prefix tokens and queries without attention to patches are treated as in
    `attention_distance`. With a single patch there is nothing to choose, and the entropy is 0. `eps` is added before
    the logarithm is taken; it may be 0.
    """
    check_at_least("eps", eps, 0)
    patch_attn = _patch_attention(attn, num_prefix_tokens)
    mass = patch_attn.sum(-1)
    share = patch_attn / mass_or_one(mass).unsqueeze(-1)
    shifted = share + eps
    # Without eps a weight of 0 has no logarithm, and p · log p goes to 0 there as 0 · log 1 is.
    # log(p + eps) lets a one-hot row fall below zero by eps: it would be shown as "−0.000".
    entropy = (share * -shifted.where(shifted != 0, 1.0).log()).sum(-1).clamp(min=0)
    num_patches = patch_attn.shape[-1]
    return mean_over_looking(entropy / math.log(num_patches) if num_patches > 1 else entropy, mass)


def attention_on_grid(attn: Tensor, grid_size: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """The patch-to-patch block in float64, [..., heads, P, P], of tokens that must fit the grid."""
    patch_attn, (rows, cols) = _patch_attention(attn, num_prefix_tokens), grid_size
    if patch_attn.shape[-1] != rows * cols:
        raise InputError(
            f"{attn.shape[-1]} tokens do not fit a {rows}×{cols} grid with {num_prefix_tokens} prefix tokens "
            f"({rows * cols + num_prefix_tokens} expected)"
        )
    return patch_attn


def _patch_attention(attn: Tensor, num_prefix_tokens: int) -> Tensor:
    """The patch-to-patch block in float64."""
    if attn.dim() < 3 or attn.shape[-1] != attn.shape[-2]:
        raise InputError(f"attention of shape [..., heads, N, N] is needed, not {list(attn.shape)}")
    if not 0 <= num_prefix_tokens < attn.shape[-1]:
        raise InputError(f"{num_prefix_tokens} prefix tokens leave no patch among {attn.shape[-1]} tokens")
    return to_float64(attn[..., num_prefix_tokens:, num_prefix_tokens:])


def mass_or_one(mass: Tensor) -> Tensor:
    """For queries that look nowhere 1: their quotient is left out, but 0/0 would come back in the gradients."""
    return mass.where(mass != 0, 1.0)


def mean_over_looking(value: Tensor, mass: Tensor) -> Tensor:
    """Mean over queries whose attention to patches is not exactly zero. NaN attention stays NaN."""
    looking = mass != 0
    return torch.where(looking, value, 0.0).sum(-1) / looking.sum(-1)


def check_grid(grid_size: tuple[int, int]) -> None:
    """Refuse (rows, columns) that hold no patch: two negative ones multiply to a number of patches too."""
    rows, cols = grid_size
    if rows < 1 or cols < 1:
        raise InputError(f"a grid has at least one row and one column, not {rows}×{cols}")


def to_float64(tensor: Tensor) -> Tensor:
    """Metrics are computed in float64; on the CPU if a tensor's own device has none (MPS)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(torch.float64)
