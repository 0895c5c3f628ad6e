"""Distance and entropy of attention, some queries at a time.

Both need only three sums beside the softmax: with weights w and their logarithms s, Σ w, Σ w·d and Σ w·s over the
patches. So a tile of queries is all that is ever in memory, whatever the number of tokens, and patches are renormalised
by never looking at the prefix tokens.

Shape suffixes: B images, H heads, T queries of a tile, P patches.
"""

import math

import torch
from torch import Tensor

from nearsight.lens.capture import Attention
from nearsight.metrics import grid_distances

_TILE_BYTES = 2**25
"""Of one float64 tensor of a tile; a few of them are alive at a time."""


def reduce_attention(
    attention: Attention, grid_size: tuple[int, int], num_prefix_tokens: int, *, tile_bytes: int = _TILE_BYTES
) -> tuple[Tensor, Tensor]:
    """(mean attention distance, normalised entropy) of every image and head: [B, H] float64.

    The numbers of `nearsight.metrics.attention_distance` and `attention_entropy`, without their maps. A NaN anywhere in
    a head's attention is a NaN here.
    """
    num_patches = attention.num_tokens - num_prefix_tokens
    tile = max(1, tile_bytes // (8 * attention.num_maps * attention.num_tokens))
    rows = range(0, num_patches, tile)
    sums = [_tile_sums(attention, grid_size, num_prefix_tokens, row, min(row + tile, num_patches)) for row in rows]
    distance, entropy, looking = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    most = math.log(num_patches) if num_patches > 1 else 1.0
    return distance / looking, entropy / looking / most


def _tile_sums(
    attention: Attention, grid_size: tuple[int, int], prefix: int, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the queries of a tile that look at any patch: distances, entropies, and how many they are."""
    log_BHTP = attention.log_weights(prefix + start, prefix + stop)[..., prefix:]
    # Relative to the row's largest, so that a query which gives all but nothing to patches is still seen exactly.
    largest_BHT1 = log_BHTP.amax(-1, keepdim=True)
    looking_BHT = largest_BHT1.squeeze(-1) != -math.inf
    log_BHTP = log_BHTP - torch.where(looking_BHT.unsqueeze(-1), largest_BHT1, 0.0)
    weight_BHTP = log_BHTP.exp()
    mass_BHT = weight_BHTP.sum(-1)
    distance_TP = grid_distances(grid_size, start, stop, device=log_BHTP.device)
    distance_BHT = (weight_BHTP * distance_TP).sum(-1) / mass_BHT
    # 0 · log 0 is 0: masked keys have no share in the entropy.
    weighted_log_BHT = torch.where(weight_BHTP == 0, 0.0, weight_BHTP * log_BHTP).sum(-1)
    entropy_BHT = (mass_BHT.log() - weighted_log_BHT / mass_BHT).clamp(min=0)

    def over_looking(values_BHT: Tensor) -> Tensor:
        return torch.where(looking_BHT, values_BHT, 0.0).sum(-1)

    return over_looking(distance_BHT), over_looking(entropy_BHT), looking_BHT.sum(-1)
