"""Attention received: how much of it goes to CLS, to registers and to single patches, and what a head is without those
patches that receive most; and where CLS looks.

Shape suffixes: B images, W windows, H heads, N queries, M keys, K distinct places of keys, P patches, X numbers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.lens.attention import Attention
from nearsight.lens.geometry import Geometry
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement
from nearsight.lens.stream import has_kernel, received_attention, reduce_attention
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import HeadTable
from nearsight.lens.tokens import (
    TokenMap,
    block_tokens,
    class_keys,
    has_class_token,
    other_keys,
    watching_inputs,
)
from nearsight.metrics import gini, outlier_tokens, sink_patches
from nearsight.metrics.attention import to_float64

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
        self._keys: dict[str, _Keys] = {}
        for site in found.sites.values():
            into_block = self._maps.get(self._blocks[site.layer] or "")
            self._keys[site.name] = _Keys.of(model, site.geometry, into_block, device)
        self._layers = list(found.layers)
        self._outliers: dict[str, Tensor] = {}
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def watching(self) -> AbstractContextManager[None]:
        return watching_inputs(self._model, list(self._maps), self._look_at_input)

    def _look_at_input(self, name: str, inputs: list[Tensor]) -> None:
        tokens = self._maps[name]
        norms_BN = tokens.norms(inputs)
        self._outliers[name] = outlier_tokens(norms_BN[:, tokens.patches.to(norms_BN.device)])

    def look(self, site: Site, attention: Attention, reduced_2BH: Tensor, dtype: torch.dtype) -> None:
        keys = self._keys[site.name]
        received_XBWHM = received_attention(attention, site, keys.queries_XWN, dtype=dtype)
        total_BH = to_float64(received_XBWHM[0]).sum((1, 3))
        patches_XBHK = keys.at_places(to_float64(received_XBWHM))
        patches_BHK = patches_XBHK[0] / total_BH[..., None]
        sinks_BHK = sink_patches(patches_BHK)
        outlier_BP = self._outliers.get(self._blocks[site.layer] or "") if keys.are_patches else None
        unknown_BH = torch.full_like(total_BH, np.nan)
        without_2BH = reduced_2BH[:2]
        # To ask a GPU whether there are any is to wait for it.
        if has_kernel(attention, dtype) or bool(sinks_BHK.any()):
            without_BWHM = keys.of_places(sinks_BHK).to(received_XBWHM.device)
            new_2BH = reduce_attention(attention, site, dtype=dtype, without_BWHM=without_BWHM)[:2]
            without_2BH = torch.where(sinks_BHK.any(-1), new_2BH, without_2BH)
        numbers_XBH = torch.stack(
            [
                *(to_float64(received_XBWHM[0]) * keys.others_SW1M[:, None].to(total_BH)).sum((2, 4)) / total_BH,
                unknown_BH if outlier_BP is None else (patches_BHK * outlier_BP[:, None].to(total_BH)).sum(-1),
                torch.where(sinks_BHK, patches_BHK, 0.0).sum(-1),
                patches_BHK.amax(-1),
                gini(patches_BHK),
                *without_2BH,
                *(keys.spread(patches_XBHK[1]) if len(patches_XBHK) > 1 else [unknown_BH] * 2),
            ]
        )
        count = site.geometry.num_queries
        sums_XBH, before = self._sums.get(site.layer, (0.0, 0))
        self._sums[site.layer] = sums_XBH + count * numbers_XBH, before + count

    def results(self) -> dict[str, Tensor]:
        means = [sums_XBH.mean(1) / count for sums_XBH, count in (self._sums[layer] for layer in self._layers)]
        self._sums, self._outliers = {}, {}
        most = max(mean_XH.shape[1] for mean_XH in means)
        stacked_XLH = torch.stack([F.pad(mean, (0, most - mean.shape[1]), value=np.nan) for mean in means], dim=1)
        return dict(zip(_NAMES, stacked_XLH.unbind(0), strict=True))


@dataclass(frozen=True)
class _Keys:
    """Which keys of a site are what, and where."""

    queries_XWN: Tensor
    """1 for queries that are patches; and, if there is one, for CLS."""
    others_SW1M: Tensor
    """Whether a key is CLS, and whether it is a register."""
    place_WM: Tensor
    """The number of a key's place; one more than the last for a key that has none."""
    places_K2: Tensor
    """(y, x) of each place from the centre of the image, in diagonals."""
    are_patches: bool
    """Whether the places are the patches of the block's input, row by row."""

    @classmethod
    def of(cls, model: nn.Module, geometry: Geometry, tokens: TokenMap | None, device: torch.device) -> "_Keys":
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
        others_SWM = torch.stack([cls_WM, other_keys(geometry) & ~cls_WM])
        own = device if device.type != "mps" else torch.device("cpu")
        return cls(
            queries_XWN.to(device),
            others_SWM[:, :, None].to(own),
            place_WM.to(own),
            from_centre_K2.to(own),
            are_patches,
        )

    def at_places(self, received_XBWHM: Tensor) -> Tensor:
        """By place, summed over windows that share it: [X, B, H, K]."""
        flat_XBHJ = received_XBWHM.movedim(2, 3).flatten(3)
        places_XBHK = flat_XBHJ.new_zeros(*flat_XBHJ.shape[:-1], len(self.places_K2) + 1)
        return places_XBHK.index_add_(-1, self.place_WM.flatten(), flat_XBHJ)[..., :-1]

    def of_places(self, values_BHK: Tensor) -> Tensor:
        """What is true of places as a mask of keys, [B, W, H, M]."""
        return F.pad(values_BHK, (0, 1))[..., self.place_WM].movedim(2, 1)

    def spread(self, weights_BHK: Tensor) -> tuple[Tensor, Tensor]:
        """Mean distance from the centre of the image, and root mean square distance from their own: [B, H] each."""
        share_BHK = weights_BHK / weights_BHK.sum(-1, keepdim=True)
        from_own_BHK2 = self.places_K2 - (share_BHK @ self.places_K2).unsqueeze(-2)
        return share_BHK @ self.places_K2.norm(dim=1), (share_BHK * from_own_BHK2.square().sum(-1)).sum(-1).sqrt()
