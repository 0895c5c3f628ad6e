"""Models of transformers for a task: a backbone, and decoders whose attention is not between patches."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from vit_references.checking import CHANNELS

from foreign_references.case import Case
from foreign_references.huggingface_whole import SQUARE, WIDE
from foreign_references.huggingface_windows import SWIN
from foreign_references.places import by_stage, in_windows, number_in, patches, pooled_keys

EVERY = r".*"
ANY = ""
"""Whatever reason the lens gives."""


def task(name: str, settings: Callable[[Any], dict[str, Any]], config: str = "", **case: Any) -> Case:
    """`settings` are made when transformers is there, because configurations hold those of their backbones."""
    kind = name.partition(",")[0]
    stem = re.split(r"For[A-Z]|Model$", kind)[0]
    return Case("transformers", name, partial(_build, kind, config or f"{stem}Config", settings), **case)


def _build(name: str, config: str, settings: Callable[[Any], dict[str, Any]]) -> nn.Module:
    import transformers

    built: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings(transformers)))
    return built


def deep(backbone: str, **more: Any) -> Callable[[Any], dict[str, Any]]:
    """A backbone of four blocks that gives out what each makes."""
    vit = {**SQUARE, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False, **more}
    neck = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}

    def settings(library: Any) -> dict[str, Any]:
        return {"backbone_config": getattr(library, backbone)(**vit), **neck}

    return settings


def with_head(make: Callable[[Any], dict[str, Any]], **more: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda library: {**make(library), **more}


def swin(library: Any, kind: str = "SwinConfig") -> Any:
    small = {"patch_size": 4, "embed_dim": 16, "depths": [1, 1, 1, 2], "num_heads": [1, 2, 2, 2], "window_size": 4}
    return getattr(library, kind)(image_size=64, out_indices=[1, 2, 3, 4], **small)


def masks(library: Any, kind: str, *names: str) -> dict[str, Any]:
    """Segmentation by queries for masks."""
    sizes = {
        "encoder_feedforward_dim": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "dim_feedforward": 32,
        "num_queries": 5,
        "hidden_dim": 32,
    }
    return {"backbone_config": swin(library, kind), **sizes, **dict.fromkeys(names, 32)}


FLORENCE = {
    "depths": (1, 1, 1, 1),
    "embed_dim": [16, 24, 32, 40],
    "num_heads": [2, 2, 2, 2],
    "num_groups": [2, 2, 2, 2],
    "window_size": 4,
}
DINO = {"mlp_ratio": 2, "apply_layernorm": True}

CASES: list[Case] = [
    task(
        "DepthAnythingForDepthEstimation",
        with_head(deep("Dinov2Config", **DINO), reassemble_hidden_size=48, patch_size=16, head_hidden_size=8),
        layers={EVERY: patches(prefix=1)},
        note="DINOv2 and convolutions",
    ),
    task(
        "PromptDepthAnythingForDepthEstimation",
        with_head(deep("Dinov2Config", **DINO), reassemble_hidden_size=48, patch_size=16, head_hidden_size=8),
        layers={EVERY: patches(prefix=1)},
    ),
    task(
        "DPTForDepthEstimation",
        lambda library: {
            **SQUARE,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
        },
        layers={EVERY: patches(prefix=1)},
        image_size=(64, 64),
    ),
    task(
        "ZoeDepthForDepthEstimation",
        with_head(
            deep("BeitConfig", use_relative_position_bias=True),
            bottleneck_features=8,
            num_relative_features=4,
            bin_embedding_dim=8,
            backbone_hidden_size=48,
            num_attractors=[2, 2, 1, 1],
        ),
        layers={r"backbone.*": patches(prefix=1)},
        skipped={r"metric_head.*": ANY},
        image_size=(64, 64),
        note="BEiT, and a softmax over bins of depth",
    ),
    task(
        "VitPoseForPoseEstimation",
        lambda library: {
            "backbone_config": library.VitPoseBackboneConfig(**{**WIDE, "patch_size": (16, 16)}, out_indices=[2])
        },
        layers={EVERY: patches()},
    ),
    task(
        "UperNetForSemanticSegmentation",
        lambda library: {
            "backbone_config": swin(library),
            "hidden_size": 16,
            "pool_scales": [1, 2],
            "auxiliary_channels": 8,
            "auxiliary_in_channels": 64,
        },
        config="UperNetConfig",
        layers={EVERY: SWIN},
        note="Swin; windows larger than the last grids",
    ),
    task(
        "MaskFormerModel",
        lambda library: {
            "backbone_config": swin(library),
            "decoder_config": library.DetrConfig(
                d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, num_queries=5
            ),
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
        },
        layers={r"pixel_level.*": SWIN},
        skipped={r"transformer_module.*": ANY},
        note="Swin, and queries for masks",
    ),
    task(
        "Mask2FormerModel",
        lambda library: masks(library, "SwinConfig", "feature_size", "mask_feature_size"),
        layers={r".*encoder\.layers\.\d\.blocks.*": SWIN},
        skipped={EVERY: ANY},
        note="Swin, and queries for masks",
    ),
    task(
        "EomtForUniversalSegmentation",
        lambda library: {**SQUARE, "mlp_ratio": 2, "num_blocks": 1, "num_queries": 4, "num_upscale_blocks": 1},
        layers={r"layers\.0.*": patches(prefix=5), r"layers\.1.*": patches(prefix=9)},
        image_size=(64, 64),
        note="registers; queries for masks before the last block",
    ),
    task(
        "EomtDinov3ForUniversalSegmentation",
        lambda library: {**SQUARE, "num_blocks": 1, "num_queries": 4, "num_upscale_blocks": 1},
        layers={r"layers\.0.*": patches(prefix=5), r"layers\.1.*": patches(prefix=9)},
        image_size=(64, 64),
        note="RoPE, registers; queries for masks before the last block",
    ),
    task(
        "Florence2VisionBackbone",
        lambda library: FLORENCE,
        config="Florence2VisionConfig",
        layers={
            r".*window_attn": by_stage(number_in(r"blocks\.(\d)"), [in_windows(step, 4) for step in (4, 8, 16, 32)])
        },
        skipped={r".*channel_attn": CHANNELS},
        image_size=(128, 256),
        note="DaViT: windows and channels in turn",
    ),
    task(
        "SegformerForSemanticSegmentation",
        lambda library: {
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "hidden_sizes": [16, 32],
            "num_attention_heads": [1, 2],
            "sr_ratios": [4, 1],
            "decoder_hidden_size": 16,
            "strides": [4, 2],
            "patch_sizes": [7, 3],
            "mlp_ratios": [2, 2],
        },
        layers={r".*stages\.0.*": pooled_keys(4, 4), r".*stages\.1.*": patches(8)},
        gain=30,
        note="keys pooled",
    ),
    task("PoolFormerModel", lambda library: {"depths": [1] * 4, "hidden_sizes": [8] * 4}, refused="no attention"),
    task(
        "FocalNetModel",
        lambda library: {"image_size": 64, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16]},
        image_size=(64, 64),
        refused="no attention",
    ),
    task("ConvNextModel", lambda library: {"depths": [1] * 4, "hidden_sizes": [8] * 4}, refused="no attention"),
]
