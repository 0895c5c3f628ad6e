"""Image towers of open_clip: its own, those of timm in its clothes, and whole models called with images alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from vit_references.checking import CLASS
from vit_references.maps import Recorded
from vit_references.mechanisms import Size

from foreign_references.case import Case
from foreign_references.places import patches, shifted_windows

EVERY = r".*"
TOWER = {
    "image_size": (64, 96),
    "patch_size": 16,
    "width": 48,
    "layers": 2,
    "heads": 3,
    "mlp_ratio": 2.0,
    "output_dim": 32,
}
SQUARE = {**TOWER, "image_size": 64}
VISION = {"image_size": 64, "patch_size": 16, "width": 48, "layers": 2, "head_width": 16, "mlp_ratio": 2.0}
TEXT = {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1}
RESNET = {"layers": [1, 1, 1, 1], "output_dim": 32, "heads": 4, "image_size": 128, "width": 8}


def tower(**settings: Any) -> nn.Module:
    from open_clip.transformer import VisionTransformer

    built: nn.Module = VisionTransformer(**settings)
    return built


def resnet() -> nn.Module:
    from open_clip.modified_resnet import ModifiedResNet

    built: nn.Module = ModifiedResNet(**RESNET)
    return built


def whole(kind: str, **vision: Any) -> nn.Module:
    """A model of both towers; with no text given it computes what it can."""
    import open_clip

    settings: dict[str, Any] = {"embed_dim": 32, "vision_cfg": {**VISION, **vision}, "text_cfg": TEXT}
    if kind == "CoCa":
        settings["multimodal_cfg"] = {**TEXT, "mlp_ratio": 2}
    built: nn.Module = getattr(open_clip, kind)(**settings)
    return built


def of_timm(name: str, **trunk: Any) -> nn.Module:
    """open_clip makes these in their full size; the trunk is made again in a small one."""
    import timm
    from open_clip.timm_model import TimmModel

    built: nn.Module = TimmModel(name, embed_dim=32, pool="", proj="", image_size=64)
    built.trunk = timm.create_model(name, num_classes=32, **trunk)
    return built


def case(name: str, build: Callable[[], nn.Module], **more: Any) -> Case:
    return Case("open_clip", name, build, **more)


def swin_grid(found: Recorded, image_size: Size) -> Size:
    stage = int(found.name.split("layers.")[1][0])
    return image_size[0] // 2 ** (stage + 2), image_size[1] // 2 ** (stage + 2)


def shift(found: Recorded) -> Size:
    both = found.block.shift_size
    return (both, both) if isinstance(both, int) else tuple(both)


CLS = {EVERY: patches(prefix=1)}
SMALL_VIT = {"img_size": (64, 96), "depth": 2, "embed_dim": 48, "num_heads": 3}

CASES: list[Case] = [
    case("VisionTransformer", partial(tower, **TOWER), layers=CLS, quick=True, note="CLS"),
    case("VisionTransformer, mean", partial(tower, **TOWER, pool_type="avg", final_ln_after_pool=True), layers=CLS),
    case(
        "VisionTransformer, sines",
        partial(tower, **SQUARE, pos_embed_type="sin_cos_2d", no_ln_pre=True),
        layers=CLS,
        image_size=(64, 64),
    ),
    case("VisionTransformer, dropped patches", partial(tower, **TOWER, patch_dropout=0.5), layers=CLS),
    case(
        "VisionTransformer, normed queries",
        partial(tower, **TOWER, block_type="custom", qk_norm=True, scale_heads=True, scale_attn_inner=True),
        layers=CLS,
        gain=1,
    ),
    case(
        "VisionTransformer, pooled",
        partial(tower, **TOWER, attentional_pool=True, attn_pooler_queries=8, attn_pooler_heads=2),
        layers={r"transformer.*": patches(prefix=1)},
        skipped={r"attn_pool.*": CLASS},
        note="learned queries at the end",
    ),
    case(
        "VisionTransformer, pooled twice",
        partial(
            tower, **{**TOWER, "output_dim": 48}, attentional_pool="cascade", attn_pooler_queries=8, attn_pooler_heads=2
        ),
        layers={r"transformer.*": patches(prefix=1)},
        skipped={r"attn_pool.*": ""},
        note="learned queries at the end, and one that looks at them",
    ),
    case("CLIP", partial(whole, "CLIP"), layers=CLS, image_size=(64, 64), note="images alone"),
    case("CLIP, called by name", partial(whole, "CLIP"), layers=CLS, image_size=(64, 64), call="image"),
    case("CustomTextCLIP", partial(whole, "CustomTextCLIP"), layers=CLS, image_size=(64, 64), note="images alone"),
    case(
        "CoCa",
        partial(whole, "CoCa", attentional_pool=True, attn_pooler_queries=8, attn_pooler_heads=2),
        layers={r"visual\.transformer.*": patches(prefix=1)},
        skipped={r".*attn_pool.*": CLASS},
        image_size=(64, 64),
        call=lambda model, images: model.encode_image(images),
        note="images alone",
    ),
    case(
        "ModifiedResNet",
        resnet,
        layers={EVERY: patches(32, prefix=1)},
        image_size=(128, 128),
        note="attention at the end of a ResNet; its first token is the mean of the others",
    ),
    case("TimmModel of eva02", partial(of_timm, "eva02_tiny_patch14_224", **SMALL_VIT, patch_size=16), layers=CLS),
    case(
        "TimmModel of siglip",
        partial(of_timm, "vit_base_patch16_siglip_224", **SMALL_VIT),
        layers={r".*blocks.*": patches()},
        skipped={r".*attn_pool": CLASS},
    ),
    case("TimmModel of relpos", partial(of_timm, "vit_relpos_medium_patch16_cls_224", **SMALL_VIT), layers=CLS),
    case(
        "TimmModel of swin",
        partial(
            of_timm,
            "swin_base_patch4_window7_224",
            img_size=(64, 96),
            window_size=4,
            depths=(2, 2),
            num_heads=(2, 2),
            embed_dim=16,
        ),
        layers={EVERY: shifted_windows(swin_grid, lambda found: (4, 4), shift)},
        note="shifted windows, masks",
    ),
    case(
        "TimmModel of convnext",
        partial(of_timm, "convnext_atto"),
        refused="no attention was seen",
        note="no attention",
    ),
]
