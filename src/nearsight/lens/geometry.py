"""Where the tokens of one attention lie on the image.

Shape suffixes: L a model's leading axes, W windows, N queries, M keys.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens.layout import Layout, find_layout
from nearsight.lens.places import PADDING, Places, constant_along

_OVERLAPPING = 1.1
"""More tokens than the others, yet larger by at least this factor, are pooled from them; less is cut at borders."""


_NEAR = 1 / 3
"""How far apart positions of one line may be, as a share of the largest distance between neighbouring ones."""


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
    """(row, column) of each query of each window, float64; NaN for one that is not a patch."""
    key_places_WM2: Tensor
    """The same for each key; keys that are pooled from several cells lie at their centre of mass."""
    padding_WM: Tensor | None = None
    """Keys that only fill up a window: neither patches nor tokens of their own. None: there are none."""
    num_frames: int = 1
    """How many time steps the tokens of a video have; 1 for pictures."""
    query_times_WN: Tensor | None = None
    """Time of each query of a video, counted in tokens; NaN for one that is not a patch."""
    key_times_WM: Tensor | None = None
    lines: tuple[Tensor, Tensor, Tensor] | None = field(default=None, compare=False, repr=False)
    """Which frames, and where the rows and the columns of the grid are on the image, in pixels."""
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a reduction derived from this geometry, by device."""

    @property
    def diagonal(self) -> float:
        """The longest distance in the grid, in cells; 1 for a single cell, where all distances are 0."""
        rows, cols = self.grid_size
        return math.hypot(rows - 1, cols - 1) or 1.0

    def positions(self) -> tuple[Tensor, Tensor]:
        """(frame, y, x) of queries and of keys in the video or on the image, [W, N, 3] and [W, M, 3]; between lines, in
        proportion."""
        assert self.lines is not None
        both = []
        for places, times in ((self.query_places_WN2, self.query_times_WN), (self.key_places_WM2, self.key_times_WM)):
            times = torch.where(places[..., 0].isnan(), math.nan, 0.0) if times is None else times
            axes = zip((times, *places.unbind(-1)), self.lines, strict=True)
            both.append(torch.stack([_at_lines(axis, lines) for axis, lines in axes], dim=-1))
        return both[0], both[1]

    def is_as(self, other: "Geometry") -> bool:
        """Whether queries and keys lie at the same places."""
        names = ("query_places_WN2", "key_places_WM2", "query_times_WN", "key_times_WM")
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return self.num_frames == other.num_frames and all(same_places(a, b) for a, b in pairs if a is not None)

    @cached_property
    def is_along_time(self) -> bool:
        """Whether each query sees its own place alone, in other frames: there is no distance on the image."""
        if self.query_times_WN is None or self.num_frames == 1:
            return False
        places_WX2 = torch.cat([self.query_places_WN2, self.key_places_WM2], dim=1)
        first_W12 = self.query_places_WN2.nan_to_num(-1.0).amax(1, keepdim=True)
        return bool((places_WX2.isnan() | (places_WX2 == first_W12)).all()) and math.prod(self.grid_size) > 1

    @cached_property
    def num_queries(self) -> int:
        """Of all windows, those alone that are patches."""
        return int(self.query_places_WN2[..., 0].isfinite().sum())


def same_places(one: Tensor, other: Tensor) -> bool:
    """Whether tokens lie at the same places, NaN being none."""
    return one.shape == other.shape and torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


@dataclass(frozen=True)
class Declared:
    """A model's tokens as the caller describes them: so many that are not patches, then the patches row by row."""

    grid_size: tuple[int, int]
    prefix: int | None = None
    """None: whatever is left."""

    def locate(self, places: Places, query_LN: Tensor, key_LM: Tensor, *, alone: bool) -> Geometry | None:
        """The geometry of an attention among exactly these tokens; None if it is among others."""
        (rows, cols), count = self.grid_size, query_LN.shape[-1]
        prefix = count - rows * cols if self.prefix is None else self.prefix
        if not 0 <= prefix == count - rows * cols or key_LM.shape[-1] != count:
            return None
        images_L = torch.maximum(*(places.image_of(numbers).amax(-1) for numbers in (query_LN, key_LM)))
        token_N = torch.arange(count)
        layout = find_layout(images_L, [token_N.expand(query_LN.shape)] * 2, alone=alone)
        grid = torch.cartesian_prod(torch.arange(rows).double(), torch.arange(cols).double()).view(-1, 2)
        place_1N2 = torch.cat([torch.full((prefix, 2), math.nan, dtype=torch.float64), grid])[None]
        height, width = places.image_size
        return Geometry(layout, self.grid_size, (height / rows, width / cols), place_1N2, place_1N2.clone())


def declared_grid(grid: tuple[int, int] | None, prefix: int | None) -> Declared | None:
    """The tokens of a model as the caller describes them."""
    if grid is None:
        if prefix is not None:
            raise InputError("prefix goes with grid: give grid=(rows, columns), too")
        return None
    rows, cols = grid
    check_at_least("grid", min(rows, cols), 1)
    check_at_least("prefix", prefix or 0, 0)
    return Declared((int(rows), int(cols)), prefix)


def locate(places: Places, query_LN: Tensor, key_LM: Tensor, *, alone: bool = False) -> Geometry:
    """The geometry of an attention from the places of its queries and keys, for a batch of two images, or for one."""
    for axis in range(query_LN.dim() - 1):  # heads, mostly: what is the same along an axis is looked at once
        if all(constant_along(numbers, axis) is not None for numbers in (query_LN, key_LM)):
            query_LN, key_LM = query_LN.narrow(axis, 0, 1), key_LM.narrow(axis, 0, 1)
    query_centres, key_centres, cells = _comparable(places, query_LN, key_LM)
    _check_there_are_patches(query_centres, key_centres)
    query_images_L, key_images_L = places.image_of(query_LN).amax(-1), places.image_of(key_LM).amax(-1)
    if ((query_images_L != key_images_L) & (query_images_L >= 0) & (key_images_L >= 0)).any():
        raise NotSpatialError("its queries come from another image of the batch than its keys")
    images_L = torch.maximum(query_images_L, key_images_L)
    layout = find_layout(images_L, (_numbered(query_centres), _numbered(key_centres)), alone=alone)
    query_WN3, key_WM3 = (layout.arrange(centres)[0, :, 0] for centres in (query_centres, key_centres))
    _check_queries_are_one_place_each(query_WN3)
    finer = _finer(places, (query_LN, key_LM), (query_WN3, key_WM3))
    try:
        frames, rows, cols = _grid_lines((query_WN3, key_WM3)[finer])
    except NotSpatialError as error:
        # What tokens see beyond the borders of the image shifts their centres a little, in the corners most.
        snap = _snapping((query_WN3, key_WM3)[finer])
        query_WN3, key_WM3, cells = snap(query_WN3), snap(key_WM3), snap(cells)
        try:
            frames, rows, cols = _grid_lines((query_WN3, key_WM3)[finer])
            _check_queries_are_one_place_each(query_WN3)
        except NotSpatialError:
            raise error from None
    query_WN3, key_WM3 = (_in_cells(positions, (frames, rows, cols)) for positions in (query_WN3, key_WM3))
    has_time = len(frames) > 1
    return Geometry(
        layout,
        (len(rows), len(cols)),
        _cell_size(cells, places.image_size),
        query_WN3[..., 1:],
        key_WM3[..., 1:],
        layout.arrange((key_LM == PADDING).unsqueeze(-1))[0, :, 0, :, 0],
        len(frames),
        query_WN3[..., 0] if has_time else None,
        key_WM3[..., 0] if has_time else None,
        (frames, rows, cols),
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
    """(frame, y, x) of queries and of keys, measured in the same way, and those of the finer of the two as cells."""
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
    # Where tokens divide the image, more tokens are smaller tokens. Pooling to more pieces than there are cells gives
    # pieces that overlap: more places than cells, of one or several cells each.
    overlap = places.mean_size(both[more]) > _OVERLAPPING * places.mean_size(both[1 - more])
    return 1 - more if overlap else more


def _placed(places: Places, numbers: Tensor, positions: Callable[[Tensor], Tensor], one_cell: bool) -> Tensor:
    """[..., 3]: frame, and y and x in pixels. What covers the whole image has no place on it, unless there is nothing
    else."""
    placed = torch.cat([places.times(numbers).unsqueeze(-1), positions(numbers)], dim=-1)
    return placed if one_cell else torch.where(places.covers_image(numbers).unsqueeze(-1), math.nan, placed)


def _numbered(centres: Tensor) -> Tensor:
    """A number per place: equal where the centres are."""
    codes, _ = _codes(centres.flatten(end_dim=-2).nan_to_num(-1.0))
    return codes.view(centres.shape[:-1])


def _distinct(centres: Tensor) -> Tensor:
    flat = centres.flatten(end_dim=-2)
    codes, lines = _codes(flat[flat[:, 0].isfinite()])
    return torch.cartesian_prod(*lines)[codes.unique()] if len(codes) else flat[:0]


def _codes(centres_P3: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A number per place, line by line of those that occur, and these lines: rows of three numbers take far longer to
    sort than numbers."""
    found = [torch.unique(axis, return_inverse=True) for axis in centres_P3.unbind(-1)]
    codes = torch.zeros(len(centres_P3), dtype=torch.long)
    for lines, which in found:
        codes = codes * len(lines) + which
    return codes, [lines for lines, _ in found]


def _check_queries_are_one_place_each(query_WN3: Tensor) -> None:
    num_queries = int(query_WN3[..., 0].isfinite().sum())
    num_places = len(_distinct(query_WN3))
    if num_queries == num_places:
        return
    if len(query_WN3) > 1 and num_queries == num_places * len(query_WN3):
        raise NotSpatialError("all windows share the same queries (global queries), so that a query has no one place")
    places = "one place" if num_places == 1 else f"{num_places} places"
    raise NotSpatialError(f"its {num_queries} queries lie at only {places}")


def _grid_lines(centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct frames, y and x of tokens that make up a full grid."""
    distinct = _distinct(centres)
    frames, rows, cols = (axis.unique() for axis in distinct.unbind(-1))
    if len(frames) * len(rows) * len(cols) != len(distinct):
        raise NotSpatialError(
            f"its {len(distinct)} tokens fit no grid of rows and columns; if they have one, say which with grid=(rows, "
            "columns), and with prefix=… how many come before them"
        )
    return frames, rows, cols


def _snapping(centres: Tensor) -> Callable[[Tensor], Tensor]:
    """Puts positions that are near each other, compared with how far apart lines are, on one line."""
    axes = []
    for axis in _distinct(centres).unbind(-1):
        values = axis.unique()
        gaps = values.diff()
        group = (
            torch.cat([torch.zeros(1), (gaps > _NEAR * gaps.max()).cumsum(0)]).long()
            if len(gaps)
            else values.long() * 0
        )
        lines = torch.zeros(int(group[-1]) + 1, dtype=torch.float64).index_add(0, group, values) / group.bincount()
        axes.append((values, lines[group]))

    def snap(positions: Tensor) -> Tensor:
        snapped = []
        for position, (values, lines) in zip(positions.unbind(-1), axes, strict=True):
            at = torch.searchsorted(values, position.contiguous()).clamp(max=len(values) - 1)
            snapped.append(torch.where(values[at] == position, lines[at], position))
        return torch.stack(snapped, dim=-1)

    return snap


def _cell_size(cells: Tensor, image_size: tuple[int, int]) -> tuple[float, float]:
    """(height, width) in pixels: how far it is from one cell to the next."""
    height, width = (_spacing(lines, side) for lines, side in zip(_grid_lines(cells)[1:], image_size, strict=True))
    return height, width


def _spacing(lines: Tensor, image_side: int) -> float:
    if len(lines) > 3:
        lines = lines[1:-1]  # cells at the borders may be cut
    return float(lines[-1] - lines[0]) / (len(lines) - 1) if len(lines) > 1 else float(image_side)


def _in_cells(centres: Tensor, lines: Sequence[Tensor]) -> Tensor:
    return torch.stack(
        [_between_lines(axis, line) for axis, line in zip(centres.unbind(-1), lines, strict=True)], dim=-1
    )


def _at_lines(cell: Tensor, lines: Tensor) -> Tensor:
    """Where a cell is, whole or not: the reverse of `_between_lines`."""
    if len(lines) == 1:
        return torch.where(cell.isnan(), math.nan, lines[0])
    below = cell.nan_to_num(0.0).floor().long().clamp(0, len(lines) - 2)
    return lines[below] + (cell - below) * (lines[below + 1] - lines[below])


def _between_lines(position: Tensor, lines: Tensor) -> Tensor:
    """The number of the grid line at a position; between lines, and beyond the last, in proportion."""
    if len(lines) == 1:
        return torch.where(position.isnan(), math.nan, 0.0)
    below = (torch.searchsorted(lines, position.contiguous(), right=True) - 1).clamp(0, len(lines) - 2)
    return below + (position - lines[below]) / (lines[below + 1] - lines[below])


def joint_geometries(parts: Sequence[Geometry]) -> list[Geometry] | None:
    """The geometries of parts of one attention on the grid that they make up together; None if they are not."""
    if any(part.lines is None for part in parts):
        return None
    positions = [part.positions() for part in parts]
    each = [_distinct(queries) for queries, _ in positions]
    together = _distinct(torch.cat(each))
    if len(together) < sum(len(places) for places in each):
        return None  # the same patches ask twice: two attentions
    seen = _distinct(torch.cat([together, *(_distinct(keys) for _, keys in positions)]))
    frames, rows, cols = lines = tuple(axis.unique() for axis in seen.unbind(-1))
    if len(frames) * len(rows) * len(cols) != len(seen):
        return None
    joined = []
    for part, both in zip(parts, positions, strict=True):
        query_WN3, key_WM3 = (_in_cells(places, lines) for places in both)
        joined.append(
            replace(
                part,
                grid_size=(len(rows), len(cols)),
                query_places_WN2=query_WN3[..., 1:],
                key_places_WM2=key_WM3[..., 1:],
                num_frames=len(frames),
                query_times_WN=query_WN3[..., 0] if len(frames) > 1 else None,
                key_times_WM=key_WM3[..., 0] if len(frames) > 1 else None,
                lines=(frames, rows, cols),
                cache={},
            )
        )
    return joined


def patch_grid(model: nn.Module) -> tuple[int, int] | None:
    """(rows, columns) of the patches of the images the model was made for, if it says so."""
    grid_size: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    return None if grid_size is None else (int(grid_size[0]), int(grid_size[1]))
