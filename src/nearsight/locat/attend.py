"""The one entry to attention with a local bias: the fused kernel where there is one, otherwise plain torch.

To code that watches torch's functions (`torch.overrides`) it is one function, as `scaled_dot_product_attention` is.

Shape suffixes: B images, H heads, N tokens, P patches, d head size, T queries of a tile, R rows, C columns, 2 (by row,
by column).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from nearsight.locat import kernels
from nearsight.locat.gaussian import (
    Grid,
    Shape,
    bias_between_patches,
    bias_between_tokens,
    near_between_tokens,
    squared_steps,
)

TILE_BYTES = 2**28
"""Of the bias of one tile; a few tensors as large are alive at a time."""
CACHED_TILE_BYTES = 2**24
"""The same on a CPU where no gradient is needed, so that no tile is computed again: it stays in the cache …"""
FEWEST_QUERIES = 128
"""… but a matrix product needs some rows to be fast."""


def attend(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    precision_BHP2: Tensor,
    strength_BHP: Tensor,
    grid: Grid,
    *,
    scale: float,
    kernel: Shape = "gaussian",
    largest_half_square: float = math.inf,
    reach_BH: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """[B, H, N, d]: softmax(scale · q kᵀ + S + mask) v with S[p, t] = strength_p · kernel of the distance from p to t.

    Args:
        precision_BHP2: ½/(variance + EPS) of each query patch, along rows and along columns.
        strength_BHP: α of each query patch.
        largest_half_square: what ½Δ² along an axis is clamped at.
        reach_BH: from a patch to a patch that is farther than this, in grid cells, no attention is paid.
        mask: added to the logits, or where it is False no attention is paid; it expands to [B, H, N, N].
    """
    tensors = (query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP)
    options: dict[str, Any] = {"scale": scale, "kernel": kernel, "largest_half_square": largest_half_square}
    if has_torch_function(tensors):
        options |= {"reach_BH": reach_BH, "mask": mask, "dropout_p": dropout_p}
        seen: Tensor = handle_torch_function(attend, tensors, *tensors, grid, **options)
        return seen
    device = query_BHNd.device.type
    # As `scaled_dot_product_attention` does: a norm gives float32. There is no autocast for "meta" tensors.
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query_BHNd, key_BHNd, value_BHNd = (tokens.to(dtype) for tokens in tensors[:3])
        tensors = (query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP)
    if mask is None and dropout_p == 0 and has_kernels(query_BHNd, grid):
        settings: dict[str, Any] = {"largest_half_square": largest_half_square, "shape": kernel, "reach_BH": reach_BH}
        return kernels.radial_attention(*tensors, grid, scale=scale, **settings)
    if reach_BH is not None:
        hidden = added_mask(near_between_tokens(reach_BH, grid), query_BHNd)
        mask = hidden if mask is None else hidden + added_mask(mask, query_BHNd)
    return blocked_attention(*tensors, grid, **options, mask=mask, dropout_p=dropout_p)


def has_kernels(query_BHNd: Tensor, grid: Grid) -> bool:
    """Whether there are fused kernels for such queries, and keys and values like them, where they are."""
    return query_BHNd.device.type == "cuda" and kernels.is_supported(query_BHNd, grid)


def blocked_attention(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    precision_BHP2: Tensor,
    strength_BHP: Tensor,
    grid: Grid,
    *,
    scale: float,
    kernel: Shape = "gaussian",
    largest_half_square: float = math.inf,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    tile_bytes: int | None = None,
) -> Tensor:
    """The same in plain torch, some queries at a time: for any kernel, device and type of numbers.

    Few tokens are done at once. Of many, each tile of queries is computed again in the backward pass, so that no more
    than one tile of the bias is ever in memory.
    """
    num_tokens = grid.num_tokens
    batch_size, num_heads = query_BHNd.shape[:2]
    if torch.compiler.is_exporting():  # a program for batches of any size has the tiles that one image needs
        batch_size = 1
    bytes_per_query = batch_size * num_heads * num_tokens * precision_BHP2.dtype.itemsize
    num_queries = max(1, (tile_bytes or TILE_BYTES) // max(1, bytes_per_query))
    if tile_bytes is None and query_BHNd.device.type == "cpu" and not torch.is_grad_enabled():
        num_queries = min(num_queries, max(FEWEST_QUERIES, CACHED_TILE_BYTES // max(1, bytes_per_query)))
    if mask is not None:
        mask = added_mask(mask, query_BHNd).expand(*mask.shape[:-2], num_tokens, num_tokens)
    # A transform of this code (torch.vmap) cannot transform a computation that is to be repeated.
    if num_queries >= num_tokens or is_transformed():
        bias_BHNN = bias_between_tokens(
            precision_BHP2, strength_BHP, grid, kernel=kernel, largest_half_square=largest_half_square
        )
        return attend_with_bias(query_BHNd, key_BHNd, value_BHNd, bias_BHNN, mask, scale, dropout_p)

    def of_tile(
        mask_BHTN: Tensor | None,
        query_BHTd: Tensor,
        precision_BHT2: Tensor,
        strength_BHT1: Tensor,
        rows_TR: Tensor,
        cols_TC: Tensor,
    ) -> Tensor:
        bias_BHTP = bias_between_patches(precision_BHT2, strength_BHT1[..., 0], (rows_TR, cols_TC), kernel)
        bias_BHTN = F.pad(bias_BHTP, (grid.num_prefix, 0))
        return attend_with_bias(query_BHTd, key_BHNd, value_BHNd, bias_BHTN, mask_BHTN, scale, dropout_p)

    # Queries that are not patches have a strength of 0.
    steps = squared_steps(grid, largest_half_square, precision_BHP2)
    of_patches = (precision_BHP2, strength_BHP[..., None], *steps)
    of_queries = (query_BHNd, *(F.pad(each, (0, 0, grid.num_prefix, 0)) for each in of_patches))
    outputs = []
    for start in range(0, num_tokens, num_queries):
        tile = [each[..., start : start + num_queries, :] for each in of_queries]
        masked = None if mask is None else mask[..., start : start + num_queries, :]
        if torch.is_grad_enabled():
            outputs.append(checkpoint(of_tile, masked, *tile, use_reentrant=False, preserve_rng_state=dropout_p > 0))
        else:
            outputs.append(of_tile(masked, *tile))
    return torch.cat(outputs, dim=2)


def attend_with_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """With a bias that is in memory."""
    bias = (bias if mask is None else bias + mask).to(query.dtype)
    if is_transformed() and torch.is_grad_enabled():  # torch.vmap knows no gradient of a fused attention's mask
        return F.dropout((scale * query @ key.mT + bias).softmax(-1), dropout_p) @ value
    return F.scaled_dot_product_attention(query, key, value, bias, dropout_p, scale=scale)


def added_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as what is added to the logits."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, -math.inf)


def is_transformed() -> bool:
    """Whether this runs under a transform of `torch.func`."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
