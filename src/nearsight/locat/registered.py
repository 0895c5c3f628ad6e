"""Models with LocAt under names of their own, `locat_` and the backbone's, registered with timm.

Options of `add_locat` are arguments, beside those of the backbone: `locat_vit_tiny_patch16_224(kernel="laplace")`; with
`gaug=False` or `prr=False` one half is left out. docs/locat.md has a line for each row of S2's tables.
"""

import dataclasses
import inspect
from typing import Any

import timm
from timm.models import build_model_with_cfg, register_model
from torch import nn

from nearsight.errors import InputError
from nearsight.locat.attach import add_locat
from nearsight.locat.fitting import fitted

BACKBONES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_tiny_patch16_reg4_224",
    "vit_base_patch16_reg4_224",
    "vit_tiny_patch16_rope_mixed_224",
    "vit_base_patch16_rope_mixed_224",
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "jumbo_vit_tiny_patch16_224",
    "jumbo_vit_base_patch16_224",
    "compact_vit",
    "compact_jumbo_vit",
)
"""Those that have a name with LocAt; `add_locat` takes others, too."""
_OPTIONS = tuple(inspect.signature(add_locat).parameters)[1:]  # all but the model
_WITHOUT_POSITIONS = ("swin", "rope")
"""Backbones that do not add positions to their tokens."""


def _register(backbone: str) -> None:
    name = f"locat_{backbone}"

    def model(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        config = kwargs["pretrained_cfg"] = kwargs.get("pretrained_cfg") or _described(name, backbone)
        if pretrained and not any(map(_has_weights, (config, kwargs.get("pretrained_cfg_overlay") or {}))):
            raise InputError(
                f"there are no published weights of {name}; add_locat(timm.create_model({backbone!r}, "
                "pretrained=True)) gives LocAt to a trained backbone, where that has any"
            )
        # As many maps as the backbone gives.
        features = {"out_indices": (0, 1, 2, 3) if "swin" in backbone else 3, "feature_cls": "getter"}
        built: nn.Module = build_model_with_cfg(
            lambda **settings: _build(backbone, settings),
            name,
            pretrained=pretrained,
            pretrained_filter_fn=fitted,
            feature_cfg=features,
            **kwargs,
        )
        return built

    model.__name__ = model.__qualname__ = name
    register_model(model)


def _has_weights(config: Any) -> bool:
    """Whether somebody says where weights are: a file of one's own, a folder or a repository."""
    described = config if isinstance(config, dict) else config.to_dict()
    return any(described.get(source) for source in ("url", "file", "hf_hub_id", "state_dict"))


def _described(name: str, backbone: str) -> dict[str, Any]:
    """The backbone's images and classes, without its weights."""
    config = timm.get_pretrained_cfg(backbone)
    bare = dataclasses.replace(config, architecture=name, tag=None, url=None, hf_hub_id=None)
    described: dict[str, Any] = bare.to_dict()
    return described


def _build(backbone: str, settings: dict[str, Any]) -> nn.Module:
    if settings.get("pos_embed") == "none" and any(word in backbone for word in _WITHOUT_POSITIONS):
        raise InputError(f"{backbone} has no positions to leave out: it does not add any to its tokens")
    options = {option: settings.pop(option) for option in _OPTIONS if option in settings}
    if backbone.startswith(("jumbo", "compact_jumbo")):
        settings = {"patch_norm": True} | settings
    model: nn.Module = timm.model_entrypoint(backbone)(**settings)
    return add_locat(model, **options)


for _backbone in BACKBONES:
    _register(_backbone)
