"""Patch representation refinement (S2 §4.2): one more attention before pooling, without weights and without residual.

Shape suffixes: B images, N tokens, C channels, R rows, c columns of patches.
"""

from typing import Any

import timm.layers
import torch.nn.functional as F
from timm.layers import SelectAdaptivePool2d
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

from nearsight.errors import InputError


def refine(tokens_BNC: Tensor, num_heads: int) -> Tensor:
    """softmax(x xᵀ/√head size) x of each head (Eq. 11)."""
    heads_BHNd = tokens_BNC.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    refined_BHNd = F.scaled_dot_product_attention(heads_BHNd, heads_BHNd, heads_BHNd)
    return refined_BHNd.transpose(1, 2).flatten(2)


class RefinedPool(nn.Module):
    """Refinement and then pooling, for models that pool tokens [B, N, C]: their `attn_pool`.

    Args:
        pool: as timm's `global_pool`: "token", "avg", "avgmax", "max", or "" for all refined tokens.
        num_prefix: tokens that are not patches.
        include_prefix: whether they count for "avg", "avgmax" and "max".
        late_norm: the model's norm, where it has that after its pooling. It then comes here, before refinement, and
            what was pooled passes it unchanged. It stays the model's module.
    """

    def __init__(
        self, num_heads: int, *, pool: str, num_prefix: int, include_prefix: bool, late_norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.num_heads, self.pool = num_heads, pool
        self.num_prefix, self.include_prefix = num_prefix, include_prefix
        # In a tuple it is not a child of this module, so that its weights have one name.
        self._late_norm = () if late_norm is None else (late_norm,)
        if late_norm is not None:
            late_norm.register_forward_hook(self._leave_pooled)

    @property
    def pre_norm(self) -> nn.Module:
        """What normalises tokens that the model has not normalised."""
        return self._late_norm[0] if self._late_norm else nn.Identity()

    def forward(self, tokens_BNC: Tensor) -> Tensor:
        pooled: Tensor = global_pool_nlc(
            self.refined(tokens_BNC),
            pool_type=self.pool,
            num_prefix_tokens=self.num_prefix,
            reduce_include_prefix=self.include_prefix,
        )
        return pooled

    def refined(self, tokens_BNC: Tensor) -> Tensor:
        """All tokens, [B, N, C]."""
        return refine(self.pre_norm(tokens_BNC), self.num_heads)

    def retire(self) -> None:
        """Let the model normalise after its pooling again."""
        self._late_norm = ()

    def _leave_pooled(self, norm: nn.Module, inputs: tuple[Tensor, ...], normed: Tensor) -> Tensor:
        is_pooled = inputs[0].dim() == 2  # tokens have three
        return inputs[0] if self._late_norm and is_pooled else normed


class RefinedMapPool(SelectAdaptivePool2d):  # type: ignore[misc]  # timm carries no types
    """Refinement and then pooling, for models that pool maps: their head's `global_pool`, by its class."""

    num_heads: int
    channels_first = False
    """Whether the maps that come are [B, C, R, c], and not [B, R, c, C]."""

    def forward(self, maps: Tensor) -> Tensor:
        if self.channels_first:
            pooled: Tensor = super().forward(self.refined(maps.movedim(1, -1)).movedim(-1, 1))
        else:
            pooled = super().forward(self.refined(maps))
        return pooled

    def refined(self, map_BRcC: Tensor) -> Tensor:
        """[B, R, c, C]."""
        refined_BRcC: Tensor = refine(map_BRcC.flatten(1, 2), self.num_heads).unflatten(1, map_BRcC.shape[1:3])
        return refined_BRcC


REFINEMENTS: tuple[type[nn.Module], ...] = (RefinedPool, RefinedMapPool)
"""Modules whose attention is refinement, and not a layer of the model: ours, and timm's own where that timm has one."""
if hasattr(timm.layers, "AttentionPoolPrr"):
    REFINEMENTS += (timm.layers.AttentionPoolPrr,)


def refined_map(model: Any, images: Tensor) -> Tensor:
    """The refined patches of images as a map [B, C, R, c], from a model to which LocAt was added with refinement."""
    pool = next((module for module in model.modules() if isinstance(module, RefinedPool | RefinedMapPool)), None)
    if pool is None:
        raise InputError(f"{type(model).__name__} does not refine its patches: add_locat(model, prr=True) first")
    features: Tensor = model.forward_features(images)
    if isinstance(pool, RefinedMapPool):
        return pool.refined(features.movedim(1, -1) if pool.channels_first else features).movedim(-1, 1)
    refined_BPC = pool.refined(features)[:, pool.num_prefix :]
    rows_cols = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    refined_BCRc: Tensor = refined_BPC.transpose(1, 2).unflatten(2, rows_cols)
    return refined_BCRc
