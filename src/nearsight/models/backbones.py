"""Backbones of S2's Table 1 that timm can build but has no name for: registers and mixed RoPE at the paper's sizes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import timm
from timm.models import build_model_with_cfg, eva, generate_default_cfgs, register_model, vision_transformer
from torch import nn

_REGISTERS = {"reg_tokens": 4, "no_embed_class": True}
_BACKBONES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "vit_tiny_patch16_reg4_224": ("vit_tiny_patch16_224", _REGISTERS),
    "vit_base_patch16_reg4_224": ("vit_base_patch16_224", _REGISTERS),
    "vit_tiny_patch16_rope_mixed_224": ("vit_small_patch16_rope_mixed_224", {"embed_dim": 192, "num_heads": 3}),
}
"""Name → the model of timm that it is, up to these settings."""

default_cfgs = generate_default_cfgs(
    {
        name: dataclasses.replace(timm.get_pretrained_cfg(base), tag=None, url=None, hf_hub_id=None)
        for name, (base, _) in _BACKBONES.items()
    }
)


def _register(name: str, base: str, settings: Mapping[str, Any]) -> None:
    def build(**arguments: Any) -> nn.Module:
        model: nn.Module = timm.model_entrypoint(base)(**{**settings, **arguments})
        return model

    def backbone(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        family = eva if "rope" in name else vision_transformer
        features = {"out_indices": 3, "feature_cls": "getter"}
        model: nn.Module = build_model_with_cfg(
            build,
            name,
            pretrained,
            pretrained_filter_fn=family.checkpoint_filter_fn,
            feature_cfg=features,
            **kwargs,
        )
        return model

    backbone.__name__ = backbone.__qualname__ = name
    register_model(backbone)


for _name, (_base, _settings) in _BACKBONES.items():
    if not timm.is_model(_name):  # a later timm may have it
        _register(_name, _base, _settings)
