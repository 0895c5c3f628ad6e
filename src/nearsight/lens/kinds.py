"""What kind of head each one is: own patch, neighbour, row or column, edge, sink, global, or other.

The numbers of `nearsight.metrics.kind_shares`, tile by tile, wherever the queries and keys of a layer lie.

Shape suffixes: B images, W windows, H heads, T queries of a tile, M keys, S places that attention may go to.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nearsight.lens.attention import Attention
from nearsight.lens.columns import SHARES
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement, patch_shares, stacked
from nearsight.lens.shares import CellsOfSites, at_edge, cells_apart, coarse_borders
from nearsight.lens.stream import Tile, attention_shares, has_kernel
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import KIND_COLUMNS, HeadTable
from nearsight.lens.tokens import other_keys
from nearsight.metrics.attention import to_float64
from nearsight.metrics.kinds import KINDS, OTHER, KindShares, beyond, num_sinks

_PLACES = KindShares._fields[:5]
"""Those of the attention on patches; the first of `columns.SHARES`, too."""
_QUERIES = 128
"""Of uniform attention, at a time."""


@measurement("kinds")
class Kinds(Measurement):
    """`kind_own`, `kind_near`, `kind_row`, `kind_column`, `kind_edge`, `kind_sink` and `kind_breadth` [layers, heads]:
    how much of each kind a head is, from 0, uniform attention, to 1 (`nearsight.metrics.KindShares`).

    `HeadTable.kinds` says the kind by name. Uniform attention is over the patches that a query may attend to: in
    windows, on pooled keys and behind masks, too. Cells are those of the coarser of queries and keys, as for shares. Of
    sinks there are 2 % of the keys of each window. NaN where some query can attend to no such place (the image's edge,
    in windows), or to nothing else; all of them where attention is along time.
    """

    about = "per head: whether it is an own-patch, neighbour, row/column, edge, sink or global head (a strip)"
    picture = "strips"
    columns = tuple(KIND_COLUMNS.values())
    needs_tiles = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        counts = Counter(table.kinds().flatten().tolist())
        del counts[""]  # not heads
        if not counts:
            return "No head attends between places."
        first, *others = (kind for kind in (*KINDS, OTHER) if counts[kind])
        said = [f"{counts[first]} {'is' if counts[first] == 1 else 'are'} {first}"]
        said += [f"{counts[kind]} {kind}" for kind in others]
        return f"Of {counts.total()} heads, {', '.join(said)}."

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        device = batch.images.device
        self._borders = {layer: coarse_borders(found, layer, device) for layer in found.layers}
        self._others_WM = {site.name: other_keys(site.geometry).to(device) for site in found.sites.values()}
        self._along_time = [site.geometry.is_along_time for site in found.layers.values()]
        self._cells = CellsOfSites(model, found, device)
        self._uniform: dict[str, _Uniform] = {}
        self._sums: dict[str, _Sums] = {}
        self._whole: dict[str, _Whole] = {}

    def add_whole(self, site: Site, attention: Attention, dtype: torch.dtype) -> bool:
        if not has_kernel(attention, dtype) or attention.mask is not None or (cells := self._cells.of(site)) is None:
            return False
        if site.name not in self._uniform:
            self._uniform[site.name] = self._without_masks(site, attention.query.device)
        uniform = self._uniform[site.name]
        shares_SBWHT, received_1BWHM = attention_shares(attention, site, cells, uniform.queries_1WN)
        assert received_1BWHM is not None
        self._whole[site.name] = _Whole(site, shares_SBWHT, received_1BWHM[0])
        return True

    def add(self, site: Site, tile: Tile) -> None:
        sums = self._sums.setdefault(site.name, _Sums(site, self._others_WM[site.name]))
        sums.add(tile, _places(tile, self._borders[site.layer]))

    def _without_masks(self, site: Site, device: torch.device) -> "_Uniform":
        """By tiles of attention that is uniform."""
        geometry = site.geometry
        sums = _Sums(site, other_keys(geometry))
        borders = [border.cpu() for border in self._borders[site.layer]]
        is_key_W1M = geometry.key_places_WM2[:, None, :, 0].isfinite()
        for queries_WT2 in geometry.query_places_WN2.split(_QUERIES, dim=1):
            log_WTM = torch.where(is_key_W1M, 0.0, -math.inf).double().expand(-1, queries_WT2.shape[1], -1)
            tile = Tile(log_WTM[None, :, None], queries_WT2, geometry.key_places_WM2, is_key_W1M.sum(-1)[:, None])
            sums.add(tile, _places(tile, (borders[0], borders[1])))
        described_X = sums.described()[:, 0, 0]
        is_few_WM = sums.is_few_WM & is_key_W1M[:, 0].any(-1, keepdim=True)
        return _Uniform(
            described_X.to(device),
            geometry.query_places_WN2[None, ..., 0].isfinite().to(device, torch.float32),
            is_key_W1M.to(device, torch.float32),
            is_few_WM[:, None].to(device, torch.float64),
        )

    def results(self) -> dict[str, Tensor]:
        described = {name: sums.described() for name, sums in self._sums.items()}
        sites = [*(one.site for one in self._sums.values()), *(one.site for one in self._whole.values())]
        layer_of = {site.name: site.layer for site in sites}
        alike: dict[tuple[object, ...], list[_Whole]] = {}
        for one in self._whole.values():
            alike.setdefault((id(one.site.geometry), one.received_BWHM.shape), []).append(one)
        for group in alike.values():
            named = [one.site.name for one in group]
            described.update(zip(named, _described(group, self._uniform[named[0]]).unbind(0), strict=True))
        self._sums, self._whole = {}, {}
        by_layer: dict[str, Tensor] = {}
        for name, sums_XBH in described.items():
            layer = layer_of[name]
            by_layer[layer] = by_layer[layer] + sums_XBH if layer in by_layer else sums_XBH
        sums_LXBH = stacked([by_layer[layer] for layer in self._borders], heads=2)
        breadth_LBH, looking_LBH, choosing_LBH = sums_LXBH[:, -3:].unbind(1)
        mean_XLH = (sums_LXBH[:, :-3] / looking_LBH[:, None]).mean(2).movedim(1, 0)
        num = len(_PLACES)
        others_1LH, few_1LH, uniform_few_1LH = mean_XLH[2 * num :].split(1)
        on_SLH = torch.cat([mean_XLH[:num], few_1LH + others_1LH])
        uniform_SLH = torch.cat([mean_XLH[num : 2 * num], uniform_few_1LH])
        numbers = [*beyond(on_SLH, uniform_SLH), (breadth_LBH / choosing_LBH).mean(1)]
        if any(self._along_time):
            elsewhere_L1 = torch.tensor(self._along_time, device=on_SLH.device)[:, None]
            numbers = [values_LH.masked_fill(elsewhere_L1, math.nan) for values_LH in numbers]
        return {KIND_COLUMNS[name]: values for name, values in zip(KindShares._fields, numbers, strict=True)}


def _places(tile: Tile, borders: tuple[Tensor, Tensor]) -> Tensor:
    """Which keys are at each of `_PLACES` for each query: [S, W, T, M]."""
    down_WTM, right_WTM = cells_apart(tile, borders)
    steps_WTM = torch.maximum(down_WTM, right_WTM)
    edge_WTM = at_edge(tile.keys_WM2, borders)[:, None].expand(steps_WTM.shape)
    return torch.stack([steps_WTM == 0, (steps_WTM >= 0) & (steps_WTM <= 1), down_WTM == 0, right_WTM == 0, edge_WTM])


class _Sums:
    """Of the attention of a site, tile by tile."""

    def __init__(self, site: Site, others_WM: Tensor) -> None:
        self.site, self._others_WM = site, others_WM
        self._sums: list[Tensor] = []
        is_patch_WM = site.geometry.key_places_WM2[..., 0].isfinite()
        num_few_W1 = torch.tensor([[num_sinks(num)] for num in is_patch_WM.sum(-1).tolist()])
        self.is_few_WM = torch.arange(is_patch_WM.shape[1]) < num_few_W1

    def add(self, tile: Tile, places_SWTM: Tensor) -> None:
        share_BWHTM, looking_BWHT = patch_shares(tile)
        uniform_BWHTM, num_BWHT = _uniform(tile, share_BWHTM.dtype)
        places_SWTM = places_SWTM.to(share_BWHTM.dtype)
        on_SBWHT, uniform_SBWHT = (
            torch.einsum("bwhtm,swtm->sbwht", weights, places_SWTM) for weights in (share_BWHTM, uniform_BWHTM)
        )
        # One query that has no such place to attend to makes the mean over all of them say nothing.
        uniform_SBWHT = uniform_SBWHT.where(uniform_SBWHT > 0, torch.nan).expand(on_SBWHT.shape)
        weight_BWHTM = tile.log_weights_BWHTM.softmax(-1)
        others_BWHT = (weight_BWHTM * self._others_WM[:, None, None].to(share_BWHTM.dtype)).sum(-1)
        sums_SBWHT = torch.where(looking_BWHT, torch.cat([on_SBWHT, uniform_SBWHT, others_BWHT[None]]), 0.0)
        # A query that may attend to one patch alone has no breadth.
        chooses_BWHT = looking_BWHT & (num_BWHT > 1)
        in_use_BWHT = (-torch.xlogy(share_BWHTM, share_BWHTM).sum(-1)).exp()
        breadth_BWHT = torch.where(chooses_BWHT, (in_use_BWHT - 1) / (num_BWHT - 1), 0.0)
        is_patch_W11M = tile.keys_WM2[:, None, None, :, 0].isfinite()
        received_2BWHM = [
            (torch.where(looking_BWHT[..., None], weights, 0.0) * is_patch_W11M).sum(-2)
            for weights in (weight_BWHTM, uniform_BWHTM)
        ]
        counts_2BH = [looking_BWHT.sum((1, 3)), chooses_BWHT.sum((1, 3))]
        new = [sums_SBWHT.sum((2, 4)), breadth_BWHT.sum((1, 3)), *counts_2BH, *received_2BWHM]
        new = list(map(to_float64, new))
        self._sums = [before + sums for before, sums in zip(self._sums, new, strict=True)] if self._sums else new

    def described(self) -> Tensor:
        """[X, B, H]: sums over queries, on `_PLACES`, there by uniform attention, on other tokens, on the few keys of
        each window that get most, by uniform attention, of breadth; and how many queries, and how many with breadth."""
        sums_SBH, breadth_BH, looking_BH, choosing_BH, *received = self._sums
        few_2BH = [_most(received_BWHM, self.is_few_WM[:, None].to(received_BWHM)) for received_BWHM in received]
        return torch.cat([sums_SBH, torch.stack([*few_2BH, breadth_BH, looking_BH, choosing_BH])])


class _Whole(NamedTuple):
    """The attention of a site, by a kernel."""

    site: Site
    shares_SBWHT: Tensor
    """`columns.SHARES`, over the queries of a tile."""
    received_BWHM: Tensor


class _Uniform(NamedTuple):
    """What is the same for all images, where no mask hides anything."""

    described_X: Tensor
    """As `_Sums.described`, of uniform attention."""
    queries_1WN: Tensor
    is_patch_W1M: Tensor
    is_few_W1M: Tensor


def _described(group: Sequence[_Whole], uniform: _Uniform) -> Tensor:
    """As `_Sums.described`, of sites with tokens at the same places: [L, X, B, H]."""
    num = len(_PLACES)
    sums_LSBH = torch.stack([one.shares_SBWHT for one in group]).sum((3, 5), dtype=torch.float64)
    by_name = dict(zip(SHARES, sums_LSBH.split(1, dim=1), strict=True))
    received_LBWHM = torch.stack([one.received_BWHM for one in group]) * uniform.is_patch_W1M
    few_LBH = _most(received_LBWHM, uniform.is_few_W1M)
    uniform_LXBH = uniform.described_X[:, None, None].expand(len(group), -1, *few_LBH.shape[1:])
    return torch.cat(
        [
            sums_LSBH[:, :num],
            uniform_LXBH[:, num : 2 * num],
            by_name["cls"] + by_name["registers"],
            few_LBH[:, None],
            uniform_LXBH[:, 2 * num + 2 : 2 * num + 3],
            by_name["breadth"],
            uniform_LXBH[:, -2:],
        ],
        dim=1,
    )


def _most(received_BWHM: Tensor, is_few_W1M: Tensor) -> Tensor:
    """Over windows, what the few keys of each get that get most: [B, H]."""
    return (received_BWHM.sort(-1, descending=True).values * is_few_W1M).sum((-3, -1))


def _uniform(tile: Tile, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention alike to all patches that a query may attend to, and how many these are; they expand to [B, W, H, T, M]
    and [B, W, H, T]."""
    shown = tile.keys_WM2[:, None, None, :, 0].isfinite()[None].expand(-1, -1, -1, tile.queries_WT2.shape[1], -1)
    if tile.shown is not None:
        shown = shown & tile.shown[(None,) * (5 - tile.shown.dim())]
    num_BWHT = shown.sum(-1)
    return shown.to(dtype) / num_BWHT.clamp(min=1)[..., None], num_BWHT
