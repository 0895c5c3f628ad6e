"""At which distances attention is paid: the whole distribution, of which MAD is the mean.

Shape suffixes: B images, W windows, H heads, N queries, T queries of a tile, M keys, D distances.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.lens.geometry import Geometry
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, QueryMeans, measurement, patch_shares, stack_layers, sums_by_bin
from nearsight.lens.stream import Tile
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import Array, HeadTable

MOST_DISTANCES = 1024
"""A layer with more distinct distances than this has as many bins of equal width from 0 to its diagonal instead."""


@measurement("quantiles")
class DistanceMass(Measurement):
    """`distance_mass` [layers, heads, D]: the share of attention paid at each distance; `distance_values` [layers, D]
    says which distances these are, in diagonals of the layer's grid (NaN where a layer has fewer).

    Attention is renormalised over the patches, as for MAD; the mean is over a picture's queries and then over pictures,
    so that Σ mass·value is MAD. Up to 1,024 distinct distances (a grid of 50 × 50 tokens) are kept apart exactly; where
    there are more, they fall into 1,024 bins of equal width, a value is the middle of its bin, and what is derived is
    off by at most half a bin, 1/2,048 of the diagonal. `HeadTable.distance_quantiles` are made from this.
    """

    about = "per head: at which distances attention is paid (quantiles of the distribution whose mean is MAD)"
    needs_tiles = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        median = table.distance_quantiles([0.5])[..., 0]
        nearest, farthest = np.nanmin(median), np.nanmax(median)
        return f"Half of a head's attention is paid within {nearest:.3f} to {farthest:.3f} diagonals, by head."

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._values: dict[str, Tensor] = {}
        self._borders: dict[str, Tensor] = {}
        for layer in found.layers:
            parts = [site.geometry for site in found.sites.values() if site.layer == layer]
            values, borders = _bins(parts)
            self._values[layer], self._borders[layer] = values, borders.to(batch.images.device, torch.float32)
        self._means = QueryMeans(list(self._values))

    def add(self, site: Site, tile: Tile) -> None:
        share_BWHTM, looking_BWHT = patch_shares(tile)
        bins_WTM = torch.bucketize(tile.distances.float(), self._borders[site.layer])
        self._means.add(site.layer, sums_by_bin(share_BWHTM, bins_WTM, len(self._values[site.layer])), looking_BWHT)

    def results(self) -> dict[str, Array]:
        return {
            "distance_mass": self._means.taken(),
            "distance_values": stack_layers([values.numpy() for values in self._values.values()]),
        }


def _bins(parts: Sequence[Geometry]) -> tuple[Tensor, Tensor]:
    """(the values of the bins in diagonals, the borders between them in cells), for all parts of a layer."""
    exact, diagonal = _distinct(torch.cat([_distinct_distances(part) for part in parts])), parts[0].diagonal
    if len(exact) <= MOST_DISTANCES:
        return exact / diagonal, (exact[1:] + exact[:-1]) / 2
    edges = torch.linspace(0, 1, MOST_DISTANCES + 1, dtype=torch.float64)
    return (edges[1:] + edges[:-1]) / 2, edges[1:-1] * diagonal


def _distinct_distances(geometry: Geometry) -> Tensor:
    """In cells, ascending. Within a window tokens make up a grid, so that steps in y and in x go together freely."""
    found = []
    for queries_N2, keys_M2 in zip(geometry.query_places_WN2, geometry.key_places_WM2, strict=True):
        down, right = (_distinct_steps(queries_N2[:, axis], keys_M2[:, axis]) for axis in (0, 1))
        found.append(torch.hypot(down[:, None], right).flatten())
    return _distinct(torch.cat(found))


def _distinct_steps(from_N: Tensor, to_M: Tensor) -> Tensor:
    from_N, to_M = (lines[lines.isfinite()].unique() for lines in (from_N, to_M))
    return _distinct((from_N[:, None] - to_M).abs().flatten())


def _distinct(values: Tensor) -> Tensor:
    """Ascending; of values that differ by rounding alone, the least."""
    values = values.sort().values
    new = torch.ones_like(values, dtype=torch.bool)
    new[1:] = values.diff() > 1e-9
    return values[new]
