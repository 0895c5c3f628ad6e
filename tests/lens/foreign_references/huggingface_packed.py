"""Image towers of transformers that take the patches of all images one behind the other.

Their processors cut the patches out. Here that is part of the call, so that it is known where they come from.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Mechanism, Size, cells

from foreign_references.case import Case
from foreign_references.huggingface_whole import SMALL, SQUARE
from foreign_references.places import behind, cut, patches

EVERY = r".*"
ANY = ""
GRID = (4, 6)
"""Of the patches of 16 in an image of 64×96."""


def tower(family: str, name: str, config: str, settings: dict[str, Any], **case: Any) -> Case:
    """`family` is the folder in transformers, since not all towers are exported."""
    return Case("transformers", name, partial(_build, family, name.partition(",")[0], config, settings), **case)


def _build(family: str, name: str, config: str, settings: dict[str, Any]) -> nn.Module:
    module = {"idefics": "vision"}.get(family, f"modeling_{family}")
    models = importlib.import_module(f"transformers.models.{family}.{module}")
    configurations = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    built: nn.Module = getattr(models, name)(getattr(configurations, config)(**settings))
    return built


# How images become patches


def cut_out(images: Tensor, merged: int = 2, frames: int = 2) -> Tensor:
    """[patches of all images, values]: blocks of merged × merged patches in row-major order, an image as frames."""
    batch, channels, height, width = images.shape
    rows, cols = height // 16 // merged, width // 16 // merged
    video = images[:, None].expand(-1, frames, -1, -1, -1)
    parts = video.reshape(batch, frames, channels, rows, merged, 16, cols, merged, 16)
    return parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * frames * 16 * 16)


def packed(name: str = "hidden_states", merged: int = 2, frames: int = 2, **more: Any) -> Callable[..., Any]:
    """The call of a tower that takes patches, and how many there are along time, height and width."""

    def call(model: nn.Module, images: Tensor) -> Any:
        sizes = torch.tensor([[1, *GRID]] * len(images))
        return model(**{name: cut_out(images, merged, frames), "grid_thw": sizes}, **more)

    return call


def packed_squares(merged: int, lead: int) -> Callable[..., Any]:
    """The same, for towers that take the patches as small images, behind so many axes of size 1."""

    def call(model: nn.Module, images: Tensor) -> Any:
        sizes = torch.tensor([[1, *GRID]] * len(images))
        squares = cut_out(images, merged, 1).reshape(*[1] * lead, -1, 3, 16, 16)
        return model(pixel_values=squares, grid_thw=sizes)

    return call


def one_by_one(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call for each image of a batch."""
    return lambda model, images: [call(model, image[None]) for image in images]


# Where their tokens are


def blocks(found: Recorded, image_size: Size) -> Layer:
    """Blocks of 2×2 patches in row-major order."""
    return _of_image(found, cut(cells(*GRID), (2, 2)))


def window_by_window(merged: int) -> Mechanism:
    """Windows of 4×4 patches, of which the last of a row may be smaller; within them, blocks of merged × merged.

    Some layers have a softmax for each window, others one for all of them in this order.
    """
    windows = [cut(cells(*GRID)[:, columns], (merged, merged)) for columns in (slice(0, 4), slice(4, 6))]

    def places(found: Recorded, image_size: Size) -> Layer:
        if found.attention.shape[-1] == GRID[0] * GRID[1]:
            return _of_image(found, torch.cat(windows))
        return _of_image(found, windows[int(found.name.partition("#")[2] or 1) - 1])

    return places


def _of_image(found: Recorded, order: Tensor) -> Layer:
    tokens = behind(0, order)
    assert tokens.shape[1] == found.attention.shape[-1], found.name
    return Layer(GRID, tokens, tokens)


QWEN = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 3,
    "patch_size": 16,
    "intermediate_size": 64,
    "out_hidden_size": 48,
}
POSITIONS = {**QWEN, "num_position_embeddings": 16}
DEEP = {**POSITIONS, "deepstack_visual_indexes": [0]}
GLM = {**QWEN, "image_size": 64}
WINDOWED = {**QWEN, "window_size": 64, "fullatt_block_indexes": [1]}
MUSE = {**SMALL, "pos_emb_height": 4, "pos_emb_width": 4}
APART = {EVERY: blocks}
BY_WINDOW = {EVERY: window_by_window(2)}
BY_WINDOW_IN_ROWS = {EVERY: window_by_window(1)}
SQUARES = (64, 64)


def apart(family: str, name: str, config: str, settings: dict[str, Any], **case: Any) -> Case:
    """Images one behind the other, for each of which the tower computes its attention apart."""
    defaults: dict[str, Any] = {"layers": APART, "call": packed(), "packing": "apart"}
    return tower(family, name, config, settings, **(defaults | case))


CASES: list[Case] = [
    apart(
        "qwen2_vl",
        "Qwen2VisionTransformerPretrainedModel",
        "Qwen2VLVisionConfig",
        {"depth": 2, "embed_dim": 48, "hidden_size": 48, "num_heads": 3, "patch_size": 16, "mlp_ratio": 2},
        note="RoPE, patches in blocks of 2×2",
    ),
    apart(
        "qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
        WINDOWED,
        layers=BY_WINDOW,
        quick=True,
        note="RoPE, windows with a softmax each",
    ),
    apart("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig", DEEP),
    apart("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig", DEEP),
    apart("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig", POSITIONS),
    apart("qwen3_5_moe", "Qwen3_5MoeVisionModel", "Qwen3_5MoeVisionConfig", POSITIONS),
    apart("qwen4_exp", "Qwen4ExpVisionModel", "Qwen4ExpVisionConfig", POSITIONS),
    apart("cohere_compass", "CohereCompassVisionModel", "CohereCompassVisionConfig", DEEP),
    apart("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig", GLM),
    apart("glm4v_moe", "Glm4vMoeVisionModel", "Glm4vMoeVisionConfig", GLM),
    apart("glm_ocr", "GlmOcrVisionModel", "GlmOcrVisionConfig", GLM),
    apart("glm5_next", "Glm5NextVisionModel", "Glm5NextVisionConfig", {**GLM, "projection_intermediate_size": 64}),
    apart(
        "glm_image",
        "GlmImageVisionModel",
        "GlmImageVisionConfig",
        {name: value for name, value in GLM.items() if name != "out_hidden_size"},
        layers={EVERY: patches()},
        call=packed("pixel_values", 1, 1),
        note="patches row by row",
    ),
    apart(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        "Ernie4_5_VLMoeVisionConfig",
        {name: value for name, value in QWEN.items() if name != "out_hidden_size"},
        call=packed(frames=1),
    ),
    apart(
        "exaone4_5",
        "Exaone4_5_VisionModel",
        "Exaone4_5_VisionConfig",
        {**WINDOWED, "hidden_size": 64, "num_heads": 4, "num_key_value_heads": 2},
        layers=BY_WINDOW,
        note="two heads share keys; windows with a softmax each",
    ),
    apart(
        "hunyuan_vl",
        "HunYuanVLVisionTransformer",
        "HunYuanVLVisionConfig",
        {
            **SMALL,
            "out_hidden_size": 48,
            "text_hidden_size": 48,
            "max_image_size": 128,
            "min_image_size": 32,
            "img_max_token_num": 64,
        },
        layers={EVERY: patches()},
        call=packed("pixel_values", 1, 1),
    ),
    apart(
        "minimax_m3_vl",
        "MiniMaxM3VLVisionModel",
        "MiniMaxM3VLVisionConfig",
        {**SMALL, "hidden_size": 64, "num_attention_heads": 2, "image_size": 64},
        call=packed("pixel_values"),
        is_alone=True,
        quick=True,
        note="without flash attention images of a batch look at each other, so that each runs by itself",
    ),
    apart(
        "minimax_m3_vl",
        "MiniMaxM3VLVisionModel, one by one",
        "MiniMaxM3VLVisionConfig",
        {**SMALL, "hidden_size": 64, "num_attention_heads": 2, "image_size": 64},
        call=one_by_one(packed("pixel_values")),
        note="a call for each image",
    ),
    apart(
        "muse_glimmer",
        "MuseGlimmerVisionModel",
        "MuseGlimmerVisionConfig",
        MUSE,
        layers=BY_WINDOW_IN_ROWS,
        call=packed("pixel_values", 1),
    ),
    apart(
        "muse_spark",
        "MuseSparkVisionModel",
        "MuseSparkVisionConfig",
        MUSE,
        layers=BY_WINDOW_IN_ROWS,
        call=packed("pixel_values", 1),
    ),
    apart(
        "kimi_k25",
        "Kimi_K25VisionModel",
        "Kimi_K25VisionConfig",
        MUSE,
        layers={EVERY: patches()},
        call=packed_squares(1, 0),
        note="patches row by row",
    ),
    apart(
        "video_llama_3",
        "VideoLlama3VisionModel",
        "VideoLlama3VisionConfig",
        SMALL,
        call=lambda model, images: packed("pixel_values", 2, 1, merge_sizes=torch.tensor([2] * len(images)))(
            model, images
        ),
    ),
    apart(
        "paddleocr_vl",
        "PaddleOCRVisionModel",
        "PaddleOCRVisionConfig",
        SQUARE,
        layers={EVERY: patches()},
        call=packed_squares(1, 1),
    ),
    apart(
        "cosmos3_edge",
        "Cosmos3EdgeVisionModel",
        "Cosmos3EdgeVisionConfig",
        {**SMALL, "num_patches": 16},
        call=packed("pixel_values", 2, 1),
    ),
    tower(
        "pixtral",
        "PixtralVisionModel",
        "PixtralVisionConfig",
        {**SQUARE, "head_dim": 16},
        layers={EVERY: patches()},
        image_size=SQUARES,
        packing="together",
        note="RoPE; all images in one sequence, kept apart by a mask",
    ),
]
