"""What a patch's attention is spent on: itself, its neighbours, CLS, registers.

Shape suffixes: B images, W windows, H heads, T queries of a tile, M keys, S kinds of keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.lens.geometry import Geometry
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, QueryMeans, measurement
from nearsight.lens.stream import Tile
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import Array, HeadTable
from nearsight.lens.tokens import class_keys, other_keys

_NAMES = ("share_self", "share_neighbours", "share_cls", "share_registers")
_SAID = ("the patch itself", "its 8 neighbours", "CLS", "registers")


@measurement("shares")
class Shares(Measurement):
    """Shares of the whole attention of a query, over all keys; the mean over the queries that are patches.

    `share_self` is on the key in the query's own cell, `share_neighbours` on those in the up to 8 cells around it.
    Where queries and keys are not on the same grid the cells are those of the coarser one, each token belonging to the
    cell whose centre is nearest (of two equally near ones, to the upper or left one): with pooled keys, `share_self` is
    on the key that was pooled from where the query is. `share_cls` is on the class token, 0 in a model without one;
    `share_registers` on all other tokens that are no patches, a distillation token among them. What is missing to 1 is
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
        self._kinds: dict[str, _Kinds] = {}
        for layer in found.layers:
            parts = [site for site in found.sites.values() if site.layer == layer]
            rows, cols = (_borders([part.geometry for part in parts], axis) for axis in (0, 1))
            for part in parts:
                self._kinds[part.name] = _Kinds.of(model, part.geometry, (rows, cols), batch.images.device)
        self._means = QueryMeans(list(found.layers))

    def add(self, site: Site, tile: Tile) -> None:
        log_BWHTM = tile.log_weights_BWHTM
        looking_BWHT = (log_BWHTM.amax(-1) != -math.inf) & tile.queries_WT2[:, None, :, 0].isfinite()
        weight_BWHTM = log_BWHTM.softmax(-1)
        weight_SBWHT = torch.where(looking_BWHT, self._kinds[site.name].sums(weight_BWHTM, tile), 0.0)
        self._means.add(site.layer, weight_SBWHT.sum((2, 4)).permute(1, 2, 0), looking_BWHT)

    def results(self) -> dict[str, Array]:
        means = self._means.taken()
        return {name: means[..., kind] for kind, name in enumerate(_NAMES)}


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
        rows, cols = (lines.to(device, torch.float32) for lines in borders)
        return cls((rows, cols), cls_WM.to(device), registers_WM.to(device))

    def sums(self, weight_BWHTM: Tensor, tile: Tile) -> Tensor:
        """The weight on each kind of key: [S, B, W, H, T]."""
        apart = [
            torch.bucketize(tile.queries_WT2[..., axis, None].float().contiguous(), borders)
            - torch.bucketize(tile.keys_WM2[:, None, :, axis].float().contiguous(), borders)
            for axis, borders in enumerate(self.borders)
        ]
        cells_WTM = torch.maximum(apart[0].abs(), apart[1].abs())
        cells_WTM = cells_WTM.masked_fill(tile.keys_WM2[:, None, :, 0].isnan(), -1)
        near = [_weight_on(weight_BWHTM, cells_WTM == steps, "wtm") for steps in (0, 1)]
        return torch.stack(
            [*near, *(_weight_on(weight_BWHTM, keys, "wm") for keys in (self.cls_WM, self.registers_WM))]
        )


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
