"""Families whose patches look around within windows: their own partition of the image, applied to coordinates."""

import inspect
from types import ModuleType
from typing import Any

from timm.models import (
    davit,
    gcvit,
    hieradet_sam2,
    maxxvit,
    nest,
    swin_transformer,
    swin_transformer_v2,
    swin_transformer_v2_cr,
    vision_transformer_sam,
)

from vit_references.checking import CHANNELS, GLOBAL_QUERIES, OTHER_IMAGE, Family
from vit_references.mechanisms import (
    Mechanism,
    blocks_of_nest,
    halo,
    masked,
    pixels_of_patches,
    pixels_within_patches,
    plain_windows,
    pool_within_windows,
    pooled,
    tokens,
    unrolled,
    windows,
    windows_unless_whole,
)


def window_size(block: Any) -> Any:
    return block.window_size


def window_resolution(block: Any) -> Any:
    return block.window_resolution


def partition_size(block: Any) -> Any:
    return block.partition_size


def swin(module: ModuleType) -> Mechanism:
    return masked(windows(module.window_partition, window_size, shift=lambda block: block.shift_size))


BLOCKS = r"blocks\.\d+\.attn"
LAYERS = r"layers\.\d+\.blocks\.\d+\.attn"
STAGES = r"stages\.\d+\.blocks\.\d+\.attn"
TINY = {"window_size": 4, "embed_dim": 24, "depths": (2, 2, 2, 2)}
DAVIT = windows(davit.window_partition, window_size, channels_first=True)
MSRA = windows(plain_windows, window_resolution, axes="bw", channels_first=True)
SAM2 = windows(hieradet_sam2.window_partition, window_size)
SAM = windows(vision_transformer_sam.window_partition, window_size, axes="bwh")
# Until timm 1.0.30 a window got the global queries of some other image of its batch.
GCVIT_MIXES_IMAGES = "q_global.repeat(" in inspect.getsource(gcvit)

FAMILIES = [
    Family(
        "swin_tiny_patch4_window7_224",
        (112, 64),
        settings={**TINY, "img_size": (112, 64)},
        layers={LAYERS: swin(swin_transformer)},
        note="shifted windows, masks, padding",
    ),
    Family(
        "swinv2_tiny_window8_256",
        (128, 64),
        settings={**TINY, "img_size": (128, 64)},
        layers={LAYERS: swin(swin_transformer_v2)},
        note="shifted windows, masks, cosine attention",
    ),
    Family(
        "swinv2_cr_tiny_ns_224",
        (128, 64),
        settings={**TINY, "img_size": (128, 64)},
        layers={STAGES: swin(swin_transformer_v2_cr)},
        note="shifted windows, masks, cosine attention",
    ),
    Family(
        "davit_tiny",
        (112, 160),
        layers={r".*\.blocks\.\d+\.0\.attn": DAVIT},
        skipped={r".*\.blocks\.\d+\.1\.attn": CHANNELS},
        note="windows, padding",
    ),
    Family(
        "gcvit_xxtiny",
        (128, 64),
        settings={"img_size": (128, 64)},
        layers={r"stages\.([01]\.blocks\.0|[23]\.blocks\.\d+)\.attn": windows(gcvit.window_partition, window_size)},
        skipped={r"stages\.[01]\.blocks\.1\.attn": OTHER_IMAGE if GCVIT_MIXES_IMAGES else GLOBAL_QUERIES},
        note="windows; global queries where there is a single one",
    ),
    Family(
        "efficientvit_m0",
        (224, 224),
        layers={r".*\.attn": windows_unless_whole(MSRA, tokens(axes="b"), window_resolution)},
        note="windows; heads one after the other, a layer each",
    ),
    Family(
        "tiny_vit_5m_224",
        (224, 160),
        settings={"depths": (1, 1, 2, 1)},
        layers={STAGES: windows(plain_windows, window_size)},
        note="windows, padding, relative position bias",
    ),
    Family(
        "twins_svt_small",
        (128, 160),
        settings={"img_size": (128, 160), "depths": (2, 2, 2, 2)},
        layers={
            r"blocks\.\d+\.0\.attn": windows(plain_windows, lambda block: block.attn.ws, axes="b w h"),
            r"blocks\.\d+\.1\.attn": pooled(keys="sr"),
        },
        note="windows with padding, and pooled keys in turn",
    ),
    Family(
        "samvit_base_patch16",
        (160, 160),
        settings={
            "img_size": 160,
            "embed_dim": 96,
            "depth": 3,
            "num_heads": 3,
            "window_size": 4,
            "global_attn_indexes": (1,),
        },
        layers={BLOCKS: windows_unless_whole(SAM, tokens(axes="bh"), window_size)},
        gain=2,
        note="windows with padding, some blocks global",
    ),
    Family(
        "sam2_hiera_tiny",
        (224, 160),
        settings={"stages": (1, 2, 3, 2), "global_att_blocks": (4,), "embed_dim": 24},
        layers={BLOCKS: pool_within_windows(windows_unless_whole(SAM2, tokens(), window_size))},
        gain=15,
        note="windows with padding, queries pooled inside them, some blocks global",
    ),
    Family(
        "hiera_tiny_224",
        (128, 192),
        settings={"img_size": (128, 192), "stages": (1, 2, 2, 1), "embed_dim": 24},
        layers={BLOCKS: unrolled},
        gain=20,
        note="mask units in the order of `Unroll`, queries pooled inside them",
    ),
    Family(
        "maxvit_pico_rw_256",
        (128, 192),
        settings={"img_size": (128, 192)},
        layers={
            r".*\.attn_block\.attn": windows(maxxvit.window_partition, partition_size),
            r".*\.attn_grid\.attn": windows(maxxvit.grid_partition, partition_size),
        },
        note="windows and dilated grids in turn",
    ),
    Family(
        "nest_tiny",
        (64, 64),
        settings={"img_size": 64},
        layers={r".*transformer_encoder\.\d+\.attn": blocks_of_nest(nest.blockify)},
        note="blocks that merge between levels",
    ),
    Family(
        "mobilevit_xxs",
        (128, 192),
        layers={r".*\.attn": pixels_of_patches},
        gain=12,
        note="pixels at one place within every patch",
    ),
    Family(
        "tnt_s_patch16_224",
        settings={"img_size": (64, 96), "depth": 2},
        layers={r"blocks\.\d+\.attn_in": pixels_within_patches, r"blocks\.\d+\.attn_out": tokens(1)},
        note="pixels within a patch; patches and CLS",
    ),
    Family(
        "halonet26t",
        (256, 256),
        layers={r"stages\.\d+\.\d+\.self_attn": halo},
        gain=1,
        slow=True,
        note="blocks that look beyond their edges, padding",
    ),
]
