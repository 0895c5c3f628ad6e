"""How much attention lies on the background, where pictures come with masks of it (lazy aggregation, Shi et al. 2026).

Shape suffixes: B images, L layers, H heads, W windows, M keys, K distinct places of keys, X sets of queries.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.attention import Attention
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement, stacked
from nearsight.lens.sinks import Keys
from nearsight.lens.stream import received_attention
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import HeadTable
from nearsight.metrics import patch_coverage
from nearsight.metrics.attention import to_float64

_NAMES = ("background_cls", "background_patches", "background_area")


@measurement("background")
class Background(Measurement):
    """The share of the attention on patches that lies on the background, of every head; it takes `masks`.

    `background_cls` is that of CLS's attention, NaN without a class token among the queries; `background_patches` that
    of all patches together, as queries. `background_area` is what uniform attention has: the background's share of the
    picture. A patch that is background in part counts by that part (`nearsight.metrics.patch_coverage`); attention to
    CLS, registers and padding is left out (`nearsight.metrics.background_share`). ViTs that use background patches to
    represent the whole image ("lazy aggregation", Shi, Yu and Yang 2026, arXiv 2602.22394) put more there than its
    area. NaN where the keys lie on no grid that divides the mask evenly.

    All three are kept picture by picture, so differences to the area have intervals.
    """

    about = "per head: attention of CLS and of patches on the background, for pictures with masks"
    picture = "heat"
    columns = _NAMES[:2]
    of_images = _NAMES
    needs_attention = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        area = table.extra["background_area"]
        if not np.isfinite(area).any():
            return "The background is not known: the keys lie on no grid that divides the masks evenly."
        said = f"The background is {np.nanmean(area):.1%} of the pictures."
        for name, who in zip(_NAMES, ("CLS gives", "Patches give"), strict=False):
            beyond = table.extra[name] - area
            if np.isfinite(beyond).any():
                layer, head = map(int, np.unravel_index(np.nanargmax(beyond), beyond.shape))
                said += (
                    f" {who} it {np.nanmean(table.extra[name]):.1%} of the attention on patches on average over the "
                    f"heads, and {table.extra[name][layer, head]:.1%} at most (layer {layers[layer]}, head {head})."
                )
        return said

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        device = batch.images.device
        keys: dict[int, Keys] = {}
        self._keys = {
            site.name: keys.setdefault(id(site.geometry), Keys.of(model, site.geometry, None, device))
            for site in found.sites.values()
        }
        self._layers = list(found.layers)
        self._sums: dict[str, Tensor] = {}
        self._masks: Tensor | None = None
        self._covered: dict[tuple[int, int] | None, Tensor] = {}

    def starting(self, batch: Batch) -> None:
        if batch.masks is None:
            raise InputError("the background is known by masks; give measure(…, masks=…)")
        self._masks, self._covered = ~batch.masks, {}

    def look(self, site: Site, attention: Attention, reduced_2BH: Tensor, dtype: torch.dtype) -> None:
        keys = self._keys[site.name]
        received_XBHK = to_float64(keys.at_places(received_attention(attention, site, keys.queries_XWN, dtype=dtype)))
        background_B1K = self._background(keys.grid).to(received_XBHK.device)[:, None]
        there_XBH, whole_XBH = (received_XBHK * background_B1K).sum(-1), received_XBHK.sum(-1)
        if len(whole_XBH) == 1:  # no class token
            unknown_1BH = torch.full_like(whole_XBH, math.nan)
            there_XBH, whole_XBH = (torch.cat([part, unknown_1BH]) for part in (there_XBH, whole_XBH))
        area_BH = background_B1K.mean(-1).expand_as(whole_XBH[0]) * whole_XBH[0]
        sums_5BH = torch.stack([*there_XBH, area_BH, *whole_XBH])
        self._sums[site.layer] = self._sums[site.layer] + sums_5BH if site.layer in self._sums else sums_5BH

    def _background(self, grid: tuple[int, int] | None) -> Tensor:
        """The part of each place that is background, [B, K]; NaN, for any number of places, where that is not known."""
        assert self._masks is not None
        if grid not in self._covered:
            rows, cols = grid or (0, 0)
            height, width = self._masks.shape[-2:]
            is_known = grid is not None and height % rows == 0 and width % cols == 0
            covered = (
                patch_coverage(self._masks, (rows, cols)) if is_known else torch.full((len(self._masks), 1), math.nan)
            )
            self._covered[grid] = covered
        return self._covered[grid]

    def results(self) -> dict[str, Tensor]:
        sums_L5BH = stacked([self._sums[layer] for layer in self._layers], heads=2)
        self._sums, self._masks, self._covered = {}, None, {}
        by_patches, by_cls, area, patches, cls = sums_L5BH.unbind(1)
        shares = by_cls / cls, by_patches / patches, area / patches
        return {name: share_LBH.transpose(0, 1) for name, share_LBH in zip(_NAMES, shares, strict=True)}
