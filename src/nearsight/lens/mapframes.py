"""Where the attention of a layer goes on its maps.

Shape suffixes: B images, W windows, H heads, N queries, T queries of a tile, M keys, as in `stream`. Of a map: Q its
queries, patches row by row and then tokens that are not patches; K the patches that are keys, row by row; O the keys
that are not patches; X all of these, and then what is neither.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.attention import Attention, ExplicitAttention
from nearsight.lens.geometry import Geometry
from nearsight.lens.layout import Layout
from nearsight.lens.mapsfile import Grid, InFile, InMemory, LayerMaps
from nearsight.lens.running import not_finite
from nearsight.lens.stream import Tile, tiles
from nearsight.lens.survey import Site
from nearsight.lens.tokens import class_keys, other_keys

Heads = Sequence[int] | None
"""Positions from 0; None: all."""

_Span = slice | Tensor
_PLAIN = Layout((), 0, (1,), (2,))
"""Of tensors that are [B, W, H, x, y] already."""


@dataclass(frozen=True)
class _Lines:
    """The rows, or the columns, of tokens along one axis, and how they are pooled."""

    positions: Tensor
    num_pooled: int

    @classmethod
    def of(cls, places_WN: Tensor, most: int | None) -> "_Lines":
        positions = places_WN[places_WN.isfinite()].unique()
        return cls(positions, _pooled(len(positions), most))

    def numbers(self, places_WN: Tensor) -> Tensor:
        lines = torch.searchsorted(self.positions, places_WN.nan_to_num(0.0).contiguous())
        return lines * self.num_pooled // len(self.positions)


def _pooled(size: int, most: int | None) -> int:
    """Number of cells: of equal size if at least half of `most` are possible so, otherwise of nearly equal size."""
    if most is None or size <= most:
        return size
    equal = max(number for number in range(1, most + 1) if size % number == 0)
    return equal if 2 * equal >= most else most


@dataclass(frozen=True)
class _Cells:
    """Which cell of a pooled grid each token of each window is in."""

    rows: _Lines
    cols: _Lines
    cell_WN: Tensor
    """Tokens that are not patches come behind the last cell; what is neither, behind those."""
    num_others: int

    @classmethod
    def of(cls, places_WN2: Tensor, others_WN: Tensor, most: int | None) -> "_Cells":
        rows, cols = (_Lines.of(places_WN2[..., axis], most) for axis in (0, 1))
        cell_WN = rows.numbers(places_WN2[..., 0]) * cols.num_pooled + cols.numbers(places_WN2[..., 1])
        num_cells, num_others = rows.num_pooled * cols.num_pooled, int(others_WN.sum(-1).max())
        other_WN = torch.where(others_WN, others_WN.cumsum(-1) - 1, num_others)
        return cls(rows, cols, torch.where(places_WN2[..., 0].isnan(), num_cells + other_WN, cell_WN), num_others)

    @property
    def grid(self) -> Grid:
        return self.rows.num_pooled, self.cols.num_pooled

    @property
    def whole_grid(self) -> Grid:
        return len(self.rows.positions), len(self.cols.positions)

    @property
    def num_cells(self) -> int:
        return math.prod(self.grid)

    @property
    def num_tokens(self) -> int:
        """Of a map: its cells, and the tokens that are not patches. What is neither has this number."""
        return self.num_cells + self.num_others

    @cached_property
    def are_apart(self) -> bool:
        """Whether no two tokens of a window are in one cell."""
        ordered_WN = self.cell_WN.sort(-1).values
        return not bool(((ordered_WN.diff(dim=-1) == 0) & (ordered_WN[:, 1:] < self.num_tokens)).any())

    @property
    def order(self) -> Tensor | None:
        """The cell of each token, if that is one and the same for all of them."""
        first_N = self.cell_WN[0]
        is_one_by_one = torch.equal(first_N.sort().values, torch.arange(self.num_tokens))
        return first_N if len(self.cell_WN) == 1 and is_one_by_one else None

    def spans(self, cell_N: Tensor) -> Iterator[tuple[_Span, _Span]]:
        """Of patches, and of tokens that are not patches: which of some tokens they are, and their places among their
        kind."""
        for begin, end in ((0, self.num_cells), (self.num_cells, self.num_tokens)):
            tokens = ((cell_N >= begin) & (cell_N < end)).nonzero().flatten()
            yield _span(tokens), _span(cell_N[tokens] - begin)


def _span(positions: Tensor) -> _Span:
    """A slice, where it can be one: that is much faster."""
    if not len(positions):
        return slice(0, 0)
    begin = int(positions[0])
    return slice(begin, begin + len(positions)) if bool((positions.diff() == 1).all()) else positions


def _arranged(attention: Attention, site: Site, heads: _Span = slice(None)) -> tuple[Attention, Site]:
    """The same attention with its axes in order, of some heads alone."""
    arrange = site.geometry.layout.arrange
    plain = replace(site, geometry=replace(site.geometry, layout=_PLAIN))
    if isinstance(attention, ExplicitAttention):
        weights = arrange(attention.weights.movedim(site.axes, (-2, -1)))[:, :, heads]
        hidden_WHNM = None if site.hidden_WHNM is None else site.hidden_WHNM[:, heads]
        return replace(attention, weights=weights), replace(plain, axes=(-2, -1), hidden_WHNM=hidden_WHNM)
    query, key, mask = attention.query, attention.key, attention.mask
    if mask is not None:
        mask = arrange(mask.to(query.device).expand(*query.shape[:-1], key.shape[-2]))[:, :, heads]
    return replace(attention, query=arrange(query)[:, :, heads], key=arrange(key)[:, :, heads], mask=mask), plain


def _num_heads(arranged: Attention) -> int:
    return (arranged.weights if isinstance(arranged, ExplicitAttention) else arranged.query).shape[2]


def _head_positions(heads: Heads, num_heads: int, layer_name: str) -> tuple[int, ...]:
    given: Any = heads
    if given is None:
        return tuple(range(num_heads))
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(f"heads is a list of positions, not {given!r}; give [{given!r}]")
    positions = []
    for head in given:
        try:
            positions.append(range(num_heads)[operator.index(head)])
        except (IndexError, TypeError) as error:
            raise InputError(
                f"head {head!r} is not one of the {num_heads} heads of {layer_name}, which count from 0"
            ) from error
    if not positions:
        raise InputError(f"no head of {layer_name} is chosen")
    return tuple(positions)


@dataclass(frozen=True)
class Frame:
    """Where a layer's attention goes on its maps."""

    site: Site
    queries: _Cells
    keys: _Cells
    empty: LayerMaps
    """Its maps of no images."""

    @classmethod
    def of(
        cls, model: nn.Module, attention: Attention, site: Site, heads: Heads, dtype: torch.dtype, most: int | None
    ) -> "Frame":
        """From an attention of the layer; its maps are of these heads, of this type, pooled to so many lines."""
        geometry = site.geometry
        queries = _Cells.of(geometry.query_places_WN2, _other_queries(geometry), most)
        keys = _Cells.of(geometry.key_places_WM2, other_keys(geometry), most)
        num_cls = int(class_keys(model, geometry).any())
        registers = [f"register {number + 1}" for number in range(keys.num_others - num_cls)]
        others = ("CLS", *registers) if num_cls else tuple(registers)
        arranged, plain = _arranged(attention, site)
        positions = _head_positions(heads, _num_heads(arranged), site.name)
        # Without windows a weight of 0 is what a head chose, not what it cannot see.
        has_windows = len(queries.cell_WN) > 1
        lead = 0, len(positions), queries.num_tokens
        empty = LayerMaps(
            name=site.name,
            heads=positions,
            grid_size=geometry.grid_size,
            query_grid=queries.grid,
            key_grid=keys.grid,
            whole_query_grid=queries.whole_grid,
            whole_key_grid=keys.whole_grid,
            others=others,
            other_queries=others[: queries.num_others],
            weights_BHQK=torch.empty(*lead, keys.num_cells, dtype=dtype),
            other_weights_BHQO=torch.empty(*lead, keys.num_others, dtype=dtype),
            distances_BHQ=torch.empty(*lead, dtype=torch.promote_types(dtype, torch.float32)),
            reach_QK=_reach(tiles(arranged, plain, whole=True), queries, keys) if has_windows else None,
            query_order_N=queries.order,
            key_order_M=keys.order,
        )
        return cls(site, queries, keys, empty)

    def fill(self, attention: Attention, room: InMemory | InFile, images: slice, dtype: torch.dtype) -> None:
        """Write the maps of some images, computed in this type."""
        heads = _span(torch.tensor(self.empty.heads))
        of_heads = _arranged(attention, self.site, heads)
        into = room.room(self.empty, images)
        whole = tiles(*of_heads, dtype=dtype, whole=True)
        if self.queries.are_apart and self.keys.are_apart:
            self._place(whole, into)
        else:
            self._pool(whole, into)

    def _place(self, whole: Iterable[Tile], into: LayerMaps) -> None:
        """Tokens are cells, so that tiles are parts of the maps."""
        into.distances_BHQ.fill_(math.nan)
        keys = [list(self.keys.spans(cell_M)) for cell_M in self.keys.cell_WN]
        kinds = slice(0, self.queries.num_cells), slice(self.queries.num_cells, None)
        begin = 0
        for tile in whole:
            weights_BWHTM, far_BWHT, looking_BWHT = self._rows(tile)
            weights_BWHTM = weights_BWHTM.to(into.weights_BHQK.dtype).cpu()
            far_BWHT = torch.where(looking_BWHT & _is_patch(tile), far_BWHT, math.nan).cpu()
            end = begin + far_BWHT.shape[-1]
            for window, cell_T in enumerate(self.queries.cell_WN[:, begin:end]):
                for kind, (queries, lines) in zip(kinds, self.queries.spans(cell_T), strict=True):
                    into.distances_BHQ[:, :, kind][:, :, lines] = far_BWHT[:, window][:, :, queries]
                    block_BHTM = weights_BWHTM[:, window][:, :, queries]
                    for maps, (tokens, columns) in zip(
                        (into.weights_BHQK, into.other_weights_BHQO), keys[window], strict=True
                    ):
                        _put(maps[:, :, kind], lines, columns, block_BHTM[..., tokens])
            begin = end

    def _pool(self, whole: Iterable[Tile], into: LayerMaps) -> None:
        """Cells hold several tokens: sums over their queries, and how many of those look at anything."""
        sums: list[Tensor] = []
        begin = 0
        for tile in whole:
            weights_BWHTM, far_BWHT, looking_BWHT = self._rows(tile)
            looking_BWHT1 = looking_BWHT[..., None]
            parts = (
                torch.where(looking_BWHT1, self._by_key(weights_BWHTM), 0.0),
                torch.where(looking_BWHT1, far_BWHT[..., None], 0.0),
                looking_BWHT1.to(far_BWHT.dtype),
            )
            end = begin + tile.queries_WT2.shape[1]
            new = [self._by_query(part, self.queries.cell_WN[:, begin:end]) for part in parts]
            sums = [old + more for old, more in zip(sums, new, strict=True)] if sums else new
            begin = end
        weights_BHQX, distances_BHQ1, looking_BHQ1 = sums
        weights_BHQX, num_keys = weights_BHQX / looking_BHQ1.clamp(min=1), self.keys.num_cells
        into.weights_BHQK[:] = weights_BHQX[..., :num_keys]
        into.other_weights_BHQO[:] = weights_BHQX[..., num_keys:-1]
        into.distances_BHQ[:] = (distances_BHQ1 / looking_BHQ1).squeeze(-1)
        into.distances_BHQ[..., self.queries.num_cells :] = math.nan

    def _rows(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Of each query of a tile its weights, how far it looks (in diagonals), and whether it looks at any patch."""
        log_BWHTM = tile.log_weights_BWHTM
        no_patch_WM = tile.keys_WM2[..., 0].isnan()
        patch_log_BWHTM = log_BWHTM.masked_fill(no_patch_WM[:, None, None], -math.inf)
        looking_BWHT = patch_log_BWHTM.amax(-1) != -math.inf
        far_BWHT = torch.einsum("bwhtm,wtm->bwht", patch_log_BWHTM.softmax(-1), tile.distances)
        far_BWHT = far_BWHT / self.site.geometry.diagonal
        if torch.where(looking_BWHT, far_BWHT, 0.0).isnan().any():
            raise not_finite(f"the attention of {self.site.name}")
        weights_BWHTM = log_BWHTM.softmax(-1)
        # A query that sees nothing at all has no weights.
        return weights_BWHTM if looking_BWHT.all() else weights_BWHTM.nan_to_num(0.0), far_BWHT, looking_BWHT

    def _by_key(self, values_BWHTM: Tensor) -> Tensor:
        index = self.keys.cell_WN.to(values_BWHTM.device)[:, None, None].expand_as(values_BWHTM)
        binned = values_BWHTM.new_zeros(*values_BWHTM.shape[:-1], self.keys.num_tokens + 1)
        return binned.scatter_add_(-1, index, values_BWHTM)

    def _by_query(self, values_BWHTX: Tensor, cell_WT: Tensor) -> Tensor:
        """[B, H, Q, X], without what is neither a patch nor a token of its own."""
        values_BHX = values_BWHTX.movedim(2, 1).flatten(2, 3)
        binned = values_BHX.new_zeros(*values_BHX.shape[:2], self.queries.num_tokens + 1, values_BHX.shape[-1])
        return binned.index_add_(2, cell_WT.flatten().to(binned.device), values_BHX)[:, :, :-1]


def _put(maps_BHQK: Tensor, lines: _Span, columns: _Span, values_BHTM: Tensor) -> None:
    if isinstance(lines, Tensor) and isinstance(columns, Tensor):
        lines = lines[:, None]
    maps_BHQK[:, :, lines, columns] = values_BHTM


def _is_patch(tile: Tile) -> Tensor:
    """Which queries are, [W, 1, T]."""
    return tile.queries_WT2[:, None, :, 0].isfinite()


def _reach(whole: Iterable[Tile], queries: _Cells, keys: _Cells) -> Tensor:
    """Which keys no mask hides from a query: [Q, K] bool."""
    reach_QX = torch.zeros(queries.num_tokens + 1, keys.num_tokens + 1, dtype=torch.bool)
    begin = 0
    for tile in whole:
        end = begin + tile.queries_WT2.shape[1]
        shown = torch.ones_like(tile.log_weights_BWHTM[:1, :, :1], dtype=torch.bool)
        if tile.shown is not None:
            shown = tile.shown.expand_as(tile.log_weights_BWHTM)
        window, query, key = shown.any(2).any(0).cpu().nonzero(as_tuple=True)
        reach_QX[queries.cell_WN[:, begin:end][window, query], keys.cell_WN[window, key]] = True
        begin = end
    return reach_QX[:-1, : keys.num_cells]


def _other_queries(geometry: Geometry) -> Tensor:
    """Which queries are tokens of their own, [W, N] bool; none if each window has its own, or they are not keys."""
    no_patch_WN, no_patch_WM = (
        places[..., 0].isnan() for places in (geometry.query_places_WN2, geometry.key_places_WM2)
    )
    one_sequence = len(no_patch_WN) == 1 and torch.equal(no_patch_WN, no_patch_WM)
    return other_keys(geometry) if one_sequence else torch.zeros_like(no_patch_WN)
