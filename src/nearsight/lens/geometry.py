"""Where the tokens of one attention lie on the image.

Shape suffixes: L a model's leading axes, W windows, N queries, M keys.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.lens.layout import Layout, find_layout
from nearsight.lens.places import PADDING, Places

_OVERLAPPING = 1.1
"""How much larger tokens are, at least, that are more and nevertheless made of the others; less is cut at borders."""


class NotSpatialError(Exception):
    """This attention is not one between places of the image; the message says why."""


@dataclass(frozen=True)
class Geometry:
    """Where queries and keys of an attention are, in cells of the layer's grid of tokens over the whole image.

    The grid is that of the queries or that of the keys, whichever is finer: the one that came into the layer. Of keys
    that are pooled to more places than there are queries, each is made of whole cells of the queries, which are finer.
    """

    layout: Layout
    grid_size: tuple[int, int]
    """(rows, columns)."""
    cell_size: tuple[float, float]
    """(height, width) of a cell in pixels."""
    query_places_WN2: Tensor
    """(row, column) of each query of each window, float64; NaN for one that is no patch."""
    key_places_WM2: Tensor
    """Likewise of each key; keys that are pooled from several cells lie at their centre of mass."""
    padding_WM: Tensor | None = None
    """Keys that only fill up a window: neither patches nor tokens of their own. None: there are none."""
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a reduction derived from this geometry, by device."""

    @property
    def diagonal(self) -> float:
        """The longest distance in the grid, in cells; 1 for a single cell, where all distances are 0."""
        rows, cols = self.grid_size
        return math.hypot(rows - 1, cols - 1) or 1.0

    @property
    def num_queries(self) -> int:
        """Of all windows, those alone that are patches."""
        return int(self.query_places_WN2[..., 0].isfinite().sum())


def locate(places: Places, query_LN: Tensor, key_LM: Tensor) -> Geometry:
    """The geometry of an attention from the places of its queries and keys, for a batch of two images."""
    for axis in range(query_LN.dim() - 1):  # heads, mostly: what is the same along an axis is looked at once
        if query_LN.stride(axis) == key_LM.stride(axis) == 0:
            query_LN, key_LM = query_LN.narrow(axis, 0, 1), key_LM.narrow(axis, 0, 1)
    query_centres, key_centres, cells = _comparable(places, query_LN, key_LM)
    _check_there_are_patches(query_centres, key_centres)
    query_images_L, key_images_L = places.image_of(query_LN).amax(-1), places.image_of(key_LM).amax(-1)
    if ((query_images_L != key_images_L) & (query_images_L >= 0) & (key_images_L >= 0)).any():
        raise NotSpatialError("its queries come from another image of the batch than its keys")
    images_L = torch.maximum(query_images_L, key_images_L)
    layout = find_layout(images_L, (_numbered(query_centres), _numbered(key_centres)))
    query_WN2, key_WM2 = (layout.arrange(centres)[0, :, 0] for centres in (query_centres, key_centres))
    _check_queries_are_one_place_each(query_WN2)
    rows, cols = _grid_lines((query_WN2, key_WM2)[_finer(places, (query_LN, key_LM), (query_WN2, key_WM2))])
    return Geometry(
        layout,
        (len(rows), len(cols)),
        _cell_size(cells, places.image_size),
        _in_cells(query_WN2, rows, cols),
        _in_cells(key_WM2, rows, cols),
        layout.arrange((key_LM == PADDING).unsqueeze(-1))[0, :, 0, :, 0],
    )


def _check_there_are_patches(query_centres: Tensor, key_centres: Tensor) -> None:
    if query_centres.isnan().all():
        if key_centres.isnan().all():
            raise NotSpatialError("neither its queries nor its keys are patches of the image")
        raise NotSpatialError("its queries are not patches of the image (class attention, or pooling)")
    if key_centres.isnan().all():
        raise NotSpatialError("its keys are not patches of the image")


def _only_whole_image(places: Places, numbers: Tensor) -> bool:
    placed = places.image_of(numbers) >= 0
    return bool((places.covers_image(numbers) | ~placed).all())


def _comparable(places: Places, query_LN: Tensor, key_LM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centres of queries and of keys in pixels, measured alike, and those of the finer of the two as cells."""
    both = query_LN, key_LM
    one_cell = all(_only_whole_image(places, numbers) for numbers in both)
    cells, centres = (
        [_placed(places, numbers, positions, one_cell) for numbers in both]
        for positions in (places.cells, places.centres)
    )
    finer = _finer(places, both, cells)
    if not torch.equal(places.grids(query_LN), places.grids(key_LM)):
        # One is pooled from the other: its windows see cells of that grid, wherever those were pooled from.
        centres[finer], other = cells[finer], 1 - finer
        is_cell = torch.isin(both[other], both[finer]).unsqueeze(-1)
        centres[other] = torch.where(is_cell, cells[other], centres[other])
    elif len(_distinct(centres[finer])) < len(_distinct(cells[finer])):
        centres = cells  # windows larger than the image see the same of it
    return centres[0], centres[1], cells[finer]


def _finer(places: Places, both: tuple[Tensor, Tensor], positions: Sequence[Tensor]) -> int:
    """Which of the two are the finer tokens: 0 the queries, 1 the keys."""
    more = max((0, 1), key=lambda which: len(_distinct(positions[which])))
    # Where tokens part the image, more of them are smaller ones. Pooling to more pieces than there are cells gives
    # pieces that overlap: more places than cells, of one or several cells each.
    overlap = places.mean_size(both[more]) > _OVERLAPPING * places.mean_size(both[1 - more])
    return 1 - more if overlap else more


def _placed(places: Places, numbers: Tensor, positions: Callable[[Tensor], Tensor], one_cell: bool) -> Tensor:
    """[..., 2] in pixels. What covers the whole image has no place on it, unless there is nothing else."""
    if one_cell:
        return positions(numbers)
    return torch.where(places.covers_image(numbers).unsqueeze(-1), math.nan, positions(numbers))


def _numbered(centres: Tensor) -> Tensor:
    """A number per place: equal where the centres are."""
    codes, _ = _codes(centres.flatten(end_dim=-2).nan_to_num(-1.0))
    return codes.view(centres.shape[:-1])


def _distinct(centres: Tensor) -> Tensor:
    flat = centres.flatten(end_dim=-2)
    codes, lines = _codes(flat[flat[:, 0].isfinite()])
    return torch.cartesian_prod(*lines)[codes.unique()] if len(codes) else flat[:0]


def _codes(centres_P2: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A number per place, row by row of the lines that occur, and these lines: rows of two numbers take far longer to
    sort than numbers."""
    (rows, row), (cols, col) = (torch.unique(axis, return_inverse=True) for axis in centres_P2.unbind(-1))
    return row * len(cols) + col, (rows, cols)


def _check_queries_are_one_place_each(query_WN2: Tensor) -> None:
    num_queries = int(query_WN2[..., 0].isfinite().sum())
    num_places = len(_distinct(query_WN2))
    if num_queries == num_places:
        return
    if len(query_WN2) > 1 and num_queries == num_places * len(query_WN2):
        raise NotSpatialError("all windows share the same queries (global queries), so that a query has no one place")
    raise NotSpatialError(f"its {num_queries} queries lie at only {num_places} places")


def _grid_lines(centres: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct y and x of tokens that make up a full grid."""
    distinct = _distinct(centres)
    rows, cols = distinct[:, 0].unique(), distinct[:, 1].unique()
    if len(rows) * len(cols) != len(distinct):
        raise NotSpatialError(f"its {len(distinct)} tokens fit no grid of rows and columns")
    return rows, cols


def _cell_size(cells: Tensor, image_size: tuple[int, int]) -> tuple[float, float]:
    """(height, width) in pixels: how far it is from one cell to the next."""
    height, width = (_spacing(lines, side) for lines, side in zip(_grid_lines(cells), image_size, strict=True))
    return height, width


def _spacing(lines: Tensor, image_side: int) -> float:
    if len(lines) > 3:
        lines = lines[1:-1]  # cells at the borders may be cut
    return float(lines[-1] - lines[0]) / (len(lines) - 1) if len(lines) > 1 else float(image_side)


def _in_cells(centres: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    return torch.stack([_between_lines(centres[..., 0], rows), _between_lines(centres[..., 1], cols)], dim=-1)


def _between_lines(position: Tensor, lines: Tensor) -> Tensor:
    """The number of the grid line at a position; between lines, and beyond the last, in proportion."""
    if len(lines) == 1:
        return torch.where(position.isnan(), math.nan, 0.0)
    below = (torch.searchsorted(lines, position.contiguous(), right=True) - 1).clamp(0, len(lines) - 2)
    return below + (position - lines[below]) / (lines[below + 1] - lines[below])


def patch_grid(model: nn.Module) -> tuple[int, int] | None:
    """(rows, columns) of the patches of the images the model was made for, if it says so."""
    grid_size: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    return None if grid_size is None else (int(grid_size[0]), int(grid_size[1]))
