"""What the tokens of each layer are like: coherent with their neighbours, or pulled towards CLS (S2 App. F)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement
from nearsight.lens.survey import Survey
from nearsight.lens.table import Array, HeadTable
from nearsight.lens.tokens import block_of, map_tokens, watching_outputs
from nearsight.metrics import locality_score, patch_cls_similarity


@measurement("features")
class Features(Measurement):
    """`locality_score` and `patch_cls_similarity` [layers] of the tokens that come out of each attention's block.

    Means over the images. NaN for a layer that is in no block, whose block does not return a grid of patches, or runs
    more than once in a forward; the similarity also in a model without a class token. Two attentions of one block have
    the same numbers.
    """

    about = "per layer: locality score and patch-CLS similarity of its tokens"
    table = "layer"

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        first, last = table.extra["locality_score"][[0, -1]]
        return (
            f"Locality score of the tokens: {first:.3f} after layer {layers[0] + 1}, "
            f"{last:.3f} after layer {layers[-1] + 1}."
        )

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._model = model
        self._blocks = [block_of(layer) for layer in found.layers]
        self._maps = map_tokens(model, batch, list(dict.fromkeys(filter(None, self._blocks))))
        self._seen: dict[str, tuple[float, float]] = {}

    def watching(self) -> AbstractContextManager[None]:
        return watching_outputs(self._model, list(self._maps), self._look)

    def _look(self, name: str, outputs: list[Tensor]) -> None:
        tokens = self._maps[name]
        patches_BPC, cls_B1C = tokens.patch_tokens(outputs), tokens.class_token(outputs)
        coherence = float(locality_score(patches_BPC, tokens.grid_size).mean())
        towards_cls = np.nan
        if cls_B1C is not None:
            towards_cls = float(patch_cls_similarity(torch.cat([cls_B1C, patches_BPC], dim=1)).mean())
        self._seen[name] = coherence, towards_cls

    def results(self) -> dict[str, Array]:
        seen, self._seen = self._seen, {}
        rows = np.array([seen.get(block or "", (np.nan, np.nan)) for block in self._blocks])
        return {"locality_score": rows[:, 0], "patch_cls_similarity": rows[:, 1]}
