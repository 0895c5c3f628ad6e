"""Attention received: how much of it goes to CLS, to registers and to single patches, and what a head is without those
patches that receive most; and where CLS looks.

Shape suffixes: B images, W windows, H heads, N queries, M keys, K distinct places of keys, P patches, X numbers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.lens.attention import Attention
from nearsight.lens.columns import sinks_by_kernel
from nearsight.lens.geometry import Geometry
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement, stacked
from nearsight.lens.stream import has_kernel, received_attention, reduce_attention, rows_without
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import HeadTable
from nearsight.lens.tokens import (
    TokenMap,
    block_tokens,
    class_keys,
    has_class_token,
    other_keys,
    same_tokens,
    watching_inputs,
)
from nearsight.metrics import gini, outlier_tokens, sink_patches
from nearsight.metrics.attention import to_float64
from nearsight.metrics.tokens import TIMES

_NAMES = (
    "share_cls",
    "share_registers",
    "share_outliers",
    "share_sinks",
    "max_received",
    "gini_received",
    "mad_without_sinks",
    "entropy_without_sinks",
    "cls_from_centre",
    "cls_spread",
)
_MANY = 0.1
"""The share of attention on sinks from which on the summary counts a head."""


@measurement("sinks")
class Sinks(Measurement):
    """What each token receives of the patches' attention, on average over an image's query patches; means over images.

    `share_cls`, `share_registers`: of the whole attention, on CLS and on all other tokens that are not patches.
    `share_outliers`: on patches whose token is an outlier by its norm (`nearsight.metrics.outlier_tokens`) in what goes
    *into* the attention's block: that is what keys are made from; what comes out has this attention in it already. NaN
    where the keys are not the patches of that input one by one (pooled keys), or it is no grid of patches.
    `share_sinks`: on sinks, which are patches that receive more than ten times the mean of all
    (`nearsight.metrics.sink_patches`). `max_received`: on the patch that receives most. `gini_received`: the Gini
    coefficient over patches, 0 where all receive the same.

    `mad_without_sinks`, `entropy_without_sinks`: distance and entropy with each image's sinks left out as keys, what is
    left of each query's attention being renormalised; entropy is divided by the logarithm of the patches that are left.

    `cls_from_centre`, `cls_spread`: of CLS's own attention to patches, the mean distance from the centre of the image,
    and the root mean square distance from its own centre of mass, in diagonals of the grid. CLS itself has no place.
    NaN without a class token among the queries.

    A token that is a key of several windows receives the sum. Where a layer is computed in parts, sinks are those of
    each part.
    """

    about = "per head: attention received by CLS, registers, outliers and single patches; MAD without sinks"
    picture = "heat"
    columns = ("share_cls", "share_registers", "share_sinks", "max_received", "gini_received")
    of_images = ("mad_without_sinks",)
    needs_attention = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        share, most = table.extra["share_sinks"], table.extra["max_received"]
        heads = int(np.isfinite(share).sum())
        layer, head = map(int, np.unravel_index(np.nanargmax(most), most.shape))
        without, change = table.extra["mad_without_sinks"], 0.0
        if np.isfinite(table.mad).any():
            change = float(np.nanmax(np.abs(without - table.mad)))
        return (
            f"{int((share > _MANY).sum())} of {heads} heads give more than {_MANY:.0%} of their attention to sinks "
            f"among the patches; one patch receives {most[layer, head]:.1%} at most on average (layer "
            f"{layers[layer]}, head {head}). Without sinks the distance of a head changes by {change:.3f} at most."
        )

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._model, device = model, batch.images.device
        tokens = block_tokens(model, found, batch)
        self._blocks, self._maps = dict(zip(found.layers, tokens.of_layers, strict=True)), tokens.inputs
        self._keys: dict[str, Keys] = {}
        known: list[tuple[Geometry, TokenMap | None, Keys]] = []
        for site in found.sites.values():
            own, into_block = site.geometry, self._maps.get(self._blocks[site.layer] or "")
            alike = (keys for geometry, other, keys in known if geometry is own and same_tokens(other, into_block))
            if (keys := next(alike, None)) is None:
                keys = Keys.of(model, own, into_block, device)
                known.append((own, into_block, keys))
            self._keys[site.name] = keys
        self._layers = list(found.layers)
        self._norms: dict[str, Tensor] = {}
        self._seen: dict[str, _Seen] = {}

    def watching(self) -> AbstractContextManager[None]:
        return watching_inputs(self._model, list(self._maps), self._look_at_input)

    def _look_at_input(self, name: str, inputs: list[Tensor]) -> None:
        self._norms[name] = self._maps[name].norms(inputs)

    def look(self, site: Site, attention: Attention, reduced_2BH: Tensor, dtype: torch.dtype) -> None:
        """What does not need the attention itself is left to `results`, where many layers share an operation."""
        keys = self._keys[site.name]
        received_XBWHM = received_attention(attention, site, keys.queries_XWN, dtype=dtype)
        without_2BH, rows_2BHN = reduced_2BH[:2], None
        if keys.run is not None and has_kernel(attention, dtype) and attention.mask is None:
            # To ask a GPU whether there are any would be to wait for it: the kernel finds out.
            sinks_BWHK = sinks_by_kernel(received_XBWHM[0], keys.run, TIMES)
            rows_2BHN, sinks_BHK = rows_without(attention, site, sinks_BWHK)[:, :, 0], sinks_BWHK[:, 0]
        else:
            sinks_BHK = sink_patches(keys.at_places(received_XBWHM[0]))
            if has_kernel(attention, dtype) or bool(sinks_BHK.any()):
                without_BWHM = keys.of_places(sinks_BHK).to(received_XBWHM.device)
                new_2BH = reduce_attention(attention, site, dtype=dtype, without_BWHM=without_BWHM)[:2]
                without_2BH = torch.where(sinks_BHK.any(-1), new_2BH, without_2BH)
        self._seen[site.name] = _Seen(site, received_XBWHM, sinks_BHK, without_2BH, rows_2BHN)

    def results(self) -> dict[str, Tensor]:
        alike: dict[tuple[object, ...], list[_Seen]] = {}
        for one in self._seen.values():
            kind = id(self._keys[one.site.name]), one.received_XBWHM.shape, one.rows_2BHN is None
            alike.setdefault(kind, []).append(one)
        parts: dict[str, list[tuple[int, Tensor]]] = {layer: [] for layer in self._layers}
        for group in alike.values():
            for one, values_XBH in zip(group, self._described(group).unbind(1), strict=True):
                parts[one.site.layer].append((one.site.geometry.num_queries, values_XBH))
        self._seen, self._norms = {}, {}
        values_LXBH = stacked([_weighted_mean(of_layer) for of_layer in parts.values()], heads=2)
        found = dict(zip(_NAMES, values_LXBH.mean(2).unbind(1), strict=True))
        return found | {name: values_LXBH[:, _NAMES.index(name)].transpose(0, 1) for name in self.of_images}

    def _described(self, group: Sequence["_Seen"]) -> Tensor:
        """`_NAMES` of sites with keys at the same places, [X, L, B, H] float64."""
        keys = self._keys[group[0].site.name]
        received_XLBWHM = torch.stack([one.received_XBWHM for one in group], dim=1)
        raw_XLBHK, sinks_LBHK = keys.at_places(received_XLBWHM), torch.stack([one.sinks_BHK for one in group])
        whole_XLBWHM = to_float64(received_XLBWHM)
        total_LBH = whole_XLBWHM[0].sum((2, 4))
        patches_XLBHK = keys.at_places(whole_XLBWHM)
        share_LBHK = patches_XLBHK[0] / total_LBH[..., None]
        unknown_LBH = torch.full_like(total_LBH, np.nan)
        outliers_LBH = unknown_LBH
        if keys.tokens is not None:
            norms_LBN = torch.stack([self._norms[self._blocks[one.site.layer] or ""] for one in group])
            outlier_LBP = outlier_tokens(norms_LBN[..., keys.patches_P])
            outliers_LBH = (share_LBHK * outlier_LBP[:, :, None].to(share_LBHK.device)).sum(-1)
        without_2LBH = torch.stack([one.without_2BH for one in group], dim=1)
        if group[0].rows_2BHN is not None:
            rows_2LBHN = torch.stack([one.rows_2BHN for one in group if one.rows_2BHN is not None], dim=1)
            sums_2LBH = rows_2LBHN[..., keys.query_run].sum(-1, dtype=torch.float64)
            num_sinks_LBH = sinks_LBHK.sum(-1, dtype=torch.float64)
            sums_2LBH[1] /= (sinks_LBHK.shape[-1] - num_sinks_LBH).log_()
            without_2LBH = torch.where(num_sinks_LBH > 0, sums_2LBH * keys.means_2111, without_2LBH)
        return torch.stack(
            [
                *((whole_XLBWHM[0] * others_WM[:, None]).sum((2, 4)) / total_LBH for others_WM in keys.others_SWM),
                outliers_LBH,
                (share_LBHK * sinks_LBHK).sum(-1),
                share_LBHK.amax(-1),
                gini(raw_XLBHK[0]),
                *without_2LBH,
                *(keys.spread(patches_XLBHK[1]) if len(patches_XLBHK) > 1 else [unknown_LBH] * 2),
            ]
        )


class _Seen(NamedTuple):
    """One attention, as far as its model's queries and keys were needed."""

    site: Site
    received_XBWHM: Tensor
    """By all keys, from each of `Keys.queries_XWN`."""
    sinks_BHK: Tensor
    without_2BH: Tensor
    """Distance and entropy without sinks, and where there are none."""
    rows_2BHN: Tensor | None
    """Instead of these for maps that have sinks: those of single queries, in cells and nats."""


@dataclass(frozen=True)
class Keys:
    """Which keys of a site are what, and where."""

    queries_XWN: Tensor
    """1 for queries that are patches; and, if there is one, for CLS; float32."""
    others_SWM: Tensor
    """Whether a key is CLS, and whether it is a register: 1 or 0, float64."""
    place_WM: Tensor
    """The number of a key's place; one more than the last for a key that has none."""
    places_K2: Tensor
    """(y, x) of each place from the centre of the image, in diagonals."""
    moments_K3: Tensor
    """(y, x, distance) of each place from there."""
    means_2111: Tensor
    """What makes means of an image's distances, in diagonals, out of sums in cells; and of its entropies."""
    run: slice | None
    """In a single window, the keys that are patches, if they are the places in their order and without a gap."""
    query_run: slice
    """And its queries that are patches."""
    tokens: TokenMap | None
    """Of the block's input, if its patches are these places, row by row."""
    patches_P: Tensor
    """Where they are in it."""
    grid: tuple[int, int] | None
    """Rows and columns of the places, if there is one at each crossing, row by row; None of videos."""

    @classmethod
    def of(cls, model: nn.Module, geometry: Geometry, tokens: TokenMap | None, device: torch.device) -> "Keys":
        is_patch_WN = geometry.query_places_WN2[..., 0].isfinite()
        queries_XWN = is_patch_WN[None]
        others_WN = ~is_patch_WN
        if len(others_WN) == 1 and has_class_token(model) and bool(others_WN.any()):
            queries_XWN = torch.stack([is_patch_WN, others_WN & (others_WN.cumsum(-1) == 1)])
        cls_WM = class_keys(model, geometry)
        places_WM2, times_WM = geometry.key_places_WM2, geometry.key_times_WM
        there_WM = places_WM2[..., 0].isfinite()
        # Rounded, because what is pooled to one place may be computed in two ways.
        times_WM = torch.zeros_like(places_WM2[..., 0]) if times_WM is None else times_WM
        places_J3 = torch.cat([times_WM[..., None], places_WM2], dim=-1)[there_WM].round(decimals=6)
        distinct_K3, number_J = places_J3.unique(dim=0, return_inverse=True)
        place_WM = torch.full(there_WM.shape, len(distinct_K3))
        place_WM[there_WM] = number_J
        (rows, cols), distinct_K2 = geometry.grid_size, distinct_K3[:, 1:]
        from_centre_K2 = (distinct_K2 - torch.tensor([rows - 1, cols - 1]) / 2) / geometry.diagonal
        grid_P2 = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).view(-1, 2).to(distinct_K2)
        are_patches = tokens is not None and tokens.grid_size == (rows, cols) and torch.equal(grid_P2, distinct_K2)
        others_SWM = torch.stack([cls_WM, other_keys(geometry) & ~cls_WM]).double()
        own = device if device.type != "mps" else torch.device("cpu")
        runs = _run(there_WM), _run(is_patch_WN)
        in_order = None not in runs and torch.equal(number_J, torch.arange(len(distinct_K3)))
        return cls(
            queries_XWN.to(device, torch.float32),
            others_SWM.to(own),
            place_WM.to(own),
            from_centre_K2.to(own),
            torch.cat([from_centre_K2, from_centre_K2.norm(dim=1, keepdim=True)], dim=1).to(own),
            (torch.tensor([1 / geometry.diagonal, 1.0], dtype=torch.float64) / geometry.num_queries)
            .view(2, 1, 1, 1)
            .to(own),
            runs[0] if in_order else None,
            runs[1] or slice(None),
            tokens if are_patches else None,
            tokens.patches.to(device) if tokens is not None and are_patches else place_WM.new_empty(0),
            _grid(distinct_K3),
        )

    def at_places(self, received_XBWHM: Tensor) -> Tensor:
        """By place, summed over windows that share it: [X, B, H, K]; other leading axes are carried through."""
        if self.run is not None:
            return received_XBWHM[..., 0, :, self.run]
        flat_XBHJ = to_float64(received_XBWHM).movedim(-3, -2).flatten(-2)
        places_XBHK = flat_XBHJ.new_zeros(*flat_XBHJ.shape[:-1], len(self.places_K2) + 1)
        return places_XBHK.index_add_(-1, self.place_WM.flatten(), flat_XBHJ)[..., :-1]

    def of_places(self, values_BHK: Tensor) -> Tensor:
        """What is true of places as a mask of keys, [B, W, H, M]."""
        return F.pad(values_BHK, (0, 1))[..., self.place_WM].movedim(2, 1)

    def spread(self, weights_BHK: Tensor) -> tuple[Tensor, Tensor]:
        """Mean distance from the centre of the image, and root mean square distance from their own: [B, H] each."""
        share_BHK = weights_BHK / weights_BHK.sum(-1, keepdim=True)
        # Sums and no matrix product, whose last digits depend on how many layers there are.
        moments_BH3 = (share_BHK[..., None, :] * self.moments_K3.T).sum(-1)
        from_own_BHK2 = self.places_K2 - moments_BH3[..., None, :2]
        return moments_BH3[..., 2], (share_BHK * from_own_BHK2.square().sum(-1)).sum(-1).sqrt()


def _weighted_mean(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Of the parts of a layer, by their queries."""
    if len(parts) == 1:
        return parts[0][1]
    return torch.stack([count * mean for count, mean in parts]).sum(0) / sum(count for count, _ in parts)


def _grid(distinct_K3: Tensor) -> tuple[int, int] | None:
    """Of sorted places (time, row, column) that fill a grid."""
    times, rows, cols = (len(distinct_K3[:, axis].unique()) for axis in range(3))
    return (rows, cols) if times == 1 and rows * cols == len(distinct_K3) else None


def _run(is_patch_WX: Tensor) -> slice | None:
    """The patches of a single window, if they follow one another without a gap."""
    at = is_patch_WX[0].nonzero().flatten().tolist()
    is_run = len(is_patch_WX) == 1 and at == list(range(at[0], at[-1] + 1))
    return slice(at[0], at[-1] + 1) if is_run else None
