"""Models of transformers whose patches look around within windows."""

import math
from typing import Any

from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import (
    Mechanism,
    Size,
    cells,
    plain_windows,
    pool_within_windows,
    tokens,
    windows,
    windows_unless_whole,
)

from foreign_references.case import Case
from foreign_references.huggingface_whole import SMALL, model
from foreign_references.places import number_in, shifted_windows

EVERY = r".*"
UNEVEN = (64, 72)
"""With patches of 4, windows of 4 do not divide the grid: 16×18, then 8×9."""
TINY_SWIN = {"patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4}


def swin(patch: int, stage: str, block: str, halving: bool = True) -> Mechanism:
    """Windows of 4 tokens that every other block shifts by 2."""
    stage_of, block_of = number_in(stage), number_in(block)

    def grid_of(found: Recorded, image_size: Size) -> Size:
        step = patch * 2 ** (stage_of(found) if halving else 0)
        return math.ceil(image_size[0] / step), math.ceil(image_size[1] / step)

    return shifted_windows(grid_of, lambda found: (4, 4), lambda found: (2 * (block_of(found) % 2),) * 2)


SWIN = swin(4, r"layers\.(\d+)\.", r"blocks\.(\d+)\.")
SWIN2SR = swin(1, r"stages\.(\d+)\.", r"layers\.(\d+)\.", halving=False)


def window_size(block: Any) -> Any:
    return block.window_size


def whole_or_windows(axes: str, whole_axes: str, channels_first: bool = False) -> Mechanism:
    """Windows in some blocks, padded, and the whole image in others."""
    parts = windows(plain_windows, window_size, axes=axes, channels_first=channels_first)
    return windows_unless_whole(parts, tokens(axes=whole_axes), window_size)


def unrolled(found: Recorded, image_size: Size) -> Layer:
    """Hiera keeps its tokens in an order in which pooling is a maximum over the first axis."""
    from transformers.models.hiera import modeling_hiera

    stage, number = number_in(r"stages\.(\d+)\.")(found), number_in(r"layers\.(\d+)\.")(found)
    rows, cols = (side // 4 for side in image_size)
    schedule = found.model.unroll_schedule
    places = modeling_hiera.unroll(cells(rows, cols).reshape(1, -1, 2), image_size, (4, 4), schedule)
    strides = [layer.query_stride for part in found.model.encoder.stages for layer in part.layers]
    before = sum(len(part.layers) for part in found.model.encoder.stages[:stage]) + number
    scale = 1
    for stride in strides[:before]:
        places = places.reshape(stride, -1, 2).mean(0)
        scale *= math.isqrt(stride)
    places = (places.reshape(-1, 2) + 0.5) / scale - 0.5
    attention = found.module
    num_windows = len(places) // (attention.query_stride * attention.window_size) if attention.use_mask_unit_attn else 1
    keys = places.reshape(-1, num_windows, 2).transpose(0, 1)
    queries = keys.reshape(num_windows, attention.query_stride, -1, 2).mean(1)
    return Layer((rows // scale, cols // scale), queries, keys, "b h w")


def pixels_at_one_place(found: Recorded, image_size: Size) -> Layer:
    """MobileViT: a window is the pixels at one place within every patch of 2×2."""
    stage = number_in(r"encoder\.layer\.(\d)")(found)
    rows, cols = (side // 2 ** (stage + 1) for side in image_size)
    places = cells(rows, cols).reshape(rows // 2, 2, cols // 2, 2, 2).permute(1, 3, 0, 2, 4).reshape(4, -1, 2)
    return Layer((rows, cols), places, places, "bw h")


TINY_SAM = {
    **SMALL,
    "image_size": 96,
    "window_size": 4,
    "global_attn_indexes": [1],
    "output_channels": 16,
    "num_pos_feats": 16,
    "mlp_dim": 64,
}
TINY_SAM2 = {
    "image_size": [224, 160],
    "hidden_size": 16,
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "blocks_per_stage": [1, 2, 3, 2],
    "window_size_per_stage": [8, 4, 14, 7],
    "global_attention_blocks": [4],
}

CASES: list[Case] = [
    model("SwinModel", {**TINY_SWIN, "image_size": UNEVEN}, layers={EVERY: SWIN}, image_size=UNEVEN, quick=True),
    model("Swinv2Model", {**TINY_SWIN, "image_size": UNEVEN}, layers={EVERY: SWIN}, image_size=UNEVEN),
    model("DonutSwinModel", {**TINY_SWIN, "image_size": UNEVEN}, layers={EVERY: SWIN}, image_size=UNEVEN),
    model("MaskFormerSwinModel", {**TINY_SWIN, "image_size": 64}, layers={EVERY: SWIN}, image_size=UNEVEN),
    model(
        "Swin2SRModel",
        {**TINY_SWIN, "patch_size": 1, "image_size": 32},
        layers={EVERY: SWIN2SR},
        image_size=(24, 32),
        note="a token per pixel",
    ),
    model("SamVisionModel", TINY_SAM, layers={EVERY: whole_or_windows("bw h", "b h")}, image_size=(96, 96)),
    model("SamHQVisionModel", TINY_SAM, layers={EVERY: whole_or_windows("bw h", "b h")}, image_size=(96, 96)),
    model(
        "VitDetModel",
        {**SMALL, "mlp_ratio": 2, "window_block_indices": [0], "window_size": 4, "image_size": 96},
        layers={EVERY: whole_or_windows("bwh", "bh", channels_first=True)},
        image_size=(96, 96),
        note="windows with padding, then the whole image",
    ),
    model(
        "HieraModel",
        {"image_size": [128, 192], "embed_dim": 16, "depths": [1, 2, 2, 1], "num_heads": [1, 2, 4, 8]},
        layers={EVERY: unrolled},
        image_size=(128, 192),
        gain=20,
        note="mask units in the order of `unroll`, queries pooled inside them",
    ),
    model(
        "Sam2HieraDetModel",
        TINY_SAM2,
        config="Sam2HieraDetConfig",
        layers={EVERY: pool_within_windows(whole_or_windows("bw h", "b h"))},
        image_size=(224, 160),
        used=-1,
        gain=15,
        note="windows with padding, queries pooled inside them; a softmax whose weights are never used",
    ),
    model(
        "MobileViTModel",
        {
            "image_size": 64,
            "hidden_sizes": [24, 32, 40],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 48],
            "num_attention_heads": 2,
        },
        layers={EVERY: pixels_at_one_place},
        image_size=(128, 192),
        gain=12,
        note="pixels at one place within every patch",
    ),
]
