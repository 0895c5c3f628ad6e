"""One attention computation as a model did it, before anything is known about where its tokens lie.

Shape suffixes: N queries, M keys, d head size. Leading axes (images, windows, heads, in whatever order the model has
them) are the model's own.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.locat.bias import Kernel, bias_between_tokens
from nearsight.locat.grid import Grid


@dataclass(frozen=True)
class FusedAttention:
    """Queries and keys of an attention whose weights the model never holds in memory."""

    query: Tensor
    """[..., N, d]."""
    key: Tensor
    """[..., M, d], with the leading axes of the queries."""
    scale: float
    mask: Tensor | None = None
    """Added to the logits, or where it is False no attention is paid: it expands to [..., N, M]."""
    is_causal: bool = False


@dataclass(frozen=True)
class ExplicitAttention:
    """Weights that the model holds in memory, just before they multiply the values."""

    weights: Tensor
    operand: int
    """Which factor of the product the weights are."""


Attention = FusedAttention | ExplicitAttention


def of_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> FusedAttention:
    """`scaled_dot_product_attention` by its documented definition."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    if key.shape[:-2] != query.shape[:-2]:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        query, key = query.expand(*lead, *query.shape[-2:]), key.expand(*lead, *key.shape[-2:])
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return FusedAttention(query, key, float(factor), attn_mask, is_causal)


def of_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    precision: Tensor,
    strength: Tensor,
    grid: Grid,
    *,
    scale: float,
    kernel: Kernel,
    largest_half_square: float,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> FusedAttention:
    """`nearsight.locat`'s attention, whose bias is made here to be seen."""
    bias = bias_between_tokens(precision, strength, grid, kernel=kernel, largest_half_square=largest_half_square)
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask, -math.inf)
    elif mask is not None:
        bias = bias + mask
    return FusedAttention(query, key, scale, bias)


def of_multihead(module: nn.MultiheadAttention, query: Tensor, key: Tensor, **kwargs: Any) -> FusedAttention:
    """`nn.MultiheadAttention`, whose own forward can take a path that no function mode sees.

    Queries and keys are projected a second time, from the weights the module uses. `kwargs` are those of its forward.
    """
    unbatched = query.dim() == 2
    if unbatched:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if module._qkv_same_embed_dim:
        query_weight, key_weight, _ = module.in_proj_weight.chunk(3)
    else:
        query_weight, key_weight = module.q_proj_weight, module.k_proj_weight
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    query, key = F.linear(query, query_weight, biases[0]), F.linear(key, key_weight, biases[1])
    batch = len(query)
    if module.bias_k is not None:
        key = torch.cat([key, module.bias_k.expand(batch, 1, -1)], dim=1)
    if module.add_zero_attn:
        key = torch.cat([key, key.new_zeros(batch, 1, key.shape[-1])], dim=1)
    query, key = (tokens.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for tokens in (query, key))
    mask = _multihead_mask(module, len(query), key.shape[-2], **kwargs)
    return FusedAttention(query, key, 1 / math.sqrt(module.head_dim), mask)


def _multihead_mask(
    module: nn.MultiheadAttention,
    batch: int,
    num_keys: int,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Both masks as one that is added to logits [B, H, N, M]. True means hidden here, unlike in SDPA."""
    masks = []
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(batch, 1, 1, -1))
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, (batch, module.num_heads)) if attn_mask.dim() == 3 else attn_mask)
    total: Tensor | None = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)
        mask = F.pad(mask, (0, num_keys - mask.shape[-1]))  # bias_k and add_zero_attn are never hidden
        total = mask if total is None else total + mask
    return total
