"""How a small model of Hugging Face transformers is made, and those whose patches look at the whole image."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vit_references.checking import CLASS

from foreign_references.case import Case
from foreign_references.places import patches

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64, "patch_size": 16}
WIDE = {**SMALL, "image_size": (64, 96)}
SQUARE = {**SMALL, "image_size": 64}
EVERY = r".*"
BESIDE_POOLING = r"encoder.*"


def model(name: str, settings: Mapping[str, Any], config: str = "", **case: Any) -> Case:
    """A model class of transformers; its configuration has the same name with another end, unless told."""
    build = partial(_build, name.partition(",")[0], config or _config_of(name), settings)
    return Case("transformers", name, build, **case)


def _config_of(name: str) -> str:
    for end in ("Model", "Backbone", "VisionTransformer"):
        if name.endswith(end):
            return name.removesuffix(end).removesuffix("Vision") + ("VisionConfig" if "Vision" in name else "Config")
    raise ValueError(f"{name} does not say what its configuration is")


def _build(name: str, config: str, settings: Mapping[str, Any]) -> nn.Module:
    import transformers

    built: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
    return built


def plain(name: str, prefix: int, settings: dict[str, Any], **case: Any) -> Case:
    """Patches behind some other tokens."""
    side: Any = settings.get("image_size", (64, 96))
    size = case.pop("image_size", (side, side) if isinstance(side, int) else tuple(side))
    return model(name, settings, layers={EVERY: patches(prefix=prefix)}, image_size=size, **case)


def with_pooling(name: str, settings: dict[str, Any], **case: Any) -> Case:
    """Patches alone, and an attention at the end whose one query is learned."""
    kinds = {"layers": {BESIDE_POOLING: patches()}, "skipped": {r"head.*": CLASS}}
    return model(name, settings, image_size=(64, 64), **kinds, **case)


def in_order(masked: nn.Module, images: Tensor) -> Any:
    """ViT-MAE shuffles its patches by random noise; with noise that rises they stay in order."""
    num_patches = images.shape[-2] * images.shape[-1] // 16**2
    return masked(images, noise=torch.arange(num_patches, dtype=images.dtype).expand(len(images), -1))


FIXED = (64, 96)
"""The size of an image that a model made for 64×64 fits its positions to."""
NARROW_MLP = {**SQUARE, "mlp_ratio": 2}
LINES = [64, 96]
BLIP = {**SQUARE, "initializer_range": 0.02}

CASES = [
    plain("ViTModel", 1, WIDE, quick=True, note="CLS"),
    plain("DeiTModel", 2, WIDE, quick=True, note="CLS, distillation token"),
    plain("BeitModel", 1, {**WIDE, "use_relative_position_bias": True}, quick=True, note="relative position bias"),
    plain("Data2VecVisionModel", 1, {**WIDE, "use_relative_position_bias": True}, note="relative position bias"),
    plain("Dinov2Model", 1, NARROW_MLP, image_size=FIXED, quick=True, note="positions resampled"),
    plain("Dinov2WithRegistersModel", 5, NARROW_MLP, image_size=FIXED, note="registers"),
    plain(
        "DINOv3ViTModel", 5, {**SQUARE, "num_register_tokens": 4}, image_size=FIXED, quick=True, note="RoPE, registers"
    ),
    plain("PixioModel", 8, NARROW_MLP, image_size=FIXED, note="8 class tokens"),
    plain("Tipsv2VisionModel", 2, NARROW_MLP, image_size=FIXED, note="CLS, register"),
    plain("ViTMSNModel", 1, WIDE),
    plain("IJepaModel", 0, WIDE, note="no CLS"),
    plain("FlavaImageModel", 1, WIDE, config="FlavaImageConfig"),
    plain("VitPoseBackbone", 0, WIDE, config="VitPoseBackboneConfig", note="no CLS"),
    model(
        "YolosModel",
        {**SMALL, "image_size": LINES, "num_detection_tokens": 5},
        layers={EVERY: patches(prefix=1, suffix=5)},
        note="CLS before, detection tokens behind the patches",
    ),
    plain("DPTModel", 1, {**SQUARE, "backbone_out_indices": [0, 1, 1, 1]}),
    plain("CLIPVisionModel", 1, SQUARE, quick=True),
    plain("MetaClip2VisionModel", 1, SQUARE),
    plain("AltCLIPVisionModel", 1, SQUARE),
    plain("ChineseCLIPVisionModel", 1, SQUARE),
    plain("CLIPSegVisionModel", 1, SQUARE),
    plain("OwlViTVisionModel", 1, SQUARE),
    plain("Owlv2VisionModel", 1, SQUARE),
    plain("GitVisionModel", 1, SQUARE),
    plain("BlipVisionModel", 1, BLIP),
    plain("Blip2VisionModel", 1, BLIP),
    plain("InstructBlipVisionModel", 1, BLIP),
    plain("InstructBlipVideoVisionModel", 1, BLIP),
    plain("MLCDVisionModel", 1, SQUARE, note="RoPE"),
    plain("InternVLVisionModel", 1, {**SMALL, "image_size": [64, 64], "patch_size": [16, 16]}),
    plain("JanusVisionModel", 0, NARROW_MLP),
    plain("Idefics3VisionTransformer", 0, SQUARE),
    plain("SmolVLMVisionTransformer", 0, SQUARE),
    with_pooling("SiglipVisionModel", SQUARE, quick=True),
    with_pooling("Aimv2VisionModel", SQUARE),
    with_pooling("Phi4MultimodalVisionModel", {**SQUARE, "attn_implementation": "eager"}, gain=0.3),
    plain(
        "ViTMAEModel", 1, {**SQUARE, "mask_ratio": 0.0}, call=in_order, note="its noise given, so that no patch moves"
    ),
    model(
        "ViTMAEModel, shuffling",
        {**SQUARE, "mask_ratio": 0.0},
        config="ViTMAEConfig",
        skipped={EVERY: "elsewhere in one image than in another"},
        image_size=(64, 64),
        refused="elsewhere in one image than in another",
    ),
]
