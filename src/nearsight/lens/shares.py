"""Where a patch's attention goes: by the step from the query to the key, as a picture; and by the kind of key.

Shape suffixes: B images, W windows, H heads, T queries of a tile, M keys, X steps, S kinds of keys.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.lens.attention import Attention
from nearsight.lens.columns import Cells
from nearsight.lens.geometry import Geometry
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, QueryMeans, measurement, patch_shares, stack_layers, sums_by_bin
from nearsight.lens.stream import Tile, attention_shares, has_kernel
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import Array, HeadTable
from nearsight.lens.tokens import class_keys, other_keys

_ROUNDING = 1e-5
"""Of a place, in cells."""
_STANDS_OUT = 2.0
"""Times the median: from there on a step gets more attention than others."""
_NAMES = ("share_self", "share_neighbours", "share_cls", "share_registers")
_SAID = ("the patch itself", "its 8 neighbours", "CLS", "registers")


@measurement("offsets")
class Offsets(Measurement):
    """`offset_attention` [layers, heads, 2·rows − 1, 2·columns − 1]: how much attention a query pays to a patch at each
    step from it, the middle being itself.

    Attention is renormalised over the patches, as for MAD; the mean is over all pairs of patches of a picture that are
    this step apart and may see each other, and then over pictures. So a head with uniform attention has the same
    number everywhere, though long steps fit into the picture from few patches. NaN: no pair is so far apart, or the
    layer's grid is smaller than the largest. Pooled keys lie between cells: a step that is not whole counts for the
    nearest one, of two equally near ones for the one further up, or to the left. `HeadTable.offset_maps` gives the
    pictures of a layer.
    """

    about = "per head: how much attention is paid at each step from the patch, up, down and sideways"
    table = None
    picture = "steps"
    needs_tiles = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        """How many heads attend most to the patch itself, to one beside it, to one farther away, or have nearly
        uniform attention."""
        heads = [head_RC for layer in range(len(table.layer_names)) for head_RC in table.offset_maps(layer)]
        # Not those that do not exist, nor those of a patch that is alone.
        there = [head_RC for head_RC in heads if head_RC.size > 1 and not np.isnan(head_RC).all()]
        steps = Counter(map(_favourite_step, there))
        return (
            f"{steps[0]} of {steps.total()} heads attend most to the patch itself, {steps[1]} to one beside it, "
            f" {steps[2]} to one farther away; {steps[None]} have nearly uniform attention."
        )

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._grids = {layer: site.geometry.grid_size for layer, site in found.layers.items()}
        self._means = QueryMeans(list(self._grids))

    def add(self, site: Site, tile: Tile) -> None:
        share_BWHTM, looking_BWHT = patch_shares(tile)
        # Not by their weights: one that is too small for its type is 0, and yet no mask hides it.
        is_pair_BWHTM = looking_BWHT[..., None] & tile.keys_WM2[:, None, None, :, 0].isfinite()
        if tile.shown is not None:
            is_pair_BWHTM = is_pair_BWHTM & tile.shown
        rows, cols = self._grids[site.layer]
        step_WTM2 = tile.keys_WM2[:, None].float() - tile.queries_WT2[:, :, None].float()
        down_WTM, right_WTM = torch.ceil(step_WTM2 - 0.5 - _ROUNDING).nan_to_num(0.0).long().unbind(-1)
        bins_WTM = (down_WTM + rows - 1) * (2 * cols - 1) + right_WTM + cols - 1
        num_bins = (2 * rows - 1) * (2 * cols - 1)
        # Swin's masks only push attention down, to some 1e-44: without a pair to divide it by, that would be infinite.
        paid_BWHTM = share_BWHTM.masked_fill(~is_pair_BWHTM, 0.0)
        paid_BHX, pairs_BHX = (
            sums_by_bin(values_BWHTM, bins_WTM, num_bins)
            for values_BWHTM in (paid_BWHTM, is_pair_BWHTM.to(share_BWHTM.dtype))
        )
        self._means.add_counted(site.layer, paid_BHX, pairs_BHX)

    def results(self) -> dict[str, Array]:
        maps = [
            mean_HX.reshape(-1, 2 * rows - 1, 2 * cols - 1)
            for mean_HX, (rows, cols) in zip(self._means.taken_by_layer(), self._grids.values(), strict=True)
        ]
        return {"offset_attention": stack_layers(maps)}


def _favourite_step(head_RC: Array) -> int | None:
    """The distance of the step that gets most attention: 0, 1, or 2 for all beyond; None where none stands out."""
    most = np.unravel_index(np.nanargmax(head_RC), head_RC.shape)
    if head_RC[most] < _STANDS_OUT * np.nanmedian(head_RC):
        return None
    steps = max(abs(int(place) - size // 2) for place, size in zip(most, head_RC.shape, strict=True))
    return 2 if steps > 1 else steps


@measurement("shares")
class Shares(Measurement):
    """Shares of the whole attention of a query, over all keys; the mean over the queries that are patches.

    `share_self` is on the key in the query's own cell, `share_neighbours` on those in the up to 8 cells around it.
    Where queries and keys are not on the same grid the cells are those of the coarser one, each token belonging to the
    cell whose centre is nearest (of two equally near ones, to the upper or left one): with pooled keys, `share_self` is
    on the key that was pooled from where the query is. `share_cls` is on the class token, 0 in a model without one;
    `share_registers` on all other tokens that are not patches, a distillation token among them. The rest up to 1 is
    on patches further away and on the padding of windows.
    """

    about = "per head: shares of attention on the patch itself, its 8 neighbours, CLS and registers"
    columns = _NAMES
    needs_tiles = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        means = {said: float(np.nanmean(table.extra[name])) for name, said in zip(_NAMES, _SAID, strict=True)}
        return f"Of all attention, {', '.join(f'{share:.1%} is on {said}' for said, share in means.items() if share)}."

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        device = batch.images.device
        borders = {layer: coarse_borders(found, layer, device) for layer in found.layers}
        self._kinds = {
            site.name: _Kinds.of(model, site.geometry, borders[site.layer], device) for site in found.sites.values()
        }
        self._cells = CellsOfSites(model, found, device)
        self._means = QueryMeans(list(found.layers))
        self._whole: dict[torch.Size, list[tuple[Site, Tensor]]] = {}
        self._counts: dict[str, Tensor] = {}

    def add_whole(self, site: Site, attention: Attention, dtype: torch.dtype) -> bool:
        if not has_kernel(attention, dtype) or attention.mask is not None or (cells := self._cells.of(site)) is None:
            return False
        shares_SBWHT, _ = attention_shares(attention, site, cells, only_of_whole=True)
        self._whole.setdefault(shares_SBWHT.shape, []).append((site, shares_SBWHT))
        return True

    def add(self, site: Site, tile: Tile) -> None:
        log_BWHTM = tile.log_weights_BWHTM
        looking_BWHT = (log_BWHTM.amax(-1) != -math.inf) & tile.queries_WT2[:, None, :, 0].isfinite()
        weight_BWHTM = log_BWHTM.softmax(-1)
        weight_SBWHT = torch.where(looking_BWHT, self._kinds[site.name].sums(weight_BWHTM, tile), 0.0)
        self._means.add(site.layer, weight_SBWHT.sum((2, 4)).permute(1, 2, 0), looking_BWHT)

    def results(self) -> dict[str, Tensor]:
        whole, self._whole = self._whole, {}
        for alike in whole.values():
            shares_LSBWHT = torch.stack([shares_SBWHT for _, shares_SBWHT in alike])
            sums_LBHS = shares_LSBWHT.sum((3, 5), dtype=torch.float64).permute(0, 2, 3, 1)
            for (site, _), sums_BHS in zip(alike, sums_LBHS, strict=True):
                if site.name not in self._counts:
                    self._counts[site.name] = sums_BHS.new_full((1, 1, 1), site.geometry.num_queries)
                self._means.add_counted(site.layer, sums_BHS, self._counts[site.name])
        return dict(zip(_NAMES, self._means.means().unbind(-1), strict=True))


@dataclass(frozen=True)
class _Kinds:
    """Which keys are what, for any query."""

    borders: tuple[Tensor, Tensor]
    """Between the rows, and between the columns, of the coarser grid, in cells of the layer's grid."""
    cls_WM: Tensor
    registers_WM: Tensor

    @classmethod
    def of(cls, model: nn.Module, geometry: Geometry, borders: tuple[Tensor, Tensor], device: torch.device) -> "_Kinds":
        cls_WM = class_keys(model, geometry)
        registers_WM = other_keys(geometry) & ~cls_WM
        return cls(borders, cls_WM.to(device), registers_WM.to(device))

    def sums(self, weight_BWHTM: Tensor, tile: Tile) -> Tensor:
        """The weight on each kind of key: [S, B, W, H, T]."""
        down_WTM, right_WTM = cells_apart(tile, self.borders)
        cells_WTM = torch.maximum(down_WTM, right_WTM)
        near = [_weight_on(weight_BWHTM, cells_WTM == steps, "wtm") for steps in (0, 1)]
        return torch.stack(
            [*near, *(_weight_on(weight_BWHTM, keys, "wm") for keys in (self.cls_WM, self.registers_WM))]
        )


def coarse_borders(found: Survey, layer: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Between the rows, and between the columns, of a layer's queries or keys, whichever are fewer: half-way."""
    parts = [site.geometry for site in found.sites.values() if site.layer == layer]
    rows, cols = (_borders(parts, axis).to(device, torch.float32) for axis in (0, 1))
    return rows, cols


class CellsOfSites:
    """Where the tokens of each site lie between such borders, for the kernel of `attention_shares`."""

    def __init__(self, model: nn.Module, found: Survey, device: torch.device) -> None:
        self._model, self._found, self._device = model, found, device
        self._known: dict[str, Cells | None] = {}

    def of(self, site: Site) -> Cells | None:
        """None if some window has no patch among its keys: this is not for the kernel."""
        if site.name not in self._known:
            self._known[site.name] = self._made(site)
        return self._known[site.name]

    def _made(self, site: Site) -> Cells | None:
        geometry = site.geometry
        if not geometry.key_places_WM2[..., 0].isfinite().any(-1).all():
            return None
        borders = coarse_borders(self._found, site.layer, torch.device("cpu"))
        queries_WN2, keys_WM2 = (
            torch.stack([cell_of(places, borders, axis) for axis in (0, 1)], dim=-1).where(places.isfinite(), math.nan)
            for places in (geometry.query_places_WN2, geometry.key_places_WM2)
        )
        cls_WM = class_keys(self._model, geometry)
        kinds = [at_edge(geometry.key_places_WM2, borders), cls_WM, other_keys(geometry) & ~cls_WM]
        return Cells(*(part.to(self._device, torch.float32) for part in (queries_WN2, keys_WM2, torch.stack(kinds))))


def at_edge(places_WX2: Tensor, borders: tuple[Tensor, Tensor]) -> Tensor:
    """Which tokens are patches of the first or the last row or column between these borders: [W, X] bool."""
    lines = [cell_of(places_WX2, borders, axis) for axis in (0, 1)]
    sides = [(line == 0) | (line == len(between)) for line, between in zip(lines, borders, strict=True)]
    return places_WX2[..., 0].isfinite() & (sides[0] | sides[1])


def cells_apart(tile: Tile, borders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """How many rows, and how many columns, between these borders lie from each query to each key, [W, T, M]; −1 for a
    key that is not a patch."""
    others_W1M = tile.keys_WM2[:, None, :, 0].isnan()
    down_WTM, right_WTM = (
        (cell_of(tile.queries_WT2, borders, axis)[..., None] - cell_of(tile.keys_WM2, borders, axis)[:, None])
        .abs()
        .masked_fill(others_W1M, -1)
        for axis in (0, 1)
    )
    return down_WTM, right_WTM


def cell_of(places_WX2: Tensor, borders: tuple[Tensor, Tensor], axis: int) -> Tensor:
    """The row, or the column, of tokens among those between these borders: [W, X]."""
    return torch.bucketize(places_WX2[..., axis].float().contiguous(), borders[axis])


def _borders(parts: Sequence[Geometry], axis: int) -> Tensor:
    """Half-way between the lines of a layer's tokens, of queries or keys: whichever are fewer."""
    places = [
        torch.cat([part.flatten() for part in those])
        for those in (
            [part.query_places_WN2[..., axis] for part in parts],
            [part.key_places_WM2[..., axis] for part in parts],
        )
    ]
    lines: Tensor = min((place[place.isfinite()].unique() for place in places), key=len)
    return (lines[1:] + lines[:-1]) / 2


def _weight_on(weight_BWHTM: Tensor, keys: Tensor, axes: str) -> Tensor:
    return torch.einsum(f"bwhtm,{axes}->bwht", weight_BWHTM, keys.to(weight_BWHTM.dtype))
