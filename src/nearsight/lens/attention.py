"""One attention computation as a model did it, before anything is known about where its tokens lie.

Shape suffixes: N queries, M keys, d head size. Leading axes (images, windows, heads, in whatever order the model has
them) are the model's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.locat.gaussian import Grid, Shape, bias_between_tokens, near_between_tokens


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
    value: Tensor | None = None
    """[..., M, v], with the leading axes of the queries; needed only to compute another attention."""
    finish: "Finish | None" = None
    """What the call returns for what its heads give; None: that itself."""

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype


@dataclass(frozen=True)
class ExplicitAttention:
    """Weights that the model holds in memory, just before they multiply the values."""

    weights: Tensor
    operand: int
    """Which factor of the product the weights are."""

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype


Attention = FusedAttention | ExplicitAttention


@dataclass(frozen=True)
class Finish:
    """What `multi_head_attention_forward` makes of its heads' outputs."""

    project: Callable[[Tensor], Tensor]
    needs_weights: bool
    average_weights: bool

    def __call__(self, heads_BHNd: Tensor, weights_BHNM: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if weights_BHNM is not None and self.average_weights:
            weights_BHNM = weights_BHNM.mean(1)
        return self.project(heads_BHNd), weights_BHNM


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
        times = query.shape[-3] // key.shape[-3]
        key, value = (tokens.repeat_interleave(times, dim=-3) for tokens in (key, value))
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (tokens.expand(*lead, *tokens.shape[-2:]) for tokens in (query, key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return FusedAttention(query, key, float(factor), attn_mask, is_causal, value)


def of_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    precision: Tensor,
    strength: Tensor,
    grid: Grid,
    *,
    scale: float,
    kernel: Shape,
    largest_half_square: float,
    reach_BH: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> FusedAttention:
    """`nearsight.locat`'s attention, whose bias is made here to be seen."""
    bias = bias_between_tokens(precision, strength, grid, kernel=kernel, largest_half_square=largest_half_square)
    if reach_BH is not None:
        bias = bias.masked_fill(~near_between_tokens(reach_BH, grid), -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask, -math.inf)
    elif mask is not None:
        bias = bias + mask
    return FusedAttention(query, key, scale, bias, value=value)


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
    swapped = query.dim() == 3 and module.batch_first
    value = key if value is None else value
    if swapped:
        query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))
    found = of_multihead_function(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        module.out_proj.weight,
        module.out_proj.bias,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=not module._qkv_same_embed_dim,
        q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight,
        v_proj_weight=module.v_proj_weight,
        average_attn_weights=average_attn_weights,
    )
    if not swapped:
        return found
    assert found.finish is not None
    project = found.finish.project
    return replace(found, finish=replace(found.finish, project=lambda heads: project(heads).transpose(0, 1)))


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
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> FusedAttention:
    """`multi_head_attention_forward`, as a function mode sees it: queries and keys are [N, B, C] or [N, C]."""
    unbatched = query.dim() == 2
    if unbatched:
        query, key, value = (tokens.unsqueeze(1) for tokens in (query, key, value))
    query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))
    if use_separate_proj_weight:
        assert q_proj_weight is not None
        assert k_proj_weight is not None
        assert v_proj_weight is not None
        query_weight, key_weight, value_weight = q_proj_weight, k_proj_weight, v_proj_weight
    else:
        assert in_proj_weight is not None
        query_weight, key_weight, value_weight = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    query, batch = F.linear(query, query_weight, biases[0]), len(query)

    def keys_of(
        tokens: Tensor, weight: Tensor, bias: Tensor | None, given: Tensor | None, more: Tensor | None
    ) -> Tensor:
        if given is not None:
            tokens = given.unflatten(0, (batch, num_heads)).transpose(1, 2).flatten(2)
        else:
            tokens = F.linear(tokens, weight, bias)
        if more is not None:
            tokens = torch.cat([tokens, more.expand(batch, 1, -1)], dim=1)
        return F.pad(tokens, (0, 0, 0, 1)) if add_zero_attn else tokens

    key = keys_of(key, key_weight, biases[1], static_k, bias_k)
    value = keys_of(value, value_weight, biases[2], static_v, bias_v)
    query, key, value = (tokens.unflatten(-1, (num_heads, -1)).transpose(1, 2) for tokens in (query, key, value))
    mask = _multihead_mask(batch, num_heads, key.shape[-2], key_padding_mask, attn_mask)

    def project(heads_BHNd: Tensor) -> Tensor:
        output = F.linear(heads_BHNd.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
        return output.squeeze(1) if unbatched else output

    finish = Finish(project, need_weights, average_attn_weights)
    return FusedAttention(query, key, 1 / math.sqrt(query.shape[-1]), mask, value=value, finish=finish)


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
