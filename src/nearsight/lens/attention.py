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

from nearsight.locat.gaussian import Grid, Kernel, bias_between_tokens


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


def of_multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> FusedAttention:
    """`nn.MultiheadAttention`, by the arguments of its own forward, which can take a path that no function mode sees.

    Queries and keys are projected a second time, from the weights the module uses.
    """
    if query.dim() == 3 and module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    return of_multihead_function(
        query,
        key,
        key if value is None else value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        use_separate_proj_weight=not module._qkv_same_embed_dim,
        q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight,
    )


def of_multihead_function(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    *_output: Any,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    **_settings: Any,
) -> FusedAttention:
    """`multi_head_attention_forward`, as a function mode sees it: queries and keys are [N, B, C] or [N, C]."""
    if query.dim() == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    query, key = query.transpose(0, 1), key.transpose(0, 1)
    query_weight, key_weight = q_proj_weight, k_proj_weight
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        query_weight, key_weight, _ = in_proj_weight.chunk(3)
    assert query_weight is not None
    assert key_weight is not None
    biases = (None, None) if in_proj_bias is None else in_proj_bias.chunk(3)[:2]
    query, batch = F.linear(query, query_weight, biases[0]), len(query)
    if static_k is not None:
        key = static_k.unflatten(0, (batch, num_heads)).transpose(1, 2).flatten(2)
    else:
        key = F.linear(key, key_weight, biases[1])
    if bias_k is not None:
        key = torch.cat([key, bias_k.expand(batch, 1, -1)], dim=1)
    if add_zero_attn:
        key = torch.cat([key, key.new_zeros(batch, 1, key.shape[-1])], dim=1)
    query, key = (tokens.unflatten(-1, (num_heads, -1)).transpose(1, 2) for tokens in (query, key))
    mask = _multihead_mask(batch, num_heads, key.shape[-2], key_padding_mask, attn_mask)
    return FusedAttention(query, key, 1 / math.sqrt(query.shape[-1]), mask)


def _multihead_mask(
    batch: int, num_heads: int, num_keys: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> Tensor | None:
    """Both masks as one that is added to logits [B, H, N, M]. True means hidden here, unlike in SDPA."""
    masks = []
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(batch, 1, 1, -1))
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, (batch, num_heads)) if attn_mask.dim() == 3 else attn_mask)
    total: Tensor | None = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)
        mask = F.pad(mask, (0, num_keys - mask.shape[-1]))  # bias_k and add_zero_attn are never hidden
        total = mask if total is None else total + mask
    return total
