"""Norms of the tokens that come out of each block, and which patches stand out by theirs (Darcet et al. 2024).

Shape suffixes: B images, N tokens, P patches, L layers, R rows, C columns.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement
from nearsight.lens.survey import Survey
from nearsight.lens.table import HeadTable
from nearsight.lens.tokens import TokenMap, alike, block_tokens, watching_outputs
from nearsight.metrics.attention import to_float64
from nearsight.metrics.tokens import outlier_bound, quantile

_NAMES = ("norm_patches", "norm_median", "norm_cls", "norm_registers", "outlier_share")
_WORTH_A_PLACE = 1e-4
"""The share of outliers from which on the summary says where they are."""


@measurement("norms")
class Norms(Measurement):
    """Norms of the tokens that come out of each attention's block, [layers]: the mean and the median of an image's
    patches (`norm_patches`, `norm_median`), CLS (`norm_cls`) and the mean of the registers (`norm_registers`), a
    distillation token among them; `outlier_share`, the share of patches whose norm is an outlier
    (`nearsight.metrics.outlier_tokens`); and `outlier_map` [layers, rows, columns], how often each place is one.

    Means over the images. NaN where there is no such token, and for a layer that is in no block, whose block does not
    return a grid of patches, or runs more than once in a forward. In networks with a norm behind the residual
    connection (Swin V2) norms say little. Places are known for images of one size only.
    """

    about = "per layer: norms of its tokens, and the share and places of outliers among the patches"
    table = "layer"
    picture = "layers"
    columns = _NAMES

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        share, maps = table.extra["outlier_share"], table.extra["outlier_map"]
        if np.isnan(share).all():
            return "Norms of tokens are not known: no block returns one grid of patches."
        most = int(np.nanargmax(share))
        if share[most] < _WORTH_A_PLACE:
            return f"No more than {_WORTH_A_PLACE:.2%} of the patches are outliers by their norm, in any layer."
        often_RC = maps[most][~np.isnan(maps[most]).all(1)][:, ~np.isnan(maps[most]).all(0)]
        inner = often_RC[1:-1, 1:-1]
        edge, area = 1 - inner.sum() / often_RC.sum(), 1 - inner.size / often_RC.size
        return (
            f"Outliers by their norm are {share[most]:.2%} of the patches at most, after layer {layers[most]}; "
            f"{edge:.0%} of them lie at the border of the image, which has {area:.0%} of the patches."
        )

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._model = model
        tokens = block_tokens(model, found, batch)
        self._blocks, self._maps = tokens.of_layers, tokens.outputs
        self._alike = alike(self._maps)
        self._seen: dict[str, Tensor] = {}
        sides = [tokens.grid_size for tokens in self._maps.values()] or [(1, 1)]
        self._grid_size = max(rows for rows, _ in sides), max(cols for _, cols in sides)

    def watching(self) -> AbstractContextManager[None]:
        return watching_outputs(self._model, list(self._maps), self._look)

    def _look(self, name: str, outputs: list[Tensor]) -> None:
        self._seen[name] = self._maps[name].norms(outputs)

    def results(self) -> dict[str, Tensor]:
        seen, self._seen = self._seen, {}
        device = next((to_float64(norms).device for norms in seen.values()), torch.device("cpu"))
        unknown = torch.full((len(_NAMES),), np.nan, dtype=torch.float64, device=device)
        nowhere_RC = unknown.new_full(self._grid_size, np.nan)
        numbers, maps = dict[str, Tensor](), dict[str, Tensor]()
        # Layers with tokens at the same positions go together: each operation is launched once.
        for names in self._alike:
            norms_LBN = torch.stack([seen[name] for name in names])
            found_LX, often_LRC = _described(to_float64(norms_LBN), self._maps[names[0]])
            rows, cols = often_LRC.shape[1:]
            padding = (0, self._grid_size[1] - cols, 0, self._grid_size[0] - rows)
            often_LRC = torch.nn.functional.pad(often_LRC, padding, value=np.nan)
            numbers.update(zip(names, found_LX, strict=True))
            maps.update(zip(names, often_LRC, strict=True))
        per_layer = torch.stack([numbers.get(block or "", unknown) for block in self._blocks])
        return dict(zip(_NAMES, per_layer.unbind(1), strict=True)) | {
            "outlier_map": torch.stack([maps.get(block or "", nowhere_RC) for block in self._blocks])
        }


def _described(norms_LBN: Tensor, tokens: TokenMap) -> tuple[Tensor, Tensor]:
    """The numbers of each layer [L, X], and how often each place is an outlier [L, R, C]."""
    patches_LBP = norms_LBN[..., tokens.patches.to(norms_LBN.device)]
    sorted_LBP = patches_LBP.sort(-1).values
    outlier_LBP = (patches_LBP > outlier_bound(sorted_LBP)).double()
    unknown_L = norms_LBN.new_full(norms_LBN.shape[:1], np.nan)
    found_LX = torch.stack(
        [
            patches_LBP.mean((1, 2)),
            quantile(sorted_LBP, 0.5).mean((1, 2)),
            unknown_L if tokens.cls is None else norms_LBN[..., tokens.cls].mean(1),
            torch.stack([norms_LBN[..., at].mean(1) for at in tokens.registers]).mean(0)
            if tokens.registers
            else unknown_L,
            outlier_LBP.mean((1, 2)),
        ],
        dim=1,
    )
    return found_LX, outlier_LBP.mean(1).unflatten(1, tokens.grid_size)
