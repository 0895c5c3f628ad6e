"""Models with LocAt under names of their own, `locat_` and the backbone's, registered with timm; and their weights.

Options of `add_locat` are arguments, beside those of the backbone: `locat_vit_tiny_patch16_224(kernel="laplace")`; with
`gaug=False` or `prr=False` one half is left out. docs/locat.md has a line for each row of S2's tables.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from timm.models import (
    build_model_with_cfg,
    eva,
    generate_default_cfgs,
    register_model,
    swin_transformer,
    vision_transformer,
)
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.locat.attach import add_locat
from nearsight.models.compact import COMPACT_IMAGES
from nearsight.models.factory import S2_BACKBONES
from nearsight.models.zoo import pretrained_cfgs

BACKBONES = (*S2_BACKBONES, "compact_vit", "compact_jumbo_vit")
"""Those that have a name with LocAt; `add_locat` takes others, too."""
_OPTIONS = tuple(inspect.signature(add_locat).parameters)[1:]  # all but the model
_WITHOUT_POSITIONS = ("swin", "rope")
"""Backbones that do not add positions to their tokens."""
_FAMILIES: tuple[tuple[type[nn.Module], Callable[[Any, nn.Module], dict[str, Tensor]]], ...] = (
    (vision_transformer.VisionTransformer, vision_transformer.checkpoint_filter_fn),
    (eva.Eva, eva.checkpoint_filter_fn),
    (swin_transformer.SwinTransformer, swin_transformer.checkpoint_filter_fn),
)
default_cfgs = generate_default_cfgs(pretrained_cfgs("locat_compact_vit", COMPACT_IMAGES))
"""What timm is told of weights; of the others there are none."""


def _register(backbone: str) -> None:
    name = f"locat_{backbone}"

    def model(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        config = kwargs.get("pretrained_cfg") or _described(name, backbone)
        if isinstance(config, str):  # a tag
            config = timm.get_pretrained_cfg(f"{name}.{config}", allow_unregistered=False)
        kwargs["pretrained_cfg"] = config
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
            pretrained_filter_fn=_fitted,
            feature_cfg=features,
            **kwargs,
        )
        return built

    model.__name__ = model.__qualname__ = name
    register_model(model)


def _has_weights(config: Any) -> bool:
    """Whether the caller says where weights are: a file, a folder or a repository."""
    described = config if isinstance(config, dict) else config.to_dict()
    return any(described.get(source) for source in ("url", "file", "hf_hub_id", "state_dict"))


def _described(name: str, backbone: str) -> dict[str, Any]:
    """The backbone's images and classes, without its weights."""
    config = timm.get_pretrained_cfg(backbone)
    bare = dataclasses.replace(config, architecture=name, tag=None, url=None, file=None, hf_hub_id=None)
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


def _fitted(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """`weights` with positions, patch embedding and biases of windows resampled for the size of `model`'s: what timm
    does under a backbone's own name."""
    own = model.state_dict()
    # timm takes a Swin without a classifier for one of an old release, and renames what it should leave.
    if all(name in own and own[name].shape == weight.shape for name, weight in weights.items()):
        return weights
    return next((fit(weights, model) for family, fit in _FAMILIES if isinstance(model, family)), weights)


for _backbone in BACKBONES:
    _register(_backbone)


# The first that is there is taken: averaged weights before raw ones, and of DINO's two networks the teacher.
_NESTINGS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "student")
_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")
_BACKBONE = "backbone."  # beside the head that DINO trains it with
_ATTENTION = re.compile(r"\.attn\..+\.weight$")
_JUMBO_MLP = re.compile(r"^(?:blocks\.\d+\.)?(jumbo_mlp\..+)$")
_JUMBO_NORM = re.compile(r"^norm(?:_(patches))?\.(weight|bias)$")


def load_official(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of one of the authors' checkpoints, as `load_state_dict` of the same model takes them here.

    With or without LocAt, of any backbone of S2, and with what timm's, DeiT's or DINO's training wraps around them.
    Their attentions hold `gaug.log_var` and `gaug.log_alpha` as ours do, and almost all else has timm's names. What
    differs is Jumbo: its MLP, which all blocks share, is listed once more for each of them, and its two final norms lie
    side by side, where here they are one module.

    Raises:
        InputError: if there are no attentions in it, or a Jumbo's blocks do not share their MLP.
    """
    for nesting in _NESTINGS:
        if isinstance(inner := state_dict.get(nesting), Mapping):
            return load_official(inner)
    weights = {_WRAPPERS.sub("", name): value for name, value in state_dict.items() if isinstance(value, Tensor)}
    if any(name.startswith(_BACKBONE) for name in weights):
        weights = {name.removeprefix(_BACKBONE): w for name, w in weights.items() if name.startswith(_BACKBONE)}
    if not any(_ATTENTION.search(name) for name in weights):
        raise InputError("this checkpoint has no weights of attentions (….attn.….weight): it is not one of S2's")
    return _renamed_jumbo(weights) if any(map(_JUMBO_MLP.match, weights)) else weights


def _renamed_jumbo(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the shared MLP once, and the norms where `JumboNorm` has them. Our own names stay."""
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if shared := _JUMBO_MLP.match(name):
            if not torch.equal(renamed.setdefault(shared[1], weight), weight):
                raise InputError(
                    f"{name} is not the {shared[1]} of the other blocks, but those of a Jumbo share one MLP: this "
                    "checkpoint is of another model"
                )
        elif norm := _JUMBO_NORM.match(name):
            renamed[f"norm.{norm[1] or 'jumbo'}.{norm[2]}"] = weight
        else:
            renamed[name] = weight
    return renamed
