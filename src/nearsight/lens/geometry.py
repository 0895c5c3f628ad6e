"""Which tokens of a model are patches, and where on the image they lie."""

import math
from typing import Any

from torch import nn

from nearsight.errors import InputError


def token_grid(model: nn.Module, image_size: tuple[int, int], num_tokens: int) -> tuple[tuple[int, int], int]:
    """((rows, columns) of the patch grid, number of prefix tokens) of a plain ViT for images of this size."""
    patch_embed: Any = getattr(model, "patch_embed", None)
    prefix: Any = getattr(model, "num_prefix_tokens", None)
    if prefix is not None and hasattr(patch_embed, "dynamic_feat_size"):  # timm
        rows, cols = patch_embed.dynamic_feat_size(image_size)
        num_prefix_tokens = int(prefix)
        if rows * cols + num_prefix_tokens == num_tokens:
            return (rows, cols), num_prefix_tokens
        raise InputError(
            f"{type(model).__name__} has {num_tokens} tokens in attention, but its {rows}×{cols} patches and "
            f"{num_prefix_tokens} prefix tokens are {rows * cols + num_prefix_tokens}"
        )
    for num_prefix_tokens in (1, 0):
        side = math.isqrt(num_tokens - num_prefix_tokens)
        if image_size[0] == image_size[1] and side * side + num_prefix_tokens == num_tokens:
            return (side, side), num_prefix_tokens
    raise InputError(
        f"the {num_tokens} tokens of {type(model).__name__} for images of {image_size[0]}×{image_size[1]} pixels "
        "fit no square grid with or without a CLS token, and the model does not say how many prefix tokens it has"
    )


def patch_grid(model: nn.Module) -> tuple[int, int] | None:
    """(rows, columns) of the patches of the images the model was made for, if it says so."""
    grid_size: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    return None if grid_size is None else (int(grid_size[0]), int(grid_size[1]))
