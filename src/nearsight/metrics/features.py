"""What tokens are like, beside where they look: coherence with neighbours, pull towards CLS, similarity of layers.

S2 is "Locality-Attending Vision Transformer" (arXiv 2603.04892). Shape suffixes: B images, N tokens (prefix tokens
first), P patches row by row, D features, n examples; L and K numbers of representations.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.errors import InputError, check_at_least
from nearsight.metrics.attention import check_grid, to_float64

_NEIGHBOURS = ((0, 1), (1, -1), (1, 0), (1, 1))
"""Half of the 8 offsets; the other half are the same pairs seen from the other patch."""
FAR = 6
"""Steps between patches from which on they are distant: as in iREPA, whose grids are 16×16."""
_ROUNDING = 1e-14
"""Of sums of float64, relative to what is summed."""
_LAST_BITS = 4
"""By how many units of its precision a network's results differ for examples that are the same."""


def locality_score(patches_BPD: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Mean cosine similarity between a patch token and its up to 8 neighbours, per image: [B] float64 (S2 App. F).

    A patch at the border has fewer neighbours, and its mean is over those. High scores mean coherent neighbourhoods,
    or collapsed tokens: `local_distant_similarity` and `patch_cls_similarity` show which. A single patch has no
    neighbours, and its score is NaN.
    """
    rows, cols = _check_patches(patches_BPD, grid_size)
    tokens = F.normalize(to_float64(patches_BPD), dim=-1).view(len(patches_BPD), rows, cols, patches_BPD.shape[2])
    total = tokens.new_zeros(tokens.shape[:3])
    count = tokens.new_zeros(rows, cols)
    for down, right in _NEIGHBOURS:
        here = (..., slice(0, rows - down), slice(max(-right, 0), cols - max(right, 0)))
        there = (..., slice(down, rows), slice(max(right, 0), cols - max(-right, 0)))
        similarity = (tokens[(*here, slice(None))] * tokens[(*there, slice(None))]).sum(-1)
        for place in (here, there):
            total[place] += similarity
            count[place] += 1
    return (total / count).mean((1, 2))


class SimilarityByDistance(NamedTuple):
    """Of the patch tokens of each image, all [B]."""

    near: Tensor
    """Mean cosine similarity of patches that share a side."""
    far: Tensor
    """That of patches which are far apart; NaN if none are."""

    @property
    def difference(self) -> Tensor:
        return self.near - self.far


def local_distant_similarity(patches_BPD: Tensor, grid_size: tuple[int, int], *, far: int = FAR) -> Tensor:
    """Local versus distant similarity (LDS) of patch tokens, per image: [B] float64 (Singh et al. 2025, iREPA).

    The mean cosine similarity of patches that share a side less that of patches at least `far` steps apart, where steps
    are counted along rows and columns (the Manhattan distance; arXiv 2512.10794 and its code, with their radii). Where
    all tokens are the same, `locality_score` is 1 and this is 0. NaN on a grid where no patches are so far apart.
    """
    return similarity_by_distance(to_float64(patches_BPD), grid_size, far=far).difference


def similarity_by_distance(
    patches_BPD: Tensor, grid_size: tuple[int, int], *, far: int = FAR, tile_bytes: int = 2**26
) -> SimilarityByDistance:
    """The two sides of `local_distant_similarity`: products in the precision of the tokens, sums in float32 or better;
    so many bytes of a Gram matrix at a time."""
    rows, cols = _check_patches(patches_BPD, grid_size)
    check_at_least("far", far, 1)
    dtype, wide = patches_BPD.dtype, torch.promote_types(patches_BPD.dtype, torch.float32)
    tokens_BPD = F.normalize(patches_BPD.to(wide), dim=-1).to(dtype)
    num_images, num_patches = tokens_BPD.shape[:2]
    tile = max(1, tile_bytes // (num_images * num_patches * wide.itemsize or 1))
    masks = _pair_masks if tile >= num_patches else _pair_masks.__wrapped__
    sums_2B = torch.zeros(2, num_images, dtype=wide, device=tokens_BPD.device)
    for start in range(0, num_patches, tile):
        stop = min(start + tile, num_patches)
        # Each pair once: with all patches that come after the first of the tile.
        gram_BTP = (tokens_BPD[:, start:stop] @ tokens_BPD[:, start:].mT).to(wide)
        sums_2B += masks(rows, cols, far, start, stop, wide, tokens_BPD.device) @ gram_BTP.flatten(1).T
    counts = pair_counts(rows, cols, far)
    near, distant = (sums / (count or math.nan) for sums, count in zip(sums_2B, counts, strict=True))
    return SimilarityByDistance(near, distant)


@lru_cache(maxsize=16)
def _pair_masks(
    rows: int, cols: int, far: int, start: int, stop: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """1 for pairs that share a side, and for those that are far apart: [2, T · P], for the patches from `start` to
    `stop` and all from `start` on, each pair once."""
    place_P = torch.arange(start, rows * cols, device=device)
    row_P, col_P = place_P // cols, place_P % cols
    here = slice(0, stop - start)
    steps_TP = (row_P[here, None] - row_P).abs() + (col_P[here, None] - col_P).abs()
    is_after_TP = place_P[here, None] < place_P
    return torch.stack([is_after_TP & (steps_TP == 1), is_after_TP & (steps_TP >= far)]).to(dtype).flatten(1)


@lru_cache(maxsize=64)
def pair_counts(rows: int, cols: int, far: int = FAR) -> tuple[int, int]:
    """How many pairs of patches share a side, and how many are so far apart."""
    # By offsets, each of which fits so many times; those to the other side are the same pairs.
    down, right = torch.meshgrid(torch.arange(rows), torch.arange(1 - cols, cols), indexing="ij")
    is_half = (down > 0) | (right > 0)
    fits, steps = (rows - down) * (cols - right.abs()), down + right.abs()
    return int(fits[is_half & (steps == 1)].sum()), int(fits[is_half & (steps >= far)].sum())


def _check_patches(patches_BPD: Tensor, grid_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the grid, if these are its patches."""
    check_grid(grid_size)
    rows, cols = grid_size
    if patches_BPD.dim() != 3 or patches_BPD.shape[1] != rows * cols:
        raise InputError(
            f"patches of shape [B, {rows * cols}, D] are needed for a {rows}×{cols} grid, not {list(patches_BPD.shape)}"
        )
    return rows, cols


def patch_cls_similarity(tokens_BND: Tensor, num_prefix_tokens: int = 1) -> Tensor:
    """Mean cosine similarity between the patch tokens and CLS, the first token, per image: [B] float64 (S2 App. F)."""
    if tokens_BND.dim() != 3 or not 1 <= num_prefix_tokens < tokens_BND.shape[1]:
        raise InputError(
            f"tokens [B, N, D] with CLS among {num_prefix_tokens} prefix tokens and at least one patch are needed, "
            f"not {list(tokens_BND.shape)}"
        )
    tokens = F.normalize(to_float64(tokens_BND), dim=-1)
    return (tokens[:, num_prefix_tokens:] @ tokens[:, 0].unsqueeze(-1)).squeeze(-1).mean(1)


def linear_cka(x_nD: Tensor, y_nD: Tensor, *, unbiased: bool = False) -> Tensor:
    """Linear centred kernel alignment of two representations of the same n examples, a float64 scalar.

    HSIC(K, L) / √(HSIC(K, K) · HSIC(L, L)) with K = XXᵀ, L = YYᵀ and HSIC the Hilbert–Schmidt independence criterion
    (Kornblith et al. 2019). `unbiased` uses the estimator of Song et al. (2012), whose expectation does not grow with
    the number of features and which can be averaged over minibatches (Nguyen et al. 2021); it needs at least 4 examples
    and may be slightly negative. NaN if in one of the two all examples are equal, up to the last bits of its precision.
    """
    if x_nD.dim() != 2 or y_nD.dim() != 2 or len(x_nD) != len(y_nD):
        raise InputError(f"two matrices of equally many rows are needed, not {list(x_nD.shape)} and {list(y_nD.shape)}")
    if len(x_nD) < (4 if unbiased else 2):
        raise InputError(f"{len(x_nD)} examples are too few; at least {4 if unbiased else 2} are needed")
    x, y = (centred(features, features.dtype) for features in (x_nD, y_nD))
    if unbiased:
        gram_x, gram_y = (linear_gram(features).unsqueeze(0) for features in (x, y))
        cross = unbiased_hsic(gram_x, gram_y).squeeze()
        own_x, own_y = (own_unbiased_hsic(gram).squeeze() for gram in (gram_x, gram_y))
    else:
        # ‖XᵀY‖² equals the trace of KL and needs no n × n matrix.
        cross, own_x, own_y = ((a.T @ b).square().sum() for a, b in ((x, y), (x, x), (y, y)))
    size_x, size_y = (torch.where(own > 0, own, torch.nan).sqrt() for own in (own_x, own_y))
    return cross / (size_x * size_y)


def centred(features_nD: Tensor, dtype: torch.dtype) -> Tensor:
    """The features less their mean over examples, float64: exactly 0 if all examples are equal.

    They are if they differ by no more than the last bits of `dtype`, which the features were computed in. What is left
    of equal numbers after their mean was subtracted is rounding, and that would pass for a representation of its own.
    """
    features_nD = to_float64(features_nD)
    # Whole numbers are exact. Half precision counts as float32: by its own, a few features that are large and constant,
    # as ViTs have them, would hide all others.
    precision = torch.finfo(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64).eps
    # From the first example: of equal ones that is exact.
    equal = (features_nD - features_nD[0]).norm() <= _LAST_BITS * precision * features_nD.norm()
    return torch.where(equal, 0.0, features_nD - features_nD.mean(0))


def linear_gram(centred_nD: Tensor) -> Tensor:
    """[n, n], with zeros on the diagonal, as the unbiased estimator wants it.

    HSIC does not depend on the features' mean. The sums that it is the difference of do, and lose all digits to a
    large one, so features are centred first.
    """
    gram_nn = centred_nD @ centred_nD.T
    return gram_nn - torch.diag(gram_nn.diag())


def unbiased_hsic(a_Lnn: Tensor, b_Knn: Tensor) -> Tensor:
    """The unbiased estimator of Song et al. (2012), Eq. 5, for all pairs of `linear_gram`: [L, K]."""
    n = a_Lnn.shape[-1]
    products = a_Lnn.flatten(1) @ b_Knn.flatten(1).T
    sums = torch.outer(a_Lnn.sum((1, 2)), b_Knn.sum((1, 2))) / ((n - 1) * (n - 2))
    rows = a_Lnn.sum(1) @ b_Knn.sum(1).T * (2 / (n - 2))
    return (products + sums - rows) / (n * (n - 3))


def own_unbiased_hsic(a_Lnn: Tensor) -> Tensor:
    """Of each with itself, [L]: 0 if that is only the rounding error of the sums it is the difference of."""
    own_L, n = unbiased_hsic(a_Lnn, a_Lnn).diag(), a_Lnn.shape[-1]
    rounding_L = _ROUNDING * a_Lnn.square().sum((1, 2)) / (n * (n - 3))
    return torch.where(own_L.abs() > rounding_L, own_L, 0.0)
