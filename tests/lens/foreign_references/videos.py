"""Models of video: distance on the picture, entropy over all patches that are seen, and distance in time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foreign_references import huggingface_whole, vit_pytorch_whole
from foreign_references.case import Case
from foreign_references.huggingface_whole import SMALL, SQUARE
from foreign_references.video_places import (
    FRAMES,
    along_time,
    among_masks,
    frame_by_frame,
    pooled_tubes,
    shifted_boxes,
    times_of_each_place,
    tubes,
)
from foreign_references.vit_pytorch_whole import SLOW_ROPE, WITHOUT_FLEX

EVERY = r".*"
ANY = ""


def frames_first(height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(2, FRAMES, 3, height, width)


def channels_first(height: int = 64, width: int = 96) -> Tensor:
    return torch.randn(2, 3, FRAMES, height, width)


def video_swin() -> nn.Module:
    from torchvision.models.video import SwinTransformer3d

    return SwinTransformer3d([1, 4, 4], 24, [2, 2], [2, 3], [2, 4, 4], num_classes=5)


def video_mvit(version: int) -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    wide = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_q": [1, 1, 1]}
    blocks = [
        MSBlockConfig(1, 16, 16 if version == 2 else 32, **wide, stride_kv=[1, 4, 4]),
        MSBlockConfig(2, 16 if version == 2 else 32, 32, **{**wide, "stride_q": [1, 2, 2]}, stride_kv=[1, 2, 2]),
        MSBlockConfig(2, 32, 32, **wide, stride_kv=[1, 1, 1]),
    ]
    is_second = version == 2
    return MViT(
        (64, 64),
        FRAMES,
        blocks,
        residual_pool=is_second,
        residual_with_cls_embed=not is_second,
        rel_pos_embed=is_second,
        proj_after_attn=is_second,
        num_classes=5,
    )


def hf(name: str, settings: dict[str, Any], **case: Any) -> Case:
    return huggingface_whole.model(name, settings, inputs=frames_first, image_size=(64, 64), **case)


def lucid(name: str, settings: dict[str, Any], **case: Any) -> Case:
    size = settings.get("image_size", settings.get("input_shape", (64, 96))[-2:])
    make: Callable[[], Tensor] = partial(channels_first, *size)
    return vit_pytorch_whole.model(name, settings, **{"inputs": make, "image_size": size, **case})


def frames_of(model: nn.Module, videos: Tensor) -> Any:
    """X-CLIP takes the frames of all videos as a batch of images."""
    return model(videos.flatten(0, 1))


VIT = {name: value for name, value in vit_pytorch_whole.SMALL.items() if name != "patch_size"}
CUBES = {**VIT, "image_size": (64, 96), "image_patch_size": 16, "frames": FRAMES, "frame_patch_size": 2}
FACTORED = {name: value for name, value in CUBES.items() if name != "depth"} | {"spatial_depth": 2, "temporal_depth": 1}
NO_PATCH = {name: value for name, value in SMALL.items() if name != "patch_size"}
MIT = {
    "num_frames": FRAMES,
    "mit_hidden_size": 48,
    "mit_intermediate_size": 64,
    "mit_num_hidden_layers": 1,
    "mit_num_attention_heads": 3,
    "drop_path_rate": 0.0,
}
JEPA = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "crop_size": 64,
    "frames_per_clip": FRAMES,
    "mlp_ratio": 2,
    "pred_hidden_size": 24,
    "pred_num_hidden_layers": 1,
    "pred_num_attention_heads": 2,
}
PRISM = {name: value for name, value in NO_PATCH.items() if name != "num_hidden_layers"} | {
    "image_size": 64,
    "num_frames": FRAMES,
    "tubelet_size": [1, 16, 16],
    "num_spatial_layers": 2,
    "num_temporal_layers": 1,
}
NESTED = {"ndim": 3, "input_shape": (FRAMES, 64, 96), "patch_size": (2, 16, 16), **VIT}

CASES: list[Case] = [
    hf("VideoMAEModel", {**SQUARE, "num_frames": FRAMES, "tubelet_size": 2}, layers={EVERY: tubes(2)}, quick=True),
    hf(
        "VivitModel",
        {**NO_PATCH, "image_size": 64, "num_frames": FRAMES, "tubelet_size": [2, 16, 16]},
        layers={EVERY: tubes(2, 1)},
        note="CLS",
    ),
    hf(
        "TimesformerModel",
        {**SQUARE, "num_frames": FRAMES},
        layers={r".*layer\.\d\.attention.*": frame_by_frame(FRAMES, 1), r".*temporal.*": along_time(FRAMES)},
        quick=True,
        note="space and time in turn",
    ),
    hf(
        "TimesformerModel, space alone",
        {**SQUARE, "num_frames": FRAMES, "attention_type": "space_only"},
        config="TimesformerConfig",
        layers={EVERY: frame_by_frame(FRAMES, 1)},
    ),
    hf(
        "TimesformerModel, together",
        {**SQUARE, "num_frames": FRAMES, "attention_type": "joint_space_time"},
        config="TimesformerConfig",
        layers={EVERY: times_of_each_place(FRAMES, 1)},
        gain=12,
    ),
    hf(
        "VJEPA2Model",
        JEPA,
        config="VJEPA2Config",
        layers={r"encoder.*": tubes(2), r"predictor.*": among_masks(2)},
        note="RoPE; its predictor has mask tokens among the patches",
    ),
    hf(
        "VJEPA2Model, its encoder",
        JEPA,
        config="VJEPA2Config",
        layers={EVERY: tubes(2)},
        call=lambda model, videos: model(videos, skip_predictor=True),
        note="RoPE",
    ),
    hf(
        "VideoPrismVisionModel",
        PRISM,
        layers={r"spatial.*": frame_by_frame(FRAMES), r"temporal.*": along_time(FRAMES)},
        note="space, then time",
    ),
    hf(
        "XCLIPVisionModel",
        {**SQUARE, **MIT},
        layers={r".*self_attn": frame_by_frame(FRAMES, 1, 1)},
        skipped={r".*message_attn": ANY},
        call=frames_of,
        note="frames, with a token that has heard of the others",
    ),
    lucid("vit_3d.ViT", CUBES, layers={EVERY: tubes(2, 1)}, note="CLS"),
    lucid("simple_vit_3d.SimpleViT", CUBES, layers={EVERY: tubes(2)}),
    lucid("simple_flash_attn_vit_3d.SimpleViT", CUBES, layers={EVERY: tubes(2)}),
    lucid(
        "vivit.ViViT",
        FACTORED,
        layers={r"spatial.*": frame_by_frame(2, 1)},
        skipped={r"temporal.*": ANY},
        note="space, then time",
    ),
    lucid(
        "vivit.ViViT, in turn",
        {**FACTORED, "temporal_depth": 2, "variant": "factorized_self_attention"},
        layers={r".*layers\.\d\.0": frame_by_frame(2, 1), r".*layers\.\d\.1": along_time(2, 1)},
        note="space and time in turn",
    ),
    lucid("vit_nd.ViTND, video", NESTED, refused="flex", note="flex attention"),
    lucid("vit_nd_rotary.ViTND, video", NESTED, refused="flex", note="flex attention"),
    lucid("vit_nd.ViTND, video without flex", NESTED, layers={EVERY: tubes(2, 1)}, **WITHOUT_FLEX),
    lucid(
        "vit_nd_rotary.ViTND, video without flex",
        {**NESTED, **SLOW_ROPE},
        layers={EVERY: tubes(2)},
        **WITHOUT_FLEX,
    ),
    Case(
        "torchvision",
        "swin3d_t",
        video_swin,
        layers={EVERY: shifted_boxes},
        inputs=partial(channels_first, 64, 96),
        quick=True,
        note="shifted boxes of space and time, masks",
    ),
    Case(
        "torchvision",
        "mvit_v1_b",
        partial(video_mvit, 1),
        layers={EVERY: pooled_tubes},
        inputs=partial(channels_first, 64, 64),
        image_size=(64, 64),
        note="queries and keys pooled",
    ),
    Case(
        "torchvision",
        "mvit_v2_s",
        partial(video_mvit, 2),
        layers={EVERY: pooled_tubes},
        inputs=partial(channels_first, 64, 64),
        image_size=(64, 64),
        note="queries and keys pooled, relative positions",
    ),
]
