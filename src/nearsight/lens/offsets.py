"""In which direction and how far a head looks: attention by the step from the query to the key, as a picture.

Shape suffixes: B images, W windows, H heads, T queries of a tile, M keys, X steps.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from nearsight.lens.binning import patch_shares, sums_by_bin
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, QueryMeans, measurement, stack_layers
from nearsight.lens.stream import Tile
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import Array, HeadTable

_ROUNDING = 1e-5
"""Of a place, in cells."""
_STANDS_OUT = 2.0
"""Times the median: from there on a step gets more attention than others."""


@measurement("offsets")
class Offsets(Measurement):
    """`offset_attention` [layers, heads, 2·rows − 1, 2·columns − 1]: how much attention a query pays to a patch at each
    step from it, the middle being itself.

    Attention is renormalised over the patches, as for MAD; the mean is over all pairs of patches of a picture that are
    this step apart and may see each other, and then over pictures. So a head that looks everywhere alike has the same
    number everywhere, though long steps fit into the picture from few patches. NaN: no pair is so far apart, or the
    layer's grid is smaller than the largest. Pooled keys lie between cells: a step that is not whole counts for the
    nearest one, of two equally near ones for the one further up, or to the left. `HeadTable.offset_maps` gives the
    pictures of a layer.
    """

    about = "per head: how much attention is paid at each step from the patch, up, down and sideways (a picture)"
    table = None
    picture = "steps"
    needs_tiles = True

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        """How many heads look most at the patch itself, at one beside it, farther away, or nowhere more than
        elsewhere."""
        heads = [head_RC for layer in range(len(table.layer_names)) for head_RC in table.offset_maps(layer)]
        # Not those that do not exist, nor those of a patch that is alone.
        there = [head_RC for head_RC in heads if head_RC.size > 1 and not np.isnan(head_RC).all()]
        steps = Counter(map(_favourite_step, there))
        return (
            f"By the step that gets most, {steps[0]} of {steps.total()} heads look at the patch itself, {steps[1]} at "
            f"one beside it, {steps[2]} farther away; {steps[None]} look about everywhere alike."
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
