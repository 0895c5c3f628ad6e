"""Backbones of S2's Table 1 that timm has no name for: registers and mixed RoPE at the paper's sizes, and Jumbo.

Jumbo (Fuller et al. 2026) is a ViT whose CLS token is J times as wide as a patch, with an MLP of its own. For attention
the wide token is J tokens of the patches' width; for its MLP, which all layers share, they are joined again. As S2
trains it: J = 6, LayerScale, positions on the patches alone, and a classifier that starts at the class frequencies of a
balanced set.

Shape suffixes: B images, N tokens, D width of a patch, J tokens of the wide one.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import DropPath, Mlp
from timm.models import build_model_with_cfg, eva, generate_default_cfgs, register_model, vision_transformer
from timm.models.vision_transformer import Block, LayerScale, checkpoint_filter_fn
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.models.compact import COMPACT_SETTINGS, CompactViT, draw_weights
from nearsight.models.factory import Initialization
from nearsight.models.reach import Reach, limit_reach


class JumboBlock(Block):  # type: ignore[misc]  # timm carries no types
    """Attention over all tokens, then one MLP for the patches and another for the joined wide token."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_jumbo: int,
        init_values: float | None = None,
        drop_path: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        placed = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, init_values=init_values, drop_path=drop_path, **placed, **kwargs)
        self.num_jumbo = num_jumbo
        width = num_jumbo * dim
        self.norm3 = nn.LayerNorm(width, **placed)
        self.ls3 = LayerScale(width, init_values=init_values, **placed) if init_values else nn.Identity()
        self.drop_path3 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self._shared: tuple[nn.Module, ...] = ()

    def share(self, jumbo_mlp: nn.Module) -> None:
        """Use this MLP. The model owns it: as a child of every block, one weight would have as many names."""
        self._shared = (jumbo_mlp,)  # in a tuple, where a module does not become a child

    def forward(self, x_BND: Tensor, **masks: Any) -> Tensor:
        x_BND = x_BND + self.drop_path1(self.ls1(self.attn(self.norm1(x_BND), **masks)))
        wide, patches = x_BND[:, : self.num_jumbo].flatten(1), x_BND[:, self.num_jumbo :]
        (jumbo_mlp,) = self._shared
        wide = wide + self.drop_path3(self.ls3(jumbo_mlp(self.norm3(wide))))
        patches = patches + self.drop_path2(self.ls2(self.mlp(self.norm2(patches))))
        return torch.cat([wide.unflatten(1, (self.num_jumbo, -1)), patches], dim=1)


class JumboNorm(nn.Module):
    """The final norm: over the joined wide token, and over each patch where something reads the patches."""

    def __init__(self, dim: int, num_jumbo: int, *, with_patches: bool, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_jumbo = num_jumbo
        self.jumbo = nn.LayerNorm(num_jumbo * dim, device=device, dtype=dtype)
        self.patches = nn.LayerNorm(dim, device=device, dtype=dtype) if with_patches else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        wide = self.jumbo(x_BND[:, : self.num_jumbo].flatten(1)).unflatten(1, (self.num_jumbo, -1))
        return torch.cat([wide, self.patches(x_BND[:, self.num_jumbo :])], dim=1)


class JoinedJumbo(nn.Module):
    """The wide token of all tokens, as the classifier reads it: [B, N, D] → [B, J·D]."""

    def __init__(self, num_jumbo: int) -> None:
        super().__init__()
        self.num_jumbo = num_jumbo

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND[:, : self.num_jumbo].flatten(1)


class JumboViT(CompactViT):
    """A ViT with a wide CLS token; from outside it has J prefix tokens.

    Args:
        num_jumbo: J, how many times as wide as a patch.
        jumbo_mlp_ratio: hidden units of the shared MLP per unit of the wide token.
        patch_norm: normalise the final patch tokens, too; nothing reads them unless there is a refinement (LocAt).
        global_pool: "token" reads the wide token, of width J·D; "avg" the mean of the patches.
    """

    def __init__(
        self,
        *,
        num_jumbo: int = 6,
        jumbo_mlp_ratio: float = 4.0,
        patch_norm: bool = False,
        init_values: float | None = 1e-4,
        global_pool: str = "token",
        init: Initialization = "trunc_normal",
        position_std: float = 0.02,
        reach: float | Reach = (),
        **kwargs: Any,
    ) -> None:
        check_at_least("num_jumbo", num_jumbo, 1)
        if global_pool not in ("", "avg", "token"):
            raise InputError(f"global_pool is {global_pool!r}, but Jumbo has 'token', 'avg' and '' (none)")
        _check_unpooled(global_pool, kwargs.get("num_classes", 1000))
        for name, value in (("class_token", True), ("reg_tokens", 0), ("no_embed_class", True)):
            if kwargs.pop(name, value) != value:
                raise InputError(f"{name} cannot be chosen: Jumbo has one wide CLS token, without a position")
        super().__init__(
            init_values=init_values,
            global_pool=global_pool,
            no_embed_class=True,
            block_fn=partial(JumboBlock, num_jumbo=num_jumbo),
            init=init,
            position_std=position_std,
            **kwargs,
        )
        self.num_jumbo = self.num_prefix_tokens = num_jumbo
        width = num_jumbo * self.embed_dim
        placed = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        cls_token = torch.empty(1, num_jumbo, self.embed_dim, **placed)
        self.cls_token = nn.Parameter(nn.init.normal_(cls_token, std=position_std))
        self.jumbo_mlp = Mlp(width, hidden_features=int(width * jumbo_mlp_ratio), **placed)
        draw_weights(self.jumbo_mlp, init)
        for block in self.blocks:
            block.share(self.jumbo_mlp)
        if global_pool != "avg":
            self.norm = JumboNorm(self.embed_dim, num_jumbo, with_patches=patch_norm, **placed)
            self.num_features = self.head_hidden_size = width
        if global_pool == "token":
            # Pooling then leaves all tokens to what comes after it, so that a refinement of them fits in between.
            self.global_pool = ""
            self.fc_norm: nn.Module = JoinedJumbo(num_jumbo)
        self._make_head()
        limit_reach(self, reach)  # here, where it is known how many tokens are no patches

    def _make_head(self) -> None:
        if self.num_classes:
            place = self.jumbo_mlp.fc1.weight
            self.head = nn.Linear(self.head_hidden_size, self.num_classes, device=place.device, dtype=place.dtype)
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, -math.log(self.num_classes))
        # Where timm looks first for the pooling that it saves with a model's weights.
        pooling = "token" if isinstance(self.fc_norm, JoinedJumbo) else self.global_pool
        self.head.global_pool = pooling  # type: ignore[assignment]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool:
            raise InputError(f"global_pool {global_pool!r} is chosen when a Jumbo is made: its norms depend on it")
        unpooled = not self.global_pool and isinstance(self.fc_norm, nn.Identity)
        _check_unpooled("" if global_pool == "" or unpooled else self.global_pool or "token", num_classes)
        super().reset_classifier(num_classes, global_pool)
        if global_pool == "":
            self.fc_norm = nn.Identity()
        self._make_head()
        self.head.train(self.training)


def _check_unpooled(global_pool: str, num_classes: int) -> None:
    if global_pool == "" and num_classes:
        raise InputError("a Jumbo's classifier reads its wide token or the mean; without pooling use num_classes=0")


def _config(num_classes: int, side: int) -> dict[str, Any]:
    return {
        "num_classes": num_classes,
        "input_size": (3, side, side),
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
    }


_REGISTERS = {"reg_tokens": 4, "no_embed_class": True}
_OF_TIMM: dict[str, tuple[str, Mapping[str, Any]]] = {
    "vit_tiny_patch16_reg4_224": ("vit_tiny_patch16_224", _REGISTERS),
    "vit_base_patch16_reg4_224": ("vit_base_patch16_224", _REGISTERS),
    "vit_tiny_patch16_rope_mixed_224": ("vit_small_patch16_rope_mixed_224", {"embed_dim": 192, "num_heads": 3}),
}
"""Name → the model of timm that it is, up to these settings."""
default_cfgs = generate_default_cfgs(
    {
        **{
            name: dataclasses.replace(timm.get_pretrained_cfg(base), tag=None, url=None, hf_hub_id=None)
            for name, (base, _) in _OF_TIMM.items()
        },
        "jumbo_vit_tiny_patch16_224": _config(1000, 224),
        "jumbo_vit_base_patch16_224": _config(1000, 224),
        "compact_jumbo_vit": _config(100, 32),
    }
)


def _build(
    name: str, pretrained: bool, settings: dict[str, Any], build: Any = JumboViT, fit: Any = checkpoint_filter_fn
) -> Any:
    features = {"out_indices": 3, "feature_cls": "getter"}
    return build_model_with_cfg(build, name, pretrained, pretrained_filter_fn=fit, feature_cfg=features, **settings)


@register_model  # type: ignore[untyped-decorator]
def jumbo_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> JumboViT:
    """Jumbo of ViT-Tiny (S2, Table 1: 17 M parameters)."""
    size = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    model: JumboViT = _build("jumbo_vit_tiny_patch16_224", pretrained, {**size, **kwargs})
    return model


@register_model  # type: ignore[untyped-decorator]
def jumbo_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> JumboViT:
    """Jumbo of ViT-Base (S2, Table 1: 260 M parameters)."""
    size = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    model: JumboViT = _build("jumbo_vit_base_patch16_224", pretrained, {**size, **kwargs})
    return model


@register_model  # type: ignore[untyped-decorator]
def compact_jumbo_vit(pretrained: bool = False, **kwargs: Any) -> JumboViT:
    """Jumbo at the size of S1's compact ViT."""
    model: JumboViT = _build("compact_jumbo_vit", pretrained, {**COMPACT_SETTINGS, **kwargs})
    return model


def _register(name: str, base: str, settings: Mapping[str, Any]) -> None:
    def build(**arguments: Any) -> nn.Module:
        model: nn.Module = timm.model_entrypoint(base)(**{**settings, **arguments})
        return model

    def backbone(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        family = eva if "rope" in name else vision_transformer
        model: nn.Module = _build(name, pretrained, kwargs, build, family.checkpoint_filter_fn)
        return model

    backbone.__name__ = backbone.__qualname__ = name
    register_model(backbone)


for _name, (_base, _settings) in _OF_TIMM.items():
    if not timm.is_model(_name):  # a later timm may have it
        _register(_name, _base, _settings)
