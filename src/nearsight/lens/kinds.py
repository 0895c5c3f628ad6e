"""What kind of head each one is: own patch, neighbour, row or column, edge, sink, global, or other.

The numbers of `nearsight.metrics.kind_shares`, tile by tile, wherever the queries and keys of a layer lie.

Shape suffixes: B images, W windows, H heads, T queries of a tile, M keys, S places that attention may go to.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, QueryMeans, measurement, patch_shares, stack_layers
from nearsight.lens.shares import cell_of, cells_apart, coarse_borders
from nearsight.lens.stream import Tile
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import KIND_COLUMNS, Array, HeadTable
from nearsight.lens.tokens import other_keys
from nearsight.metrics.attention import to_float64
from nearsight.metrics.kinds import KINDS, OTHER, KindShares, beyond, num_sinks

_PLACES = KindShares._fields[:5]
"""Those of the attention on patches."""


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
        self._means, self._breadths = (QueryMeans(list(found.layers)) for _ in range(2))
        self._sinks = {site.name: _Received(site.layer) for site in found.sites.values()}

    def add(self, site: Site, tile: Tile) -> None:
        share_BWHTM, looking_BWHT = patch_shares(tile)
        uniform_BWHTM, num_BWHT = _uniform(tile, share_BWHTM.dtype)
        places_SWTM = self._places(site, tile).to(share_BWHTM.dtype)
        on_SBWHT, uniform_SBWHT = (
            torch.einsum("bwhtm,swtm->sbwht", weights, places_SWTM) for weights in (share_BWHTM, uniform_BWHTM)
        )
        # One query that has no such place to attend to makes the mean over all of them say nothing.
        uniform_SBWHT = uniform_SBWHT.where(uniform_SBWHT > 0, torch.nan).expand(on_SBWHT.shape)
        others_W11M = self._others_WM[site.name][:, None, None].to(share_BWHTM.dtype)
        weight_BWHTM = tile.log_weights_BWHTM.softmax(-1)
        others_BWHT = (weight_BWHTM * others_W11M).sum(-1)
        sums_SBWHT = torch.where(looking_BWHT, torch.cat([on_SBWHT, uniform_SBWHT, others_BWHT[None]]), 0.0)
        self._means.add(site.layer, sums_SBWHT.sum((2, 4)).permute(1, 2, 0), looking_BWHT)
        self._sinks[site.name].add(tile, weight_BWHTM, uniform_BWHTM, looking_BWHT)
        # A query that may attend to one patch alone has no breadth.
        chooses_BWHT = looking_BWHT & (num_BWHT > 1)
        in_use_BWHT = (-torch.xlogy(share_BWHTM, share_BWHTM).sum(-1)).exp()
        breadth_BWHT = torch.where(chooses_BWHT, (in_use_BWHT - 1) / (num_BWHT - 1), 0.0)
        self._breadths.add(site.layer, breadth_BWHT.sum((1, 3))[..., None], chooses_BWHT)

    def _places(self, site: Site, tile: Tile) -> Tensor:
        """Which keys are at each of `_PLACES` for each query: [S, W, T, M]."""
        borders = self._borders[site.layer]
        down_WTM, right_WTM = cells_apart(tile, borders)
        steps_WTM = torch.maximum(down_WTM, right_WTM)
        lines = [cell_of(tile.keys_WM2, borders, axis) for axis in (0, 1)]
        sides = [(line == 0) | (line == len(between)) for line, between in zip(lines, borders, strict=True)]
        edge_WTM = (tile.keys_WM2[..., 0].isfinite() & (sides[0] | sides[1]))[:, None].expand(steps_WTM.shape)
        return torch.stack(
            [steps_WTM == 0, (steps_WTM >= 0) & (steps_WTM <= 1), down_WTM == 0, right_WTM == 0, edge_WTM]
        )

    def results(self) -> dict[str, Array]:
        found: dict[str, list[Array]] = {name: [] for name in KindShares._fields}
        received: dict[str, list[_Received]] = {}
        for sink in self._sinks.values():
            received.setdefault(sink.layer, []).append(sink)
        means, breadths = self._means.taken_by_layer(), self._breadths.taken_by_layer()
        layers = zip(means, breadths, received.values(), self._along_time, strict=True)
        for mean_HX, breadth_HX, parts, is_along_time in layers:
            mean_XH = torch.from_numpy(mean_HX).T
            num = len(_PLACES)
            few_H, uniform_H = _most_received(parts)
            numbers = [*beyond(mean_XH[:num], mean_XH[num : 2 * num]), beyond(few_H + mean_XH[-1], uniform_H)]
            for name, values_H in zip(found, [*numbers, torch.from_numpy(breadth_HX[:, 0])], strict=True):
                found[name].append(np.full(len(values_H), np.nan) if is_along_time else values_H.numpy())
        return {KIND_COLUMNS[name]: stack_layers(per_layer) for name, per_layer in found.items()}


class _Received:
    """What each key of a site gets from all queries together, and what it would get by uniform attention."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.sums: list[Tensor] = []
        self.num_looking_BH: Tensor | int = 0
        self.num_few_W = torch.zeros(0)

    def add(self, tile: Tile, weight_BWHTM: Tensor, uniform_BWHTM: Tensor, looking_BWHT: Tensor) -> None:
        is_patch_W11M = tile.keys_WM2[:, None, None, :, 0].isfinite()
        new = [
            to_float64((torch.where(looking_BWHT[..., None], weights, 0.0) * is_patch_W11M).sum(-2))
            for weights in (weight_BWHTM, uniform_BWHTM)
        ]
        if self.sums:
            new = [before + sums for before, sums in zip(self.sums, new, strict=True)]
        self.sums, self.num_looking_BH = new, self.num_looking_BH + looking_BWHT.sum((1, 3))
        self.num_few_W = torch.tensor([num_sinks(num) for num in is_patch_W11M.sum((1, 2, 3)).tolist()])

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H]: the sums over the few keys of each window that get most, and over queries; by uniform attention; and
        the number of queries. And ready for the next batch."""
        is_few_WM = torch.arange(self.sums[0].shape[-1]) < self.num_few_W[:, None]
        most = [
            (sums_BWHM.sort(-1, descending=True).values * is_few_WM[:, None].to(sums_BWHM)).sum((1, 3))
            for sums_BWHM in self.sums
        ]
        num_looking_BH = torch.as_tensor(self.num_looking_BH).to(most[0])
        self.sums, self.num_looking_BH = [], 0
        return most[0], most[1], num_looking_BH


def _most_received(parts: Sequence[_Received]) -> tuple[Tensor, Tensor]:
    """Of a layer, [H]: the share of attention on the few keys that get most; and by uniform attention."""
    taken = [part.taken() for part in parts]
    most_BH, uniform_BH, num_BH = (torch.stack(sums).sum(0) for sums in zip(*taken, strict=True))
    return (most_BH / num_BH).mean(0).cpu(), (uniform_BH / num_BH).mean(0).cpu()


def _uniform(tile: Tile, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention alike to all patches that a query may attend to, and how many these are; they expand to [B, W, H, T, M]
    and [B, W, H, T]."""
    shown = tile.keys_WM2[:, None, None, :, 0].isfinite()[None].expand(-1, -1, -1, tile.queries_WT2.shape[1], -1)
    if tile.shown is not None:
        shown = shown & tile.shown[(None,) * (5 - tile.shown.dim())]
    num_BWHT = shown.sum(-1)
    return shown.to(dtype) / num_BWHT.clamp(min=1)[..., None], num_BWHT
