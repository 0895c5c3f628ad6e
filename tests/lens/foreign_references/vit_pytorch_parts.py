"""Models of vit-pytorch that pool, or whose patches look around within windows."""

from vit_references.checking import CLASS, ONE_TOKEN
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Mechanism, Size, cells, pooled, subsampled_queries, tokens

from foreign_references.case import Case
from foreign_references.places import (
    between,
    by_stage,
    in_windows,
    number_in,
    on_grid,
    patches,
    pooled_keys,
    with_axes,
)
from foreign_references.vit_pytorch_whole import SQUARE, WIDE, model

EVERY = r".*"
STAGE = number_in(r"layers\.(\d)")
STEPS = (4, 8, 16, 32)


def offset_pixels(stage_pattern: str, steps: tuple[int, ...]) -> Mechanism:
    """MobileViT: a window is the pixels at one place within every patch of 2×2."""
    stage_of = number_in(stage_pattern)

    def places(found: Recorded, image_size: Size) -> Layer:
        rows, cols = (side // steps[stage_of(found)] for side in image_size)
        parts = cells(rows, cols).reshape(rows // 2, 2, cols // 2, 2, 2).permute(1, 3, 0, 2, 4).reshape(4, -1, 2)
        return Layer((rows, cols), parts, parts, "b w h")

    return places


TWINS = {"num_classes": 5, "s3_depth": 1, "s4_depth": 1} | {
    f"s{stage}_{name}": value
    for stage, values in enumerate(((16, 4, 4), (24, 4, 4), (32, 4, 4), (40, 2, 2)), start=1)
    for name, value in zip(("emb_dim", "local_patch_size", "global_k"), values, strict=True)
}
CROSSED = {
    "image_size": 96,
    "num_classes": 5,
    "sm_dim": 32,
    "lg_dim": 48,
    "sm_patch_size": 12,
    "lg_patch_size": 16,
    "cross_attn_depth": 1,
    "depth": 1,
    **{f"{size}_enc_{name}": value for size in ("sm", "lg") for name, value in (("depth", 1), ("heads", 2))},
}
CONVOLUTIONAL = {
    "num_classes": 5,
    **{f"s{stage}_emb_dim": dim for stage, dim in ((1, 16), (2, 32), (3, 48))},
    "s2_heads": 2,
    "s3_heads": 3,
    "s2_depth": 1,
    "s3_depth": 2,
}
MOBILE = {
    "image_size": (128, 192),
    "dims": [24, 32, 40],
    "channels": [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48],
    "num_classes": 5,
    "depths": (1, 1, 1),
}
MAX = {"num_classes": 5, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}
LOOK = {
    "image_size": 96,
    "num_classes": 5,
    "dim": 48,
    "depth": 2,
    "patch_size": 16,
    "highres_patch_size": 12,
    "heads": 3,
    "dim_head": 16,
    "cross_attn_heads": 2,
    "cross_attn_dim_head": 16,
}
LEVIT = {
    "image_size": 224,
    "num_classes": 5,
    "dim": (32, 48, 64),
    "depth": 1,
    "heads": (2, 3, 4),
    "mlp_mult": 2,
    "dim_key": 8,
    "dim_value": 8,
}
SCALABLE = {
    "num_classes": 5,
    "dim": 16,
    "heads": (2, 2, 4, 4),
    "depth": (1, 1, 1, 1),
    "reduction_factor": (8, 4, 2, 1),
    "window_size": (4, 4, None, None),
}
JET = {**WIDE, "window_size": 2, "attn_layers": ["WA", "FA"]}
TOKENS_TO_TOKEN = {
    "image_size": 64,
    "num_classes": 5,
    "dim": 48,
    "depth": 2,
    "heads": 3,
    "mlp_dim": 64,
    "dim_head": 16,
}

CASES: list[Case] = [
    model(
        "t2t.T2TViT",
        TOKENS_TO_TOKEN,
        layers={
            r"to_patch_embedding\.3.*": patches(4),
            r"to_patch_embedding\.7.*": patches(8),
            r"transformer.*": patches(16, prefix=1),
        },
        image_size=(64, 64),
        gain=1,
        note="tokens unfolded, with overlap, between attentions",
    ),
    model(
        "pit.PiT",
        {**SQUARE, "patch_size": 8, "depth": (1, 1, 1)},
        layers={r"layers\.0.*": on_grid(15, 15, 1), r"layers\.2.*": on_grid(8, 8, 1), r"layers\.4.*": on_grid(4, 4, 1)},
        image_size=(64, 64),
        note="CLS, overlapping patches, grid pooled between stages",
    ),
    model(
        "levit.LeViT",
        LEVIT,
        layers={r"backbone\.[024].*": tokens(), r"backbone\.[13].*": subsampled_queries(2)},
        image_size=(224, 224),
        note="between stages every other patch asks",
    ),
    model(
        "cvt.CvT",
        CONVOLUTIONAL,
        layers={EVERY: with_axes(pooled(keys="to_kv.net.0"), "bh")},
        image_size=(72, 104),
        note="keys by strided convolution",
    ),
    model(
        "twins_svt.TwinsSVT",
        TWINS,
        layers={
            r".*\.0\.fn": by_stage(STAGE, [in_windows(step, 4 if step < 32 else 2, axes="bwh") for step in STEPS]),
            r".*\.2\.fn": by_stage(STAGE, [pooled_keys(step, 4 if step < 32 else 2, axes="bh") for step in STEPS]),
        },
        image_size=(128, 192),
        note="windows, and pooled keys in turn",
    ),
    model(
        "scalable_vit.ScalableViT",
        SCALABLE,
        layers={
            r".*layers\.\d\.0": by_stage(
                STAGE, [pooled_keys(step, ratio) for step, ratio in zip(STEPS, (8, 4, 2, 1), strict=True)]
            ),
            r".*layers\.\d\.4": by_stage(STAGE, [in_windows(4, 4), in_windows(8, 4), patches(16), patches(32)]),
        },
        image_size=(128, 192),
        note="pooled keys, and windows in turn",
    ),
    model(
        "crossformer.CrossFormer",
        {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "local_window_size": 4, "num_classes": 5},
        layers={
            r".*layers\.0\.0": by_stage(STAGE, [in_windows(step, 4) for step in STEPS]),
            r"layers\.[012].*layers\.0\.2": by_stage(
                STAGE,
                [in_windows(step, side, is_dilated=True) for step, side in zip(STEPS, (8, 4, 2), strict=False)],
            ),
        },
        skipped={r"layers\.3.*layers\.0\.2": ONE_TOKEN},
        image_size=(128, 256),
        note="windows of neighbours and of tokens far apart in turn",
    ),
    model(
        "max_vit.MaxViT",
        MAX,
        layers={
            r".*\.2\.fn": by_stage(STAGE, [in_windows(4, 4), in_windows(8, 4)]),
            r".*\.6\.fn": by_stage(STAGE, [in_windows(4, 4, is_dilated=True), in_windows(8, 4, is_dilated=True)]),
        },
        note="windows and dilated grids in turn",
    ),
    model(
        "max_vit_with_registers.MaxViT",
        MAX,
        layers={
            r".*\.1\.0": by_stage(STAGE, [in_windows(4, 4, prefix=4), in_windows(8, 4, prefix=4)]),
            r".*\.2\.0": by_stage(
                STAGE, [in_windows(4, 4, prefix=4, is_dilated=True), in_windows(8, 4, prefix=4, is_dilated=True)]
            ),
        },
        note="registers in every window",
    ),
    model(
        "nest.NesT",
        {
            "image_size": 64,
            "patch_size": 4,
            "num_classes": 5,
            "dim": 24,
            "heads": 3,
            "num_hierarchies": 3,
            "block_repeats": (1, 1, 2),
        },
        layers={EVERY: by_stage(STAGE, [in_windows(4, 4), in_windows(8, 4), in_windows(16, 4)])},
        image_size=(64, 64),
        note="blocks that merge between levels",
    ),
    model(
        "mobile_vit.MobileViT",
        MOBILE,
        layers={EVERY: offset_pixels(r"trunk\.(\d)", (8, 16, 32))},
        image_size=(128, 192),
        note="pixels at one place within every patch",
    ),
    model(
        "sep_vit.SepViT",
        {"num_classes": 5, "dim": 16, "heads": (1, 2, 3, 4), "depth": (1, 1, 1, 1)},
        layers={EVERY: by_stage(STAGE, [in_windows(step, 7, prefix=1) for step in STEPS])},
        skipped={r".*window_attend.*": ONE_TOKEN},
        image_size=(224, 224),
        used=0,
        note="windows with a token for each, which then look at each other",
    ),
    model(
        "regionvit.RegionViT",
        {"dim": (16, 24, 32, 40), "depth": (1, 1, 1, 1), "window_size": 4, "num_classes": 5},
        layers={EVERY: by_stage(STAGE, [patches(4 * step) for step in STEPS])},
        skipped={r".*#2": "fit no grid|lie at only"},
        image_size=(128, 256),
        note="regions; then each region and its tokens",
    ),
    model(
        "cross_vit.CrossViT",
        CROSSED,
        layers={r".*\.0\.0\.layers.*": patches(12, prefix=1), r".*\.0\.1\.layers.*": patches(16, prefix=1)},
        skipped={r".*fn": CLASS},
        image_size=(96, 96),
        note="patches of two sizes apart; CLS of each looks at the other",
    ),
    model(
        "look_vit.LookViT",
        LOOK,
        layers={
            r"layers\.\d\.0": patches(16),
            r"layers\.\d\.2": between(16, 12),
            r"layers\.\d\.3": between(12, 16),
        },
        image_size=(96, 96),
        note="patches of two sizes look at each other",
    ),
    model(
        "jet_vit.JetViT, windows",
        JET,
        layers={r".*WA": in_windows(16, 2), r".*FA": patches(16)},
        note="windows, then the whole image",
    ),
]
