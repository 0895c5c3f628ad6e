"""Image towers of multimodal models of transformers that take an axis of images."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vit_references.checking import CLASS
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Size, cells

from foreign_references.case import Case
from foreign_references.huggingface_packed import GRID, cut_out, tower
from foreign_references.huggingface_whole import SMALL, SQUARE
from foreign_references.huggingface_windows import whole_or_windows
from foreign_references.places import behind, patches

EVERY = r".*"
ANY = ""
SAM = {**SMALL, "image_size": 96, "window_size": 4, "global_attn_indexes": [1], "output_channels": 16, "mlp_dim": 64}
CLS = {EVERY: patches(prefix=1)}
SQUARES = (64, 64)


def row_by_row(name: str, coordinates: str = "") -> Callable[..., Any]:
    """The call of a tower that takes [images, patches, values], and perhaps (column, row) of each patch."""

    def call(model: nn.Module, images: Tensor) -> Any:
        given = {name: cut_out(images, 1, 1).unflatten(0, (len(images), -1))}
        if coordinates:
            given[coordinates] = cells(*GRID).long().flip(-1).reshape(1, -1, 2).expand(len(images), -1, -1)
        return model(**given)

    return call


def naflex(model: nn.Module, images: Tensor) -> Any:
    sizes = torch.tensor([GRID] * len(images))
    values = cut_out(images, 1, 1).unflatten(0, (len(images), -1))
    return model(pixel_values=values, pixel_attention_mask=torch.ones(values.shape[:2]).long(), spatial_shapes=sizes)


def with_coordinates(model: nn.Module, images: Tensor) -> Any:
    """Pix2Struct writes row and column, from 1, before the values of each patch."""
    values = cut_out(images, 1, 1).unflatten(0, (len(images), -1))
    places = (cells(*GRID).float() + 1).reshape(1, -1, 2).expand(len(images), -1, -1)
    return model(torch.cat([places, values], dim=-1))


def with_mask(model: nn.Module, images: Tensor) -> Any:
    return model(pixel_values=images, patch_attention_mask=torch.ones(len(images), 4, 4, dtype=torch.bool))


def two_tiles(model: nn.Module, images: Tensor) -> Any:
    """Mllama takes an image of two squares side by side as two tiles."""
    tiles = torch.stack(images.chunk(2, dim=-1), dim=1)[:, None]
    ones = torch.ones(len(images), 1, dtype=torch.long)
    mask = torch.ones(len(images), 1, 2, dtype=torch.long)
    return model(pixel_values=tiles, aspect_ratio_ids=2 * ones, aspect_ratio_mask=mask)


def tiles(found: Recorded, image_size: Size) -> Layer:
    """Two tiles of 4×4 patches side by side, each behind a CLS and before padding to a multiple of 8."""
    parts = []
    for start in (0, 4):
        tile = behind(1, cells(4, 8)[:, start : start + 4])
        parts.append(torch.cat([tile, torch.full((1, -tile.shape[1] % 8, 2), math.nan, dtype=torch.float64)], dim=1))
    tokens = torch.cat(parts, dim=1)
    assert tokens.shape[1] == found.attention.shape[-1], found.name
    return Layer((4, 8), tokens, tokens)


CASES: list[Case] = [
    tower(
        "gemma4",
        "Gemma4VisionModel",
        "Gemma4VisionConfig",
        {**SMALL, "num_key_value_heads": 3, "head_dim": 16, "position_embedding_size": 64, "pooling_kernel_size": 2},
        layers={EVERY: patches()},
        call=row_by_row("pixel_values", "pixel_position_ids"),
        note="patches cut out beforehand",
    ),
    tower(
        "molmo2",
        "Molmo2VisionModel",
        "Molmo2VisionConfig",
        {**SMALL, "num_key_value_heads": 3, "head_dim": 16, "image_size": [64, 96], "num_position_embeddings": 24},
        layers={EVERY: patches()},
        call=row_by_row("pixel_values"),
        note="patches cut out beforehand",
    ),
    tower(
        "siglip2",
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        {**SMALL, "num_patches": 16},
        layers={r"encoder.*": patches()},
        skipped={r"head.*": CLASS},
        call=naflex,
        note="NaFlex: patches cut out beforehand, with a mask",
    ),
    tower(
        "pix2struct",
        "Pix2StructVisionModel",
        "Pix2StructVisionConfig",
        {
            "hidden_size": 48,
            "patch_embed_hidden_size": 768,
            "d_ff": 64,
            "d_kv": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "seq_len": 32,
            "initializer_range": 0.02,
        },
        layers={EVERY: patches()},
        call=with_coordinates,
        gain=10,
        note="patches with their row and column",
    ),
    tower(
        "kosmos2_5",
        "Kosmos2_5VisionModel",
        "Kosmos2_5VisionConfig",
        {
            "hidden_size": 48,
            "patch_embed_hidden_size": 768,
            "intermediate_size": 64,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
        },
        layers={EVERY: patches()},
        call=with_coordinates,
        note="patches with their row and column",
    ),
    tower(
        "mllama",
        "MllamaVisionModel",
        "MllamaVisionConfig",
        {
            **SMALL,
            "num_global_layers": 1,
            "attention_heads": 3,
            "image_size": 64,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2]],
            "intermediate_layers_indices": [0],
            "vision_output_dim": 96,
        },
        layers={EVERY: tiles},
        image_size=(64, 128),
        call=two_tiles,
        note="two tiles in one sequence, each with CLS and padding",
    ),
    tower(
        "llama4",
        "Llama4VisionModel",
        "Llama4VisionConfig",
        {
            **SQUARE,
            "intermediate_size": 192,
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "pixel_shuffle_ratio": 0.5,
        },
        layers={EVERY: patches(suffix=1)},
        image_size=SQUARES,
        note="RoPE, CLS behind the patches",
    ),
    tower(
        "idefics2",
        "Idefics2VisionTransformer",
        "Idefics2VisionConfig",
        SQUARE,
        layers={EVERY: patches()},
        image_size=SQUARES,
        call=with_mask,
        note="with a mask of patches",
    ),
    tower(
        "idefics",
        "IdeficsVisionTransformer",
        "IdeficsVisionConfig",
        {**{name: value for name, value in SQUARE.items() if name != "hidden_size"}, "embed_dim": 48},
        layers=CLS,
        image_size=SQUARES,
    ),
    tower("kosmos2", "Kosmos2VisionModel", "Kosmos2VisionConfig", SQUARE, layers=CLS, image_size=SQUARES),
    tower(
        "bridgetower",
        "BridgeTowerVisionModel",
        "BridgeTowerVisionConfig",
        {"hidden_size": 128, "num_hidden_layers": 2, "patch_size": 16, "image_size": 64},
        layers=CLS,
        image_size=SQUARES,
    ),
    tower(
        "qianfan_ocr",
        "QianfanOCRVisionModel",
        "QianfanOCRVisionConfig",
        {**SMALL, "image_size": (64, 64), "patch_size": (16, 16)},
        layers=CLS,
        image_size=SQUARES,
    ),
    tower(
        "step3p7",
        "Step3p7VisionModel",
        "Step3p7VisionConfig",
        {**SQUARE, "hidden_size": 64, "num_attention_heads": 2, "mlp_ratio": 2.0, "max_position_embeddings": 16},
        layers={EVERY: patches()},
        image_size=SQUARES,
    ),
    tower(
        "ovis2",
        "Ovis2VisionModel",
        "Ovis2VisionConfig",
        {**SQUARE, "num_visual_indicator_tokens": 5, "vocab_size": 32, "hidden_stride": 1},
        layers={r"transformer.*": patches()},
        skipped={"": ANY},
        image_size=SQUARES,
        note="a softmax over visual words at the end",
    ),
    tower(
        "got_ocr2",
        "GotOcr2VisionEncoder",
        "GotOcr2VisionConfig",
        SAM,
        layers={EVERY: whole_or_windows("bwh", "bh")},
        image_size=(96, 96),
        note="as SAM's",
    ),
    tower("radio", "RadioModel", "RadioConfig", SQUARE, layers={EVERY: patches(prefix=10)}, image_size=SQUARES),
    tower(
        "sapiens2", "Sapiens2Backbone", "Sapiens2Config", SQUARE, layers={EVERY: patches(prefix=9)}, image_size=SQUARES
    ),
    tower(
        "mgp_str",
        "MgpstrModel",
        "MgpstrConfig",
        {
            "image_size": [32, 128],
            "patch_size": 4,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "mlp_ratio": 2,
        },
        layers={EVERY: patches(4, prefix=1)},
        image_size=(32, 128),
    ),
]
