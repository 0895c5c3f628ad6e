"""Where every query of every head looks, as maps of the whole image: for a few images, to be looked at.

Shape suffixes: B images, W windows, H heads, N queries, T queries of a tile, M keys, as in `stream`. Of a map: Q its
queries, patches row by row and then tokens that are no patches; K the patches that are keys, row by row; O the keys
that are no patches.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens.attention import Attention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.geometry import Geometry
from nearsight.lens.measuring import summing_dtype
from nearsight.lens.operations import HIDING
from nearsight.lens.running import batches, never_compiled, not_finite, running, surveyed
from nearsight.lens.stream import Tile, in_full_precision, tiles
from nearsight.lens.survey import Site
from nearsight.lens.tokens import class_keys, other_keys

Grid = tuple[int, int]
"""(rows, columns)."""


@dataclass(frozen=True)
class LayerMaps:
    """The attention maps of one layer, float64 on the CPU.

    Windows are in their place on the whole grid. If patches are pooled, a query is the mean of its patches, and a key
    the sum of its own, so that a row sums to what it did.
    """

    name: str
    grid_size: Grid
    """The layer's own, whose diagonal is the unit of distances."""
    query_grid: Grid
    key_grid: Grid
    whole_query_grid: Grid
    """Before pooling."""
    whole_key_grid: Grid
    others: tuple[str, ...]
    """The keys that are no patches: CLS, register 1, …"""
    other_queries: tuple[str, ...]
    """The queries that are no patches: the same, or none where each window has its own."""
    weights_BHQK: Tensor
    """With `other_weights_BHQO` a row sums to 1, but for what goes to the padding of windows."""
    other_weights_BHQO: Tensor
    distances_BHQ: Tensor
    """How far a query looks, renormalised over the patches, in diagonals; NaN for one that is no patch."""
    reach_QK: Tensor | None
    """Which patches a query can see; None: all of them."""


@never_compiled
def attention_maps(
    model: nn.Module,
    images: Tensor,
    *,
    most_lines: int | None = None,
    device: torch.device | str | None = None,
) -> list[LayerMaps]:
    """The maps of all spatial attentions of a model, for normalised images [B, 3, H, W].

    `most_lines` pools patches to at most so many rows and columns, while they come, so that no larger map is ever in
    memory. The model is left as it was.
    """
    check_at_least("most_lines", 1 if most_lines is None else most_lines, 1)
    one_by_one = list(batches(images, 1))
    if not one_by_one:
        raise InputError("there are no images to look at")
    with running(model, device) as run:
        found = surveyed(run.model, run.brought(one_by_one[0])[0])
        frames = {call: _Frame.of(run.model, site, most_lines) for call, site in found.sites.items()}
        seen: dict[Call, list[_Sums]] = {call: [] for call in frames}

        def look(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
            if (frame := frames.get(call)) is not None:
                attention = candidates[frame.site.operand]()
                with in_full_precision(run.device):
                    dtype = summing_dtype("float64", run.device)
                    seen[call].append(frame.summed(tiles(attention, frame.site, dtype=dtype, whole=True)))

        for image in one_by_one:
            with AttentionTap(run.model, look, found.calling):
                run.model(run.brought(image))
    return [frame.maps(seen[call]) for call, frame in frames.items()]


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
    """Into how many cells: alike if that is not far fewer than may be, else nearly alike."""
    if most is None or size <= most:
        return size
    alike = max(number for number in range(1, most + 1) if size % number == 0)
    return alike if 2 * alike >= most else most


@dataclass(frozen=True)
class _Cells:
    """Which cell of a pooled grid each token of each window is in."""

    rows: _Lines
    cols: _Lines
    cell_WN: Tensor
    """Tokens that are no patches come behind the last cell; what is neither, behind those."""
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
    def num_bins(self) -> int:
        return self.num_cells + self.num_others + 1


@dataclass(frozen=True)
class _Sums:
    """Of one image: sums over the patches of each pooled query, and how many of them look at anything."""

    weights_HQX: Tensor
    """X: cells, then tokens that are no patches, then all else."""
    distances_HQ: Tensor
    looking_HQ: Tensor
    reach_QX: Tensor


@dataclass(frozen=True)
class _Frame:
    """Where a layer's attention goes on its maps."""

    site: Site
    queries: _Cells
    keys: _Cells
    others: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, site: Site, most: int | None) -> "_Frame":
        geometry = site.geometry
        queries = _Cells.of(geometry.query_places_WN2, _other_queries(geometry), most)
        keys = _Cells.of(geometry.key_places_WM2, other_keys(geometry), most)
        num_cls = int(class_keys(model, geometry).any())
        registers = [f"register {number + 1}" for number in range(keys.num_others - num_cls)]
        return cls(site, queries, keys, ("CLS", *registers) if num_cls else tuple(registers))

    def summed(self, whole: Iterable[Tile]) -> _Sums:
        """One image's attention, from all its tiles."""
        sums: list[Tensor] = []
        begin = 0
        for tile in whole:
            end = begin + tile.queries_WT2.shape[1]
            new = self._tile_sums(tile, self.queries.cell_WN[:, begin:end])
            sums = [old + more for old, more in zip(sums, new, strict=True)] if sums else new
            begin = end
        summed = _Sums(*(part.cpu() for part in sums))
        if summed.distances_HQ.isnan().any():
            raise not_finite(f"the attention of {self.site.name}")
        return summed

    def _tile_sums(self, tile: Tile, query_cell_WT: Tensor) -> list[Tensor]:
        log_WHTM = tile.log_weights_BWHTM[0]
        no_patch_WM = tile.keys_WM2[..., 0].isnan()
        patch_log_WHTM = log_WHTM.masked_fill(no_patch_WM[:, None, None], -math.inf)
        looking_WHT = patch_log_WHTM.amax(-1) != -math.inf
        weights_WHTX = self._by_key(log_WHTM.softmax(-1).nan_to_num(0.0))
        distance_WHT = torch.einsum("whtm,wtm->wht", patch_log_WHTM.softmax(-1), tile.distances)
        reach_WTM = (log_WHTM - log_WHTM.amax(-1, keepdim=True) > HIDING).any(1)
        query_cell = query_cell_WT.to(log_WHTM.device)
        return [
            self._by_query(torch.where(looking_WHT[..., None], weights_WHTX, 0.0), query_cell),
            self._by_query(torch.where(looking_WHT, distance_WHT, 0.0)[..., None], query_cell)[..., 0],
            self._by_query(looking_WHT[..., None].to(log_WHTM.dtype), query_cell)[..., 0],
            self._by_query(self._by_key(reach_WTM[:, None].to(log_WHTM.dtype)), query_cell)[0],
        ]

    def _by_key(self, values_WHTM: Tensor) -> Tensor:
        index_WHTM = self.keys.cell_WN.to(values_WHTM.device)[:, None, None].expand_as(values_WHTM)
        binned = values_WHTM.new_zeros(*values_WHTM.shape[:-1], self.keys.num_bins)
        return binned.scatter_add_(-1, index_WHTM, values_WHTM)

    def _by_query(self, values_WHTX: Tensor, query_cell_WT: Tensor) -> Tensor:
        """[H, Q, X], without what is neither a patch nor a token of its own."""
        values_HX = values_WHTX.movedim(1, 0).flatten(1, 2)
        binned = values_HX.new_zeros(len(values_HX), self.queries.num_bins, values_HX.shape[-1])
        return binned.index_add_(1, query_cell_WT.flatten(), values_HX)[:, :-1]

    def maps(self, images: Sequence[_Sums]) -> LayerMaps:
        num_keys, num_queries = self.keys.num_cells, self.queries.num_cells
        looking_BHQ = torch.stack([image.looking_HQ for image in images])
        weights_BHQX = torch.stack([image.weights_HQX for image in images]) / looking_BHQ[..., None].clamp(min=1)
        diagonal = self.site.geometry.diagonal
        distances_BHQ = torch.stack([image.distances_HQ for image in images]) / looking_BHQ / diagonal
        distances_BHQ[..., num_queries:] = math.nan
        reach_QK = torch.stack([image.reach_QX for image in images]).sum(0)[:, :num_keys] > 0
        has_windows = len(self.site.geometry.query_places_WN2) > 1
        return LayerMaps(
            name=self.site.name,
            grid_size=self.site.geometry.grid_size,
            query_grid=self.queries.grid,
            key_grid=self.keys.grid,
            whole_query_grid=self.queries.whole_grid,
            whole_key_grid=self.keys.whole_grid,
            others=self.others,
            other_queries=self.others[: self.queries.num_others],
            weights_BHQK=weights_BHQX[..., :num_keys].double(),
            other_weights_BHQO=weights_BHQX[..., num_keys:-1].double(),
            distances_BHQ=distances_BHQ.double(),
            # Without windows a weight of 0 is what a head chose, not what it cannot see.
            reach_QK=reach_QK if has_windows else None,
        )


def _other_queries(geometry: Geometry) -> Tensor:
    """Which queries are tokens of their own, [W, N] bool; none if each window has its own, or they are no keys."""
    no_patch_WN, no_patch_WM = (
        places[..., 0].isnan() for places in (geometry.query_places_WN2, geometry.key_places_WM2)
    )
    one_sequence = len(no_patch_WN) == 1 and torch.equal(no_patch_WN, no_patch_WM)
    return other_keys(geometry) if one_sequence else torch.zeros_like(no_patch_WN)
