"""Which patches belong together according to a model, by the inner products of their positions (S3).

S3 is "Vision Transformers provably learn spatial structure" (arXiv 2210.09221). A *Gram matrix* here is PᵀP of the
positions P, or the attention logits A that take its place in S3's simplified model. Shape suffixes: D patches; leading
axes (seeds, heads, …) are carried through. All is computed in float64.

An entry belongs to the n largest of its row if fewer than n others are as large: of entries that are tied across the
border none does. So nothing is ever found by the order in which equal numbers happen to be sorted.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearsight.errors import InputError
from nearsight.metrics.attention import check_grid, to_float64

Partition = Tensor | NDArray[Any] | Sequence[int] | Sequence[Iterable[int]]
"""Labels of the patches, [D]; or the sets themselves, each as the numbers of its patches."""


class PatchAssociation(NamedTuple):
    """How well a Gram matrix recovers the sets of a partition."""

    per_patch: Tensor
    """[..., D] bool: patch association (S3 Def. 2.2)."""
    fraction: Tensor
    """[...] float64: the share of patches that are associated."""
    rand_index: Tensor
    """[...] float64: adjusted Rand index of the sets the matrix gives; 1 if they are the true ones, 0 by chance."""


class NeighbourAssociation(NamedTuple):
    """How much the patches that a Gram matrix puts together are neighbours in the image."""

    per_patch: Tensor
    """[..., D] float64: share of a patch's k neighbours that are among the k largest other entries of its row."""
    fraction: Tensor
    """[...] float64: its mean over patches."""
    chance_per_patch: Tensor
    """[D] float64: what a random order of the others gives on average, k / (D − 1)."""

    @property
    def chance(self) -> float:
        """What a random matrix gives on average over patches."""
        return float(self.chance_per_patch.mean())


def patch_association(gram: Tensor, sets: Partition) -> PatchAssociation:
    """Whether the patches most similar to each patch are exactly those of its set (S3 Def. 2.2).

    A patch of a set with C members is associated if the C largest entries of its row, its own among them, are those of
    the set. A set may have any size; a tie across the border does not count.

    The recovered sets are the connected components of the graph that joins two patches if each is among the largest
    entries of the other, where each counts as many as its own set has members. If all patches are associated these are
    the true sets.

    Args:
        gram: [..., D, D], finite.
        sets: the partition, either as a vector of D labels (any integers) or as a sequence of index sequences, in which
            every patch occurs once. A matrix is the latter: a set in each row.
    """
    gram = _checked(gram)
    label_D = _labels(sets, gram.shape[-1]).to(gram.device)
    same_DD = label_D[:, None] == label_D
    top = _largest(gram, same_DD.sum(-1))
    per_patch = (top == same_DD).all(-1)
    return PatchAssociation(
        per_patch, per_patch.double().mean(-1), _adjusted_rand_index(same_DD, _joined(top & top.transpose(-1, -2)))
    )


def neighbour_association(gram: Tensor, grid_size: tuple[int, int]) -> NeighbourAssociation:
    """Patch association of a real ViT, where no partition is given: are the most similar patches the neighbours?

    Every patch has k ≤ 8 neighbours, diagonal ones and no others beyond the border of the grid. Their share among the
    k largest entries of its row, itself left aside, is 1 at best and k / (D − 1) by chance. `gram` is [..., D, D] with
    patches row by row. A single patch has no neighbours: NaN.
    """
    gram = _checked(gram, grid_size)
    row_D, col_D = _rows_and_columns(grid_size, gram.device)
    apart_DD = torch.maximum((row_D[:, None] - row_D).abs(), (col_D[:, None] - col_D).abs())
    neighbour_DD = apart_DD == 1
    number_D = neighbour_DD.sum(-1)
    others = gram.masked_fill(apart_DD == 0, -torch.inf)
    per_patch = (_largest(others, number_D) & neighbour_DD).sum(-1) / number_D.double()
    return NeighbourAssociation(per_patch, per_patch.mean(-1), number_D.double() / max(len(number_D) - 1, 1))


def gram_distance_correlation(gram: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Spearman correlation between the entries of a Gram matrix and the distances of their patches: [...] float64.

    −1: the closer two patches, the larger their entry. Over all pairs of different patches, tied ranks averaged. Of
    ranks, since nothing makes it a straight line: positions separate neighbours and leave the rest near zero.
    NaN where entries or distances are all equal.
    """
    gram = _checked(gram, grid_size)
    row_D, col_D = _rows_and_columns(grid_size, gram.device)
    # Squares of whole numbers have the same order, and tie exactly.
    squared_DD = (row_D[:, None] - row_D) ** 2 + (col_D[:, None] - col_D) ** 2
    different_DD = squared_DD > 0
    one, other = (
        ranks - ranks.mean(-1, keepdim=True)
        for ranks in (_ranks(gram[..., different_DD]), _ranks(squared_DD[different_DD]))
    )
    return (one * other).sum(-1) / (one.square().sum(-1) * other.square().sum(-1)).sqrt()


def _checked(gram: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
    if gram.dim() < 2 or gram.shape[-1] != gram.shape[-2] or not gram.shape[-1]:
        raise InputError(f"a Gram matrix of shape [..., D, D] is needed, not {list(gram.shape)}")
    if grid_size is not None:
        check_grid(grid_size)
        rows, cols = grid_size
        if gram.shape[-1] != rows * cols:
            raise InputError(f"a Gram matrix of {gram.shape[-1]} patches does not fit a {rows}×{cols} grid")
    gram = to_float64(gram)
    if not gram.isfinite().all():
        raise InputError(
            "the Gram matrix has entries that are NaN or infinite: it is not defined which of them are largest"
        )
    return gram


def _labels(sets: Partition, num_patches: int) -> Tensor:
    """A number per patch, equal for those of one set."""
    no_partition = InputError("a partition is a vector of integer labels, or a sequence of index sequences")
    if not isinstance(sets, Iterable) or (isinstance(sets, Tensor | np.ndarray) and not sets.ndim):
        raise no_partition
    parts: list[Any] = [part.tolist() if isinstance(part, Tensor | np.ndarray) else part for part in sets]
    if all(isinstance(part, int | np.integer) for part in parts):
        if len(parts) != num_patches:
            raise InputError(f"{len(parts)} labels do not fit a Gram matrix of {num_patches} patches")
        numbers = {label: number for number, label in enumerate(dict.fromkeys(parts))}
        return torch.tensor([numbers[label] for label in parts])
    if not all(isinstance(part, Iterable) for part in parts):
        raise no_partition
    label_D = torch.full((num_patches,), -1)
    for number, members in enumerate(parts):
        for member in members:
            try:
                patch = operator.index(member)
            except TypeError as error:
                raise no_partition from error
            if not 0 <= patch < num_patches:
                raise InputError(f"the sets name patch {patch}, but the Gram matrix has {num_patches} patches from 0")
            if label_D[patch] >= 0:
                raise InputError(f"patch {patch} occurs twice in the sets; they must not overlap")
            label_D[patch] = number
    if (label_D < 0).any():
        missing = int((label_D < 0).nonzero()[0])
        raise InputError(f"patch {missing} is in none of the sets; together they must hold all {num_patches} patches")
    return label_D


def _largest(gram: Tensor, number_D: Tensor) -> Tensor:
    """[..., D, D] bool: the number_D largest entries of each row, without those that tie with one left out."""
    falling = gram.sort(-1, descending=True).values
    bottomless = torch.cat([falling, torch.full_like(falling[..., :1], -torch.inf)], dim=-1)
    first_left_out = bottomless.gather(-1, number_D.expand(gram.shape[:-1]).unsqueeze(-1))
    return gram > first_left_out


def _ranks(values: Tensor) -> Tensor:
    """Of each number among those of its row, from 0, float64; those that tie share the mean of their ranks."""
    rising, order = values.sort(-1)
    place = torch.arange(values.shape[-1], device=values.device)
    edge = torch.ones_like(rising[..., :1], dtype=torch.bool)
    differs = rising[..., 1:] != rising[..., :-1]
    # Of each run of equal numbers, where it begins and where it ends.
    first = torch.where(torch.cat([edge, differs], -1), place, 0).cummax(-1).values
    last = torch.where(torch.cat([differs, edge], -1), place, len(place)).flip(-1).cummin(-1).values.flip(-1)
    ranks = (first + last).double() / 2
    return torch.empty_like(ranks).scatter(-1, order, ranks)


def _joined(graph: Tensor) -> Tensor:
    """[..., D, D] bool, from a symmetric graph: whether two patches are in one of its connected components."""
    reached = graph | torch.eye(graph.shape[-1], dtype=torch.bool, device=graph.device)
    while True:  # twice as far each time
        paths = reached.float()
        further = paths @ paths > 0
        if torch.equal(further, reached):
            return reached
        reached = further


def _adjusted_rand_index(true_DD: Tensor, found: Tensor) -> Tensor:
    """Agreement of partitions, given as who is with whom, over pairs of patches (Hubert and Arabie 1985)."""
    num_patches = true_DD.shape[-1]
    num_pairs = num_patches * (num_patches - 1) / 2
    both, true, own = ((same.double().sum((-2, -1)) - num_patches) / 2 for same in (true_DD & found, true_DD, found))
    by_chance = true * own / max(num_pairs, 1)
    best = (true + own) / 2
    # Only where all patches are alone, or all together, in both: then they agree.
    return torch.where(best == by_chance, 1.0, (both - by_chance) / (best - by_chance))


def _rows_and_columns(grid_size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each patch, row by row."""
    rows, cols = grid_size
    every_row, every_col = torch.arange(rows, device=device), torch.arange(cols, device=device)
    return every_row.repeat_interleave(cols), every_col.repeat(rows)
