"""Where the tokens of each kind of attention are, stated from the size of the image alone.

A mechanism is a function from a recorded attention and the size of the image to a `Layer`, as in
`vit_references.mechanisms`. Coordinates are (row, column) in cells of the layer's grid over the whole image.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Mechanism, Size, cells

Stage = Callable[[Recorded], int]


def behind(prefix: int, places: Tensor) -> Tensor:
    """[1, tokens, 2] of places in row-major order, behind tokens that are no patches."""
    return torch.cat([torch.full((1, prefix, 2), math.nan, dtype=torch.float64), places.reshape(1, -1, 2)], dim=1)


def patches(patch: int = 16, prefix: int = 0, suffix: int = 0, axes: str = "b h", more_keys: int = 0) -> Mechanism:
    """All patches of the image in row-major order, between some other tokens, and keys that are nobody's queries."""

    def places(found: Recorded, image_size: Size) -> Layer:
        grid = image_size[0] // patch, image_size[1] // patch
        tokens = F.pad(behind(prefix, cells(*grid)), (0, 0, 0, suffix), value=math.nan)
        keys = F.pad(tokens, (0, 0, 0, more_keys), value=math.nan)
        _check_number(found, tokens, keys)
        return Layer(grid, tokens, keys, axes)

    return places


def _check_number(found: Recorded, queries: Tensor, keys: Tensor) -> None:
    wanted, got = (queries.shape[1], keys.shape[1]), tuple(found.attention.shape[-2:])
    assert got == wanted, f"{found.name} has {got} queries and keys, not {wanted}"


def number_in(pattern: str) -> Stage:
    """The number of a stage or block, read off the layer's name."""

    def number(found: Recorded) -> int:
        match = re.search(pattern, found.name)
        assert match, f"{pattern} is not in {found.name}"
        return int(match[1])

    return number


def by_stage(stage: Stage, mechanisms: Sequence[Mechanism]) -> Mechanism:
    """Another mechanism in each stage."""

    def places(found: Recorded, image_size: Size) -> Layer:
        return mechanisms[stage(found)](found, image_size)

    return places


def shifted_windows(
    grid_of: Callable[[Recorded, Size], Size],
    window_of: Callable[[Recorded], Size],
    shift_of: Callable[[Recorded], Size],
    *,
    axes: str = "bw h",
    is_masked: bool = True,
) -> Mechanism:
    """Swin's windows: pad below and to the right, roll, cut; a mask keeps apart what rolling has brought together."""

    def places(found: Recorded, image_size: Size) -> Layer:
        grid, window, shift = grid_of(found, image_size), window_of(found), shift_of(found)
        padded = tuple(side + -side % size for side, size in zip(grid, window, strict=True))
        image = F.pad(cells(*grid), (0, 0, 0, padded[1] - grid[1], 0, padded[0] - grid[0]), value=math.nan)
        parts = cut(torch.roll(image, (-shift[0], -shift[1]), (0, 1)), window)
        _check_number(found, parts, parts)
        layer = Layer(grid, parts, parts, axes)
        if not any(shift) or not is_masked:
            return layer
        beyond = torch.stack(
            [
                cells(*padded)[..., axis] >= padded[axis] - shift[axis] if shift[axis] else torch.zeros(padded).bool()
                for axis in (0, 1)
            ],
            dim=-1,
        )
        regions = cut(beyond, window)
        return replace(layer, allowed_WNM=(regions[:, :, None] == regions[:, None]).all(-1))

    return places


def cut(image: Tensor, window: Size) -> Tensor:
    """[windows, cells of each, …] of [rows, columns, …], in row-major order."""
    rows, cols = image.shape[:2]
    parts = image.reshape(rows // window[0], window[0], cols // window[1], window[1], -1).transpose(1, 2)
    return parts.reshape(-1, window[0] * window[1], image.shape[-1])


def on_grid(rows: int, cols: int, prefix: int = 0, axes: str = "b h") -> Mechanism:
    """As `patches`, where the grid does not follow from the size of a patch."""

    def places(found: Recorded, image_size: Size) -> Layer:
        tokens = behind(prefix, cells(rows, cols))
        _check_number(found, tokens, tokens)
        return Layer((rows, cols), tokens, tokens, axes)

    return places


def in_windows(step: int, side: int, prefix: int = 0, axes: str = "bw h", is_dilated: bool = False) -> Mechanism:
    """Square windows that divide the grid, of neighbours or of tokens far apart, each behind some other tokens.

    `step` is the distance of two tokens in pixels.
    """

    def places(found: Recorded, image_size: Size) -> Layer:
        rows, cols = image_size[0] // step, image_size[1] // step
        parts = spread(cells(rows, cols), side) if is_dilated else cut(cells(rows, cols), (side, side))
        parts = F.pad(parts, (0, 0, prefix, 0), value=math.nan)
        _check_number(found, parts, parts)
        return Layer((rows, cols), parts, parts, axes)

    return places


def spread(image: Tensor, side: int) -> Tensor:
    """[windows, cells of each, …]: a window has side × side cells, evenly over the whole of the image."""
    rows, cols = image.shape[:2]
    parts = image.reshape(side, rows // side, side, cols // side, -1).permute(1, 3, 0, 2, 4)
    return parts.reshape(-1, side * side, image.shape[-1])


def pooled_keys(step: int, ratio: int, axes: str = "b h", prefix: int = 0) -> Mechanism:
    """Each key is made of ratio × ratio tokens; what is left over below and to the right is in no key."""

    def places(found: Recorded, image_size: Size) -> Layer:
        rows, cols = image_size[0] // step, image_size[1] // step
        queries = behind(prefix, cells(rows, cols))
        keys = behind(prefix, (cells(rows // ratio, cols // ratio) + 0.5) * ratio - 0.5)
        _check_number(found, queries, keys)
        return Layer((rows, cols), queries, keys, axes)

    return places


def between(queries: int, keys: int, axes: str = "b h") -> Mechanism:
    """Patches of one size look at patches of another: the grid is that of the smaller ones."""

    def places(found: Recorded, image_size: Size) -> Layer:
        finest = min(queries, keys)
        grid = image_size[0] // finest, image_size[1] // finest
        tokens = [
            behind(0, (cells(image_size[0] // side, image_size[1] // side) + 0.5) * side / finest - 0.5)
            for side in (queries, keys)
        ]
        _check_number(found, *tokens)
        return Layer(grid, *tokens, axes)

    return places


def but_not_itself(mechanism: Mechanism) -> Mechanism:
    """No token may look at itself."""

    def places(found: Recorded, image_size: Size) -> Layer:
        layer = mechanism(found, image_size)
        return replace(layer, allowed_WNM=~torch.eye(layer.keys_WM2.shape[1], dtype=torch.bool)[None])

    return places


def causal(mechanism: Mechanism) -> Mechanism:
    """No token looks at those behind it."""

    def places(found: Recorded, image_size: Size) -> Layer:
        layer = mechanism(found, image_size)
        return replace(layer, allowed_WNM=torch.ones(found.attention.shape[-2:], dtype=torch.bool).tril()[None])

    return places


def with_axes(mechanism: Mechanism, axes: str) -> Mechanism:
    """The same places, for weights whose images, windows and heads are arranged in another way."""

    def places(found: Recorded, image_size: Size) -> Layer:
        return replace(mechanism(found, image_size), axes=axes)

    return places
