"""Image models of torchvision."""

from functools import partial
from typing import Any

from torch import nn
from vit_references.maps import Recorded
from vit_references.mechanisms import Size

from foreign_references.case import Case
from foreign_references.places import by_stage, in_windows, number_in, patches, shifted_windows, with_axes

EVERY = r".*"
UNEVEN = (64, 72)
"""Windows of 4 do not divide the grids of 16×18 and 8×9."""


def vit(patch: int, **settings: Any) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(4 * patch, patch, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=64, **settings)


def conv_stem() -> nn.Module:
    from torchvision.models.vision_transformer import ConvStemConfig

    return vit(16, conv_stem_configs=[ConvStemConfig(8, 3, 2), ConvStemConfig(8, 3, 2), ConvStemConfig(8, 3, 4)])


def swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer

    second: dict[str, Any] = (
        {"block": swin_transformer.SwinTransformerBlockV2, "downsample_layer": swin_transformer.PatchMergingV2}
        if version == 2
        else {}
    )
    return swin_transformer.SwinTransformer([4, 4], 24, [2, 2], [2, 3], [4, 4], **second)


def maxvit() -> nn.Module:
    from torchvision.models.maxvit import MaxVit

    return MaxVit(
        input_size=(128, 128),
        stem_channels=8,
        partition_size=4,
        block_channels=[16, 24],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=5,
    )


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    built: nn.Module = resnet18()
    return built


def grid_of_swin(found: Recorded, image_size: Size) -> Size:
    """Features 1 and 3 are stages; merging rounds up."""
    step = 4 if found.name.startswith("features.1") else 8
    return -(-image_size[0] // step), -(-image_size[1] // step)


def shift_of_swin(found: Recorded) -> Size:
    rows, cols = found.module.shift_size
    return rows, cols


def case(name: str, build: Any, **more: Any) -> Case:
    return Case("torchvision", name, build, **more)


SWIN = {EVERY: shifted_windows(grid_of_swin, lambda found: (4, 4), shift_of_swin)}
STAGE = number_in(r"blocks\.(\d)")

CASES: list[Case] = [
    case("vit_b_16", partial(vit, 16), layers={EVERY: patches(16, 1)}, image_size=(64, 64), quick=True, note="CLS"),
    case("vit_b_32", partial(vit, 32), layers={EVERY: patches(32, 1)}, image_size=(128, 128)),
    case("vit_h_14", partial(vit, 14), layers={EVERY: patches(14, 1)}, image_size=(56, 56)),
    case("vit with stem", conv_stem, layers={EVERY: patches(16, 1)}, image_size=(64, 64), note="behind convolutions"),
    case("swin_t", partial(swin, 1), layers=SWIN, image_size=UNEVEN, note="shifted windows, masks, padding"),
    case("swin_v2_t", partial(swin, 2), layers=SWIN, image_size=UNEVEN, note="the same with cosine attention"),
    case(
        "maxvit_t",
        maxvit,
        layers={
            r".*window_attention.*": by_stage(STAGE, [with_axes(in_windows(step, 4), "b w h") for step in (4, 8)]),
            r".*grid_attention.*": by_stage(
                STAGE, [with_axes(in_windows(step, 4, is_dilated=True), "b w h") for step in (4, 8)]
            ),
        },
        image_size=(128, 128),
        note="windows and dilated grids in turn",
    ),
    case("resnet18", resnet, refused="no attention was seen", note="no attention"),
]
