"""Detectors of transformers: an encoder behind a ResNet, or windows, and decoders whose queries are no patches."""

from functools import partial
from typing import Any

import torch
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Mechanism, Size, cells

from foreign_references.case import Case
from foreign_references.huggingface_heads import ANY, EVERY, task
from foreign_references.huggingface_whole import SMALL
from foreign_references.places import behind, cut, in_windows, patches

DECODER = {r".*decoder.*": ANY}
LARGE = (128, 192)
PATCHES_OF_32 = {r"encoder\..*": patches(32)}


def resnet(library: Any, kind: str = "ResNetConfig", **more: Any) -> Any:
    small = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return getattr(library, kind)(**small, **more)


def detr(library: Any, width: str = "d_model", indices: tuple[int, ...] = (4,), **more: Any) -> dict[str, Any]:
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    plain = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 5}
    return {"backbone_config": resnet(library, out_indices=list(indices)), width: 32, **sizes, **plain, **more}


def real_time(library: Any, backbone: Any, channels: list[int]) -> dict[str, Any]:
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
    }
    return {
        "backbone_config": backbone,
        "encoder_in_channels": channels,
        "encoder_hidden_dim": 32,
        "d_model": 32,
        "decoder_in_channels": [32, 32, 32],
        "num_queries": 5,
        "num_denoising": 0,
        **sizes,
    }


def windows_in_a_row(side: int, prefix: int = 0) -> Mechanism:
    """The whole image, window by window, each behind its own other tokens."""

    def places(found: Recorded, image_size: Size) -> Layer:
        grid = image_size[0] // 16, image_size[1] // 16
        parts = cut(cells(*grid), (side, side))
        tokens = torch.cat([behind(prefix, part) for part in parts], dim=1)
        assert tokens.shape[1] == found.attention.shape[-1]
        return Layer(grid, tokens, tokens)

    return places


CASES: list[Case] = [
    task("DetrModel", detr, layers=PATCHES_OF_32, skipped=DECODER, image_size=LARGE, note="behind a ResNet"),
    task("ConditionalDetrModel", detr, layers=PATCHES_OF_32, skipped=DECODER, image_size=LARGE, note="behind a ResNet"),
    task(
        "DabDetrModel",
        partial(detr, width="hidden_size"),
        layers=PATCHES_OF_32,
        skipped=DECODER,
        image_size=LARGE,
        note="behind a ResNet",
    ),
    task(
        "TableTransformerModel",
        detr,
        layers={r"encoder\..*": patches(32, axes="bh")},
        skipped=DECODER,
        image_size=LARGE,
        note="behind a ResNet",
    ),
    task(
        "DeformableDetrModel",
        partial(detr, indices=(2, 3, 4), num_feature_levels=3),
        skipped={EVERY: ANY},
        image_size=LARGE,
        refused="from one token alone",
        note="weights from one token, for places it chooses",
    ),
    task(
        "RTDetrModel",
        lambda library: real_time(library, resnet(library, "RTDetrResNetConfig", out_indices=[2, 3, 4]), [16, 24, 32]),
        layers={r"encoder\..*": patches(32)},
        skipped={r"(decoder|encoder_attn).*": ANY},
        image_size=LARGE,
        note="one layer, on the coarsest of three grids",
    ),
    task(
        "RTDetrV2Model",
        lambda library: real_time(library, resnet(library, "RTDetrResNetConfig", out_indices=[2, 3, 4]), [16, 24, 32]),
        layers={r"encoder\..*": patches(32)},
        skipped=DECODER,
        image_size=LARGE,
    ),
    task(
        "LwDetrViTBackbone",
        lambda library: {
            **SMALL,
            "image_size": 128,
            "pretrain_image_size": 128,
            "num_windows": 4,
            "window_block_indices": [0],
            "out_indices": [1, 2],
        },
        config="LwDetrViTConfig",
        layers={r".*layer\.0.*": in_windows(16, 4), r".*layer\.1.*": windows_in_a_row(4)},
        image_size=(128, 128),
        note="windows, then all windows in a row",
    ),
    task(
        "RfDetrDinov2Backbone",
        lambda library: {
            **SMALL,
            "image_size": 128,
            "mlp_ratio": 2,
            "num_windows": 2,
            "window_block_indexes": [0],
            "out_indices": [1, 2],
        },
        config="RfDetrDinov2Config",
        layers={r".*layer\.0.*": in_windows(16, 4, prefix=1), r".*layer\.1.*": windows_in_a_row(4, prefix=1)},
        image_size=(128, 128),
        note="windows with a CLS each, then all windows in a row",
    ),
]
