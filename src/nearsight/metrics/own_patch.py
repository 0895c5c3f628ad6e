"""Heads that stay on the query's own patch: what a MAD alone says of the share that stays, and of the entropy.

At least how much stays follows from the distance of the next patch; how much exactly, from where the rest leaks to.

Two places where the leak may go: evenly to all other patches, or evenly to the patches next to the query. Of a given
MAD, the first leaves far more on the own patch, since what it leaks goes far; so the two predict different entropies,
and a measured one can tell them apart. Both are exact on the grid, edges and corners included. (Evenly to all patches,
the own one too, is no third place: what comes back is counted as kept.)
"""

import math
from typing import Literal, NamedTuple

from nearsight.metrics.attention import check_grid, next_patch_distance, uniform_attention_distance

Leak = Literal["everywhere", "to neighbours"]
"""Where the rest goes: evenly to all other patches, or evenly to those above, below, left and right of the query."""
ROUNDING = 1e-12
"""By which a head that keeps nothing may seem to leak more than all."""


def least_share_on_itself(distance: float, grid_size: tuple[int, int]) -> float:
    """The least share of its attention on patches that a head of this MAD pays to the query's own patch.

    The rest goes to patches at least as far as the next one. So a head with a MAD of 0.01 on an 8×8 grid is an
    own-patch head: nine tenths of its attention or more stay on the query's own patch.
    """
    return max(0.0, 1 - distance / next_patch_distance(grid_size))


class OwnPatchHead(NamedTuple):
    """NaN where no such head has this MAD."""

    share: float
    """Of the attention on patches: what the query's own patch gets."""
    entropy: float
    """Divided by log P, as `attention_entropy`."""


def own_patch_head(distance: float, grid_size: tuple[int, int], *, leak: Leak) -> OwnPatchHead:
    """The head of this MAD all of whose queries keep the same share to themselves."""
    check_grid(grid_size)
    num_patches = math.prod(grid_size)
    if num_patches == 1:  # which has nowhere to leak to
        return OwnPatchHead(1.0, 0.0) if distance == 0 else OwnPatchHead(math.nan, math.nan)
    if leak == "everywhere":
        # The mean over the others alone: uniform attention has itself among all patches.
        farthest = uniform_attention_distance(grid_size) * num_patches / (num_patches - 1)
        log_choices = math.log(num_patches - 1)
    else:
        farthest = next_patch_distance(grid_size)
        log_choices = _mean_log_neighbours(grid_size)
    leaked = distance / farthest
    if not 0 <= leaked <= 1 + ROUNDING:
        return OwnPatchHead(math.nan, math.nan)
    leaked = min(leaked, 1.0)
    kept = 1 - leaked
    entropy = leaked * log_choices - _times_log(kept) - _times_log(leaked)
    return OwnPatchHead(kept, entropy / math.log(num_patches))


def _mean_log_neighbours(grid_size: tuple[int, int]) -> float:
    """The mean over patches of the logarithm of how many patches are next to it."""
    along_rows, along_cols = ([min(place, 1) + min(side - 1 - place, 1) for place in range(side)] for side in grid_size)
    logs = [math.log(up_down + left_right) for up_down in along_rows for left_right in along_cols]
    return math.fsum(logs) / len(logs)


def _times_log(share: float) -> float:
    return share * math.log(share) if share else 0.0
