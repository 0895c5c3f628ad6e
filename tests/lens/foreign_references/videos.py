"""Models of video: distance is that on the picture, whatever the frame.

A token of several frames lies where it lies in each of them. Attention along time alone, from a place to the same
place, has no distance and is left out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Mechanism, Size, cells, window_centres

from foreign_references import huggingface, vit_pytorch_whole
from foreign_references.case import Case
from foreign_references.huggingface import SMALL, SQUARE
from foreign_references.places import behind, cut

EVERY = r".*"
ANY = ""
FRAMES = 4


def frames_first(height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(2, FRAMES, 3, height, width)


def channels_first(height: int = 64, width: int = 96) -> Tensor:
    return torch.randn(2, 3, FRAMES, height, width)


def tubes(times: int, prefix: int = 0, patch: int = 16) -> Mechanism:
    """All patches of all times look at each other: those of one time after the other."""

    def places(found: Recorded, image_size: Size) -> Layer:
        grid = image_size[0] // patch, image_size[1] // patch
        tokens = behind(prefix, cells(*grid).expand(times, -1, -1, -1))
        assert tokens.shape[1] == found.attention.shape[-1], found.name
        return Layer(grid, tokens, tokens)

    return places


def times_of_each_place(times: int, prefix: int = 0, patch: int = 16) -> Mechanism:
    """As `tubes`, but those of one place after the other."""

    def places(found: Recorded, image_size: Size) -> Layer:
        grid = image_size[0] // patch, image_size[1] // patch
        tokens = behind(prefix, cells(*grid).reshape(-1, 1, 2).expand(-1, times, -1))
        assert tokens.shape[1] == found.attention.shape[-1], found.name
        return Layer(grid, tokens, tokens)

    return places


def frame_by_frame(times: int, prefix: int = 0, suffix: int = 0, patch: int = 16) -> Mechanism:
    """Patches look at those of the same time."""

    def places(found: Recorded, image_size: Size) -> Layer:
        grid = image_size[0] // patch, image_size[1] // patch
        tokens = F.pad(behind(prefix, cells(*grid)), (0, 0, 0, suffix), value=torch.nan).expand(times, -1, -1)
        assert tokens.shape[1] == found.attention.shape[-1], found.name
        return Layer(grid, tokens, tokens, "bw h")

    return places


# torchvision's, of which each token has a time, a row and a column


def shifted_boxes(found: Recorded, image_size: Size) -> Layer:
    """Video Swin: boxes of 2×4×4 tokens that every other block shifts by half, where there is more than one."""
    stage = int(found.name.split(".")[1]) // 2
    grid = image_size[0] // (4 * 2**stage), image_size[1] // (4 * 2**stage)
    sizes, box = (FRAMES, *grid), (2, 4, 4)
    is_shifted = found.name.split(".")[2] == "1"
    shift = [side // 2 if is_shifted and size > side else 0 for size, side in zip(sizes, box, strict=True)]
    padded = [size + -size % side for size, side in zip(sizes, box, strict=True)]
    margins = [0, 0] + [
        margin for size, full in zip(sizes[::-1], padded[::-1], strict=True) for margin in (0, full - size)
    ]
    image = F.pad(cells(*grid).expand(FRAMES, -1, -1, -1), margins, value=torch.nan)
    parts = boxes(torch.roll(image, [-step for step in shift], (0, 1, 2)), box)
    beyond = torch.stack(
        [
            torch.arange(size).reshape([-1 if other == axis else 1 for other in range(3)]).expand(padded)
            >= size - shift[axis]
            for axis, size in enumerate(padded)
        ],
        dim=-1,
    )
    regions = boxes(beyond, box)
    return Layer(grid, parts, parts, "bw h", (regions[:, :, None] == regions[:, None]).all(-1))


def boxes(video: Tensor, box: tuple[int, int, int]) -> Tensor:
    """[boxes, tokens of each, …] of [times, rows, columns, …], in order."""
    flat = [cut(part, box[1:]) for part in video]  # [times][windows, 16, …]
    stacked = torch.stack(flat).unflatten(0, (-1, box[0]))  # [boxes in time, 2, windows, 16, …]
    return stacked.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def pooled_tubes(found: Recorded, image_size: Size) -> Layer:
    """MViT: queries and keys by strided convolutions over time, rows and columns, behind CLS."""
    grid = image_size[0] // 4, image_size[1] // 4
    for block in list(found.model.blocks)[: int(found.name.split(".")[1])]:
        pool = block.attn.pool_q
        grid = tuple(len(window_centres(side, pool.pool if pool else None, axis + 1)) for axis, side in enumerate(grid))
    lines = [
        [window_centres(side, pool.pool if pool else None, axis + 1) for axis, side in enumerate(grid)]
        for pool in (found.module.pool_q, found.module.pool_k)
    ]
    finer = max(lines, key=lambda axes: len(axes[0]))
    tokens = []
    for axes, number in zip(lines, found.attention.shape[-2:], strict=True):
        within = [torch.tensor([_position(place, of) for place in line]) for line, of in zip(axes, finer, strict=True)]
        places = torch.stack(torch.meshgrid(*within, indexing="ij"), dim=-1).double()
        times = (number - 1) // (places.shape[0] * places.shape[1])
        tokens.append(behind(1, places.expand(times, -1, -1, -1)))
    return Layer((len(finer[0]), len(finer[1])), *tokens)


def _position(place: float, lines: list[float]) -> float:
    """In cells of the finer grid, whose lines are evenly apart but for its edges."""
    return float(np.interp(place, lines, range(len(lines))))


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
    return huggingface.model(name, settings, inputs=frames_first, image_size=(64, 64), **case)


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
    hf("VideoMAEModel", {**SQUARE, "num_frames": FRAMES, "tubelet_size": 2}, layers={EVERY: tubes(2)}),
    hf(
        "VivitModel",
        {**NO_PATCH, "image_size": 64, "num_frames": FRAMES, "tubelet_size": [2, 16, 16]},
        layers={EVERY: tubes(2, 1)},
        note="CLS",
    ),
    hf(
        "TimesformerModel",
        {**SQUARE, "num_frames": FRAMES},
        layers={r".*layer\.\d\.attention.*": frame_by_frame(FRAMES, 1)},
        skipped={r".*temporal.*": ANY},
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
    ),
    hf(
        "VJEPA2Model",
        JEPA,
        config="VJEPA2Config",
        layers={r"encoder.*": tubes(2)},
        skipped={r"predictor.*": ANY},
        note="RoPE; its predictor fills in tokens that are not there",
    ),
    hf(
        "VideoPrismVisionModel",
        PRISM,
        layers={r"spatial.*": frame_by_frame(FRAMES)},
        skipped={r"temporal.*": ANY},
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
        layers={r".*layers\.\d\.0": frame_by_frame(2, 1)},
        skipped={r".*layers\.\d\.1": ANY},
        note="space and time in turn",
    ),
    lucid("vit_nd.ViTND, video", NESTED, refused="flex", note="flex attention"),
    lucid("vit_nd_rotary.ViTND, video", NESTED, refused="flex", note="flex attention"),
    Case(
        "torchvision",
        "swin3d_t",
        video_swin,
        layers={EVERY: shifted_boxes},
        inputs=partial(channels_first, 64, 96),
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
