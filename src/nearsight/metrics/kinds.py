"""What kind of head it is: where at least half of its attention goes, beyond what uniform attention gives.

A share alone says little: on an 8×8 grid uniform attention pays 2 % to the own patch and 44 % to the image's edge. So
each share is put between the two: 0 is what uniform attention gives, 1 is all of the attention. A head that does one
thing for a part λ of its attention, and has uniform attention for the rest, then has exactly λ. From one half on a head
is called after the thing: it does it more than it does not.

Shape suffixes: N tokens (prefix tokens first, then patches row by row), P patches; leading axes are carried through.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from nearsight.lazy import np, torch
from nearsight.metrics.attention import (
    attention_on_grid,
    check_grid,
    mass_or_one,
    mean_over_looking,
    next_patch_distance,
    to_float64,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

ENOUGH = 0.5
"""From there on a head is called after what it does: it does this more than it does not."""
FEW = 0.02
"""Of the patches: so many may be sinks, rounded up. Darcet et al. (2024) find some 2 % of patches to be outliers."""
_ROUNDING = 1e-9
"""Sums of many weights are rounded: a share that is almost one half counts as one half."""
KINDS = {
    "sink": ("sink",),
    "own patch": ("own",),
    "neighbour": ("near",),
    "row/column": ("row", "column"),
    "edge": ("edge",),
    "global": ("breadth",),
}
"""The kinds of heads → which of `KindShares` make a head one; the first that fits counts. Sinks come before all others,
because these are about what is left for the patches; the others from the smallest place to the largest."""
OTHER = "other"
"""None of them: mixed, or by content."""


class KindShares(NamedTuple):
    """Per head. 0 is uniform attention and 1 all of it, but for `breadth`; NaN where there is no such place, or nothing
    but it."""

    own: Tensor
    """On the query's own patch, of the attention on patches."""
    near: Tensor
    """On the up to 3×3 patches around it and itself, of the attention on patches."""
    row: Tensor
    """On patches of its row, of the attention on patches."""
    column: Tensor
    """On patches of its column, of the attention on patches."""
    edge: Tensor
    """On the outermost patches of the image, of the attention on patches."""
    sink: Tensor
    """On tokens that are not patches, and on those 2 % of the patches that all queries together attend to most: of all
    attention."""
    breadth: Tensor
    """The number of patches in use, exp(entropy): 0 is one patch, 1 is all of them alike; the mean over queries."""


def kind_shares(attn: Tensor, grid_size: tuple[int, int], *, num_prefix_tokens: int = 1) -> KindShares:
    """How much of each kind a head is, from maps after the softmax, [..., heads, N, N] → [..., heads] in float64.

    Queries that are not patches, or pay no attention to patches, are left out, as in `attention_distance`.
    """
    patch_attn = attention_on_grid(attn, grid_size, num_prefix_tokens)
    rows, cols = grid_size
    row, col = (place.flatten() for place in torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij"))
    down_PP, right_PP = (row[:, None] - row).abs(), (col[:, None] - col).abs()
    steps_PP, num_patches = torch.maximum(down_PP, right_PP), rows * cols
    edge_PP = edge_patches(grid_size).expand(num_patches, -1)
    places = {
        "own": steps_PP == 0,
        "near": steps_PP <= 1,
        "row": down_PP == 0,
        "column": right_PP == 0,
        "edge": edge_PP,
    }
    mass = patch_attn.sum(-1)
    share = patch_attn / mass_or_one(mass).unsqueeze(-1)
    found = {}
    for name, place_PP in places.items():
        on_it_PP = place_PP.to(share)
        uniform = mean_over_looking(on_it_PP.mean(-1).expand(mass.shape), mass)
        found[name] = beyond(mean_over_looking((share * on_it_PP).sum(-1), mass), uniform)
    few = num_sinks(num_patches)
    on_few = patch_attn.sum(-2).topk(few).values.sum(-1) / (mass != 0).sum(-1)
    on_others = mean_over_looking(to_float64(attn[..., num_prefix_tokens:, :num_prefix_tokens]).sum(-1), mass)
    in_use = (-torch.xlogy(share, share).sum(-1)).exp()
    return KindShares(
        **found,
        sink=beyond(on_few + on_others, few / num_patches),
        breadth=mean_over_looking((in_use - 1) / (num_patches - 1 or math.nan), mass),
    )


def head_kinds(shares: KindShares | Mapping[str, ArrayLike]) -> NDArray[np.str_]:
    """The kind of each head, by name; "" for a head without any of the numbers, such as one that does not exist."""
    given = shares._asdict() if isinstance(shares, KindShares) else shares
    numbers = {name: np.asarray(given[name], dtype=np.float64) for name in KindShares._fields}
    known = np.logical_or.reduce([np.isfinite(values) for values in numbers.values()])
    kinds = np.where(known, OTHER, "").astype(f"<U{max(map(len, (*KINDS, OTHER)))}")
    for kind, names in reversed(KINDS.items()):
        with np.errstate(invalid="ignore"):
            kinds[np.logical_or.reduce([numbers[name] >= ENOUGH - _ROUNDING for name in names])] = kind
    return kinds


def beyond(share: Tensor, uniform: Tensor | float) -> Tensor:
    """A share between what uniform attention gives, 0, and all of it, 1; NaN where uniform attention gives all."""
    left = torch.as_tensor(1.0 - uniform, dtype=share.dtype, device=share.device)
    return (share - uniform) / left.where(left > _ROUNDING, math.nan)


def num_sinks(num_patches: int) -> int:
    """How many of so many patches are few."""
    return math.ceil(FEW * num_patches)


def edge_patches(grid_size: tuple[int, int]) -> Tensor:
    """Which patches are at the edge of the image, bool [P]: of its first and last row and column."""
    check_grid(grid_size)
    rows, cols = grid_size
    is_edge = torch.ones(rows, cols, dtype=torch.bool)
    is_edge[1:-1, 1:-1] = False
    return is_edge.flatten()


def edge_attention_distance(grid_size: tuple[int, int], *, nearest: bool = False) -> float:
    """The MAD of heads that look for the image's edge: all queries attend to all of its patches alike or, with
    `nearest`, each to the one that is nearest.

    On an 8×8 grid 0.479 and 0.088: an edge-seeking head may have a distance like uniform attention's (0.418), or below
    that of a head which looks at its 3×3 patches (0.103). By MAD alone it cannot be told from them.
    """
    rows, cols = grid_size
    is_edge_P = edge_patches(grid_size)
    place_P2 = torch.cartesian_prod(torch.arange(rows).double(), torch.arange(cols).double())
    distance_PE = torch.cdist(place_P2, place_P2[is_edge_P], compute_mode="donot_use_mm_for_euclid_dist")
    distance_PE = distance_PE * next_patch_distance(grid_size) if rows * cols > 1 else distance_PE
    return float((distance_PE.amin(-1) if nearest else distance_PE.mean(-1)).mean())
