"""Attention to patches, sorted into bins by where the query and the key are.

Shape suffixes: B images, W windows, H heads, T queries of a tile, M keys, X bins.
"""

import math

from torch import Tensor

from nearsight.lens.stream import Tile


def patch_shares(tile: Tile) -> tuple[Tensor, Tensor]:
    """Attention renormalised over the patches [B, W, H, T, M], 0 for queries that are not looking; and which are, of
    those that are patches themselves [B, W, H, T]."""
    others_WM = tile.keys_WM2[..., 0].isnan()
    log_BWHTM = tile.log_weights_BWHTM.masked_fill(others_WM[:, None, None, :], -math.inf)
    looking_BWHT = (log_BWHTM.amax(-1) != -math.inf) & tile.queries_WT2[:, None, :, 0].isfinite()
    return log_BWHTM.softmax(-1).masked_fill(~looking_BWHT[..., None], 0.0), looking_BWHT


def sums_by_bin(share_BWHTM: Tensor, bins_WTM: Tensor, num_bins: int) -> Tensor:
    """The attention in each bin [B, H, X]."""
    batch, _, heads = share_BWHTM.shape[:3]
    # Pairs of tokens first: then each is one row to add, of all images and heads.
    pairs = share_BWHTM.permute(1, 3, 4, 0, 2).reshape(-1, batch * heads)
    sums: Tensor = pairs.new_zeros(num_bins, batch * heads).index_add_(0, bins_WTM.flatten(), pairs)
    by_head: Tensor = sums.T.unflatten(0, (batch, heads))
    return by_head
