"""Where the tokens of each kind of attention are, from the code of the architecture that has it.

A mechanism is a function from a recorded attention and the size of the image to a `Layer`. Coordinates are
(row, column) in cells of the layer's grid over the whole image.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit_references.dense import Layer
from vit_references.maps import Recorded

Size = tuple[int, int]
Mechanism = Callable[[Recorded, Size], Layer]
Partition = Callable[[Tensor, Any], Any]


def cells(rows: int, cols: int) -> Tensor:
    """[rows, cols, 2]."""
    axes = torch.arange(rows, dtype=torch.float64), torch.arange(cols, dtype=torch.float64)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def token_grid(num_patches: int, image_size: Size) -> Size:
    """Rows and columns of so many patches: those whose shape is most like the image's."""
    pairs = [(rows, num_patches // rows) for rows in range(1, num_patches + 1) if num_patches % rows == 0]
    return min(pairs, key=lambda pair: abs(math.log(pair[0] / pair[1] * image_size[1] / image_size[0])))


def _with_prefix(places_W2: Tensor, prefix: int) -> Tensor:
    return torch.cat([torch.full((1, prefix, 2), math.nan, dtype=torch.float64), places_W2.reshape(1, -1, 2)], dim=1)


# Attention over the whole image


def tokens(prefix: int = 0, axes: str = "b h") -> Mechanism:
    """Row-major patches behind some other tokens."""

    def places(found: Recorded, image_size: Size) -> Layer:
        num_queries, num_keys = found.attention.shape[-2:]
        assert num_queries == num_keys, f"{found.name} pools its queries or keys"
        grid = token_grid(num_queries - prefix, image_size)
        patches = _with_prefix(cells(*grid), prefix)
        return Layer(grid, patches, patches, axes)

    return places


def pooled(prefix: int = 0, queries: str = "", keys: str = "") -> Mechanism:
    """Queries and keys by convolutions of the attention that have these names, where it has them."""

    def places(found: Recorded, image_size: Size) -> Layer:
        shape = found.block_input.shape
        grid = token_grid(shape[1] - prefix, image_size) if len(shape) == 3 else tuple(shape[2:])
        parts = {name: part for name, part in found.module.named_modules() if name}
        lines = [
            [window_centres(side, parts.get(name), axis) for axis, side in enumerate(grid)] for name in (queries, keys)
        ]
        finer = max(lines, key=lambda axes: math.prod(map(len, axes)))
        query, key = (
            torch.stack(torch.meshgrid(*map(_in_cells, axes, finer), indexing="ij"), dim=-1).reshape(1, -1, 2)
            for axes in lines
        )
        return Layer((len(finer[0]), len(finer[1])), _with_prefix(query, prefix), _with_prefix(key, prefix))

    return places


def window_centres(side: int, convolution: Any, axis: int) -> list[float]:
    """Where the windows of a convolution lie along an axis: each at the centre of those cells it sees that exist."""
    if convolution is None or convolution.stride[axis] == 1:  # a window for each cell, which stays where it is
        return [float(cell) for cell in range(side)]
    size, step, margin, spread = (
        getattr(convolution, name)[axis] for name in ("kernel_size", "stride", "padding", "dilation")
    )
    centres, start = [], -margin
    while start + spread * (size - 1) < side + margin:
        seen = [cell for cell in range(start, start + spread * size, spread) if 0 <= cell < side]
        centres.append(sum(seen) / len(seen))
        start += step
    return centres


def _in_cells(positions: list[float], lines: list[float]) -> Tensor:
    """Which line of the layer's own grid is at each position; between two of them in proportion."""
    assert min(positions) >= lines[0]
    assert max(positions) <= lines[-1]
    return torch.from_numpy(np.interp(positions, lines, range(len(lines))))


def subsampled_queries(stride: int) -> Mechanism:
    """Queries are every other patch (not a mean of several)."""

    def places(found: Recorded, image_size: Size) -> Layer:
        grid = token_grid(found.attention.shape[-1], image_size)
        keys = cells(*grid)
        return Layer(grid, keys[::stride, ::stride].reshape(1, -1, 2), keys.reshape(1, -1, 2))

    return places


def pooled_along_sequence(found: Recorded, image_size: Size) -> Layer:
    """Next-ViT pools its keys over runs of tokens in row-major order, as if an image were a line."""
    grid = token_grid(found.attention.shape[-2], image_size)
    queries = cells(*grid).reshape(1, -1, 2)
    keys = queries.reshape(1, found.attention.shape[-1], -1, 2).mean(2)
    return Layer(grid, queries, keys)


def pooled_by_module(found: Recorded, image_size: Size) -> Layer:
    """Keys by adaptive pooling (PVT v2 linear): each is the mean of the cells PyTorch takes it from."""
    grid = token_grid(found.attention.shape[-2], image_size)
    image = cells(*grid).permute(2, 0, 1)[None]
    keys = found.module.pool(image).flatten(2).transpose(1, 2)
    return Layer(grid, cells(*grid).reshape(1, -1, 2), keys)


# Windows


def pool_within_windows(mechanism: Mechanism) -> Mechanism:
    """Queries are pooled 2×2 inside each square window (SAM 2's Hiera, where a stage begins)."""

    def places(found: Recorded, image_size: Size) -> Layer:
        layer = mechanism(found, image_size)
        if layer.keys_WM2.shape[1] == found.attention.shape[-2]:
            return layer
        side = math.isqrt(layer.keys_WM2.shape[1])
        image = layer.keys_WM2.reshape(-1, side, side, 2).permute(0, 3, 1, 2)
        return replace(layer, queries_WN2=F.avg_pool2d(image, 2).flatten(2).transpose(1, 2))

    return places


def windows(
    partition: Partition,
    size: Callable[[Any], Any],
    *,
    shift: Callable[[Any], Size] = lambda block: (0, 0),
    axes: str = "bw h",
    channels_first: bool = False,
) -> Mechanism:
    """Windows made by the family's own `partition`, after its cyclic shift, with padding below and to the right.

    `size` and `shift` read the window's size and the shift off the block.
    """

    def places(found: Recorded, image_size: Size) -> Layer:
        shape = found.block_input.shape
        if len(shape) == 3:
            grid = token_grid(shape[1], image_size)
        else:
            grid = (shape[2], shape[3]) if channels_first else (shape[1], shape[2])
        window = size(found.block)
        sides = (window, window) if isinstance(window, int) else window
        image = torch.roll(cells(*grid), tuple(-step for step in shift(found.block)), (0, 1))
        image = F.pad(image, (0, 0, 0, -grid[1] % sides[1], 0, -grid[0] % sides[0]), value=math.nan)
        parts = partition(image[None], window)
        parts = parts[0] if isinstance(parts, tuple) else parts
        parts = parts.reshape(-1, found.attention.shape[-1], 2)
        return Layer(grid, parts, parts, axes)

    return places


def masked(mechanism: Mechanism) -> Mechanism:
    """With the mask a Swin block keeps for its shifted windows."""

    def places(found: Recorded, image_size: Size) -> Layer:
        layer = mechanism(found, image_size)
        mask = found.block.attn_mask
        return layer if mask is None else replace(layer, allowed_WNM=mask > -50)

    return places


def plain_windows(image_BHWC: Tensor, side: int) -> Tensor:
    """For families that have no function of their own for it."""
    _, height, width, channels = image_BHWC.shape
    parts = image_BHWC.reshape(-1, height // side, side, width // side, side, channels).transpose(2, 3)
    return parts.reshape(-1, side * side, channels)


def windows_unless_whole(mechanism: Mechanism, whole: Mechanism, size: Callable[[Any], Any]) -> Mechanism:
    """Windows where the block has them and they are smaller than its map, the whole image elsewhere."""

    def places(found: Recorded, image_size: Size) -> Layer:
        window = size(found.block)
        area = window * window if isinstance(window, int) else math.prod(window)
        return mechanism(found, image_size) if area and found.attention.shape[-1] == area else whole(found, image_size)

    return places


# Families with a mechanism of their own


def unrolled(found: Recorded, image_size: Size) -> Layer:
    """Hiera keeps its tokens in an order in which pooling is a maximum over the first axis."""
    number = int(found.name.split(".")[1])
    rows, cols = found.model.tokens_spatial_shape
    places = found.model.unroll(cells(rows, cols).reshape(1, -1, 2))
    for earlier in found.model.blocks[:number]:
        stride = earlier.attn.q_stride
        places = places.reshape(stride, -1, 2).mean(0)
        rows, cols = (side // math.isqrt(stride) for side in (rows, cols))
    scale = found.model.tokens_spatial_shape[0] / rows
    places = (places.reshape(-1, 2) + 0.5) / scale - 0.5
    attention = found.module
    num_windows = len(places) // (attention.q_stride * attention.window_size) if attention.use_mask_unit_attn else 1
    keys = places.reshape(-1, num_windows, 2).transpose(0, 1)
    queries = keys.reshape(num_windows, attention.q_stride, -1, 2).mean(1)
    return Layer((rows, cols), queries, keys, "b h w" if attention.use_mask_unit_attn else "b h")


def blocks_of_nest(blockify: Callable[[Tensor, int], Tensor]) -> Mechanism:
    def places(found: Recorded, image_size: Size) -> Layer:
        level = found.model.get_submodule(".".join(found.name.split(".")[:2]))
        num_blocks, block_area = found.attention.shape[2:4]
        grid = token_grid(num_blocks * block_area, image_size)
        blocks = blockify(cells(*grid)[None], level.block_size)[0]
        return Layer(grid, blocks, blocks, "b h w")

    return places


def pixels_of_patches(found: Recorded, image_size: Size) -> Layer:
    """MobileViT: a window is the pixels at one place within every patch. The reshapes are those of its block."""
    block = found.model.get_submodule(found.name.partition(".transformer")[0])
    patch_h, patch_w = block.patch_size
    area = patch_h * patch_w
    rows, cols = token_grid(found.attention.shape[-1] * area, image_size)
    image = cells(rows, cols).permute(2, 0, 1)
    parts = image.reshape(2 * rows // patch_h, patch_h, cols // patch_w, patch_w).transpose(1, 2)
    parts = parts.reshape(1, 2, -1, area).transpose(1, 3).reshape(area, -1, 2)
    return Layer((rows, cols), parts, parts, "bw h")


def pixels_within_patches(found: Recorded, image_size: Size) -> Layer:
    """TNT's inner attention: the pixels of a patch look at each other."""
    patches = found.model.pixel_embed.num_patches
    rows, cols = token_grid(patches, image_size)
    side = math.isqrt(found.attention.shape[-1])
    parts = plain_windows(cells(rows * side, cols * side)[None], side)
    return Layer((rows * side, cols * side), parts, parts, "bw h")


def halo(found: Recorded, image_size: Size) -> Layer:
    """Blocks of queries look at the block and a margin around it. The reshapes are those of timm's `HaloAttn`."""
    attention = found.module
    num_blocks = found.attention.shape[1]
    rows, cols = token_grid(num_blocks * attention.block_size**2, image_size)
    shape = rows // attention.block_size, cols // attention.block_size
    image = cells(rows, cols)
    strided = image[:: attention.block_stride, :: attention.block_stride].permute(2, 0, 1)
    side = attention.block_size_ds
    queries = strided.reshape(2, shape[0], side, shape[1], side).permute(0, 2, 4, 1, 3)
    queries = queries.reshape(2, -1, num_blocks).permute(2, 1, 0)
    margin = attention.halo_size
    keys = F.pad(image.permute(2, 0, 1), (margin, margin, margin, margin), value=math.nan)
    keys = keys.unfold(1, attention.win_size, attention.block_size).unfold(2, attention.win_size, attention.block_size)
    keys = keys.reshape(2, num_blocks, -1).permute(1, 2, 0)
    return Layer((rows, cols), queries, keys, "bh w")
