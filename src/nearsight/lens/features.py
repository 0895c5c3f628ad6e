"""What the tokens of each layer are like: coherent with their neighbours, or pulled towards CLS (S2 App. F); and how
similar the layers of a model are, or those of two: linear CKA over any number of images (Raghu et al. 2021).

Shape suffixes: B images, P patches, C channels; L layers of one model, K of the other, n images of a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement
from nearsight.lens.running import Running, batches, never_compiled, not_finite, running, surveyed, without_gradients
from nearsight.lens.similarity import similarity_by_kernel
from nearsight.lens.stream import in_full_precision, kernels_take
from nearsight.lens.survey import Survey
from nearsight.lens.table import Array, HeadTable
from nearsight.lens.tokens import TokenMap, alike, block_of, block_tokens, map_tokens, watching_outputs
from nearsight.metrics import locality_score, patch_cls_similarity
from nearsight.metrics.attention import to_float64
from nearsight.metrics.features import (
    FAR,
    centred,
    linear_gram,
    own_unbiased_hsic,
    pair_counts,
    similarity_by_distance,
    unbiased_hsic,
)

_FEWEST = 4
"""Images of a batch: with fewer the unbiased estimator does not exist."""


@measurement("features")
class Features(Measurement):
    """`locality_score` and `patch_cls_similarity` [layers] of the tokens that come out of each attention's block.

    Means over the images. NaN for a layer that is in no block, whose block does not return a grid of patches, or runs
    more than once in a forward; the similarity also in a model without a class token. Two attentions of one block have
    the same numbers.
    """

    about = "per layer: locality score and patch-CLS similarity of its tokens"
    table = "layer"
    picture = "layers"
    columns = ("locality_score", "patch_cls_similarity")

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        first, last = table.extra["locality_score"][[0, -1]]
        return (
            f"Locality score of the tokens: {first:.3f} after layer {layers[0]}, {last:.3f} after layer {layers[-1]}."
        )

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._model = model
        tokens = block_tokens(model, found, batch)
        self._blocks, self._maps = tokens.of_layers, tokens.outputs
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


@measurement("lds")
class LocalDistant(Measurement):
    """`lds` [layers]: local versus distant similarity of the patch tokens that come out of each attention's block, the
    difference of `similarity_near` and `similarity_far` (`nearsight.metrics.local_distant_similarity`).

    Means over the images; NaN as for "features", and where no patches are 6 steps apart.
    """

    about = "per layer: local versus distant similarity of its patch tokens (near less far cosine similarity)"
    table = "layer"
    picture = "layers"
    columns = ("lds", "similarity_near", "similarity_far")

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        lds, far = table.extra["lds"], table.extra["similarity_far"]
        if np.isnan(lds).all():
            return f"Local versus distant similarity is not known: no patches are {FAR} steps apart, or no grid is."
        most = int(np.nanargmax(lds))
        return (
            f"Near patches are more similar than far ones by {lds[most]:.3f} at most, after layer {layers[most]}; "
            f"after layer {layers[-1]} by {lds[-1]:.3f}, far ones having a similarity of {far[-1]:.3f}."
        )

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._model = model
        tokens = block_tokens(model, found, batch)
        self._blocks, self._maps = tokens.of_layers, tokens.outputs
        device = batch.images.device
        self._patches = {name: tokens.patches.to(device) for name, tokens in self._maps.items()}
        self._counts = {
            name: to_float64(torch.tensor([count or np.nan for count in pair_counts(*tokens.grid_size)], device=device))
            for name, tokens in self._maps.items()
        }
        self._alike = alike(self._maps)
        self._seen: dict[str, Tensor] = {}
        self._unknown = to_float64(torch.full((2,), np.nan, device=device))

    def watching(self) -> AbstractContextManager[None]:
        return watching_outputs(self._model, list(self._maps), self._look)

    def _look(self, name: str, outputs: list[Tensor]) -> None:
        tokens = self._maps[name]
        if kernels_take(outputs[tokens.tensor]):
            tokens_BNC = tokens.all_tokens(outputs)
            self._seen[name] = similarity_by_kernel(tokens_BNC, self._patches[name], tokens.grid_size)
            return
        with in_full_precision(outputs[tokens.tensor].device):
            found = similarity_by_distance(tokens.patch_tokens(outputs), tokens.grid_size)
        self._seen[name] = to_float64(torch.stack(found)).mean(1)

    def results(self) -> dict[str, Tensor]:
        seen, self._seen = self._seen, {}
        # Sums of pairs, by a kernel, of layers with the same tokens: each operation is launched once.
        for names in self._alike:
            if seen[names[0]].dim() > 1:
                sums_L2BT = torch.stack([seen[name] for name in names])
                means_L2 = sums_L2BT.sum((2, 3), dtype=torch.float64) / (sums_L2BT.shape[2] * self._counts[names[0]])
                seen.update(zip(names, means_L2, strict=True))
        rows = torch.stack([seen.get(block or "", self._unknown) for block in self._blocks])
        near, far = rows.unbind(1)
        return {"lds": near - far, "similarity_near": near, "similarity_far": far}


class LayerSimilarity(NamedTuple):
    """CKA between layers."""

    names: tuple[str, ...]
    """Of the layers that are the rows."""
    other_names: tuple[str, ...]
    """Of the layers that are the columns."""
    matrix: Array
    """[L, K]; 1 for layers whose tokens are the same up to rotation and scale, about 0 for unrelated ones. NaN for a
    layer in which all images are equal."""

    def to_frame(self) -> pd.DataFrame:
        """One row per pair of layers, both counted from 0."""
        layer, other = np.indices(self.matrix.shape).reshape(2, -1)
        return pd.DataFrame(
            {
                "layer": layer,
                "layer_name": np.array(self.names, dtype=object)[layer],
                "other_layer": other,
                "other_layer_name": np.array(self.other_names, dtype=object)[other],
                "cka": self.matrix.ravel(),
            }
        )


@never_compiled
def layer_similarity(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    other: nn.Module | None = None,
    *,
    other_images: Tensor | Iterable[Tensor] | None = None,
    tokens: Literal["mean", "flat"] = "mean",
    layers: Sequence[str] | None = None,
    other_layers: Sequence[str] | None = None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> LayerSimilarity:
    """Linear CKA between all layers of a model, or between those of two models.

    A layer is what a block returns, its patch tokens alone. HSIC is estimated without bias on each batch and averaged
    over batches before the division (Nguyen, Raghu and Kornblith 2021), so that any number of images can be used.

    Args:
        model: its layers are the rows. It is left as it was.
        images: normalised images [B, 3, H, W], or an iterable of such batches.
        other: a second model, whose layers are the columns; by default the same.
        other_images: the same pictures as the second model takes them, if that differs (another size, say), in the same
            order and in equal batches.
        tokens: what an image is in a layer: the "mean" of its patch tokens, which compares layers and models of any
            grids by content; or all of them one after the other ("flat"), which also compares where things are.
        layers: names of modules to take as layers; by default the blocks that hold attention.
        other_layers: the same for the second model.
        batch_size: images per forward, at least 4; larger batches are closer to CKA on all images at once. Images left
            over at the end are not used if there are fewer than 4.
        device: where to run; by default where each model is.
    """
    check_at_least("batch_size", batch_size, _FEWEST)
    if tokens not in ("mean", "flat"):
        raise InputError(f"tokens is 'mean' or 'flat', not {tokens!r}")
    if other is None and (other_images is not None or other_layers is not None):
        raise InputError("other_images and other_layers are for a second model, and none was given")
    total = _Total()
    with ExitStack() as stack:
        rows = _Layers(stack.enter_context(running(model, device)), layers, tokens)
        cols = rows if other is None else _Layers(stack.enter_context(running(other, device)), other_layers, tokens)
        for batch, other_batch in _paired(images, other_images, batch_size):
            if len(batch) >= _FEWEST:
                with without_gradients():
                    grams = rows.grams(batch)
                    total.add(grams, grams if other is None else cols.grams(other_batch))
    return LayerSimilarity(rows.names, cols.names, total.cka())


def _paired(
    images: Tensor | Iterable[Tensor], other_images: Tensor | Iterable[Tensor] | None, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the same pictures, for one model and for the other."""
    if other_images is None:
        yield from ((batch, batch) for batch in batches(images, batch_size))
        return
    for pair in zip_longest(batches(images, batch_size), batches(other_images, batch_size)):
        one, other = (0 if batch is None else len(batch) for batch in pair)
        if one != other:
            raise InputError(f"the two models have different batches of images: one of {one} images, one of {other}")
        yield pair


class _Layers:
    """The layers of one model: for a batch, how similar its images are in each."""

    def __init__(self, run: Running, layers: Sequence[str] | None, tokens: str) -> None:
        self._run, self._chosen, self._tokens = run, layers, tokens
        self._maps: dict[torch.Size, dict[str, TokenMap]] = {}
        self.names: tuple[str, ...] = ()

    def grams(self, images: Tensor) -> Tensor:
        """[L, n, n] float64, with zeros on the diagonals."""
        images = self._run.brought(images)
        if images.shape[1:] not in self._maps:
            self._maps[images.shape[1:]] = self._mapped(images[0])
        maps = self._maps[images.shape[1:]]
        if self.names and tuple(maps) != self.names:
            raise InputError("the model has other layers for images of another size, and they cannot be compared")
        self.names = tuple(maps)
        grams: dict[str, Tensor] = {}

        def look(name: str, outputs: list[Tensor]) -> None:
            given_nPC = maps[name].patch_tokens(outputs)
            patches_nPC = to_float64(given_nPC)
            features = patches_nPC.mean(1) if self._tokens == "mean" else patches_nPC.flatten(1)
            grams[name] = linear_gram(centred(features, given_nPC.dtype))

        with watching_outputs(self._run.model, list(maps), look):
            self._run.model(images)
        for name, gram in grams.items():
            if not gram.isfinite().all():
                raise not_finite(f"what {name} returns")
        return torch.stack([grams[name] for name in maps])

    def _mapped(self, image: Tensor) -> dict[str, TokenMap]:
        model, names = self._run.model, self._chosen
        if names is None:
            sites = surveyed(model, image).sites.values()
            names = list(dict.fromkeys(block for site in sites if (block := block_of(site.name)) is not None))
        known = dict(model.named_modules())
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"{type(model).__name__} has no module {unknown[0]!r}")
        maps = map_tokens(model, image, names)
        missing = [name for name in names if name not in maps]
        if self._chosen is not None and missing:
            raise InputError(f"{missing[0]} of {type(model).__name__} does not return one grid of patches")
        if not maps:
            raise InputError(f"no block of {type(model).__name__} returns one grid of patches; name modules as layers")
        return maps


class _Total:
    """HSIC of all pairs of layers and of each with itself, weighted by images."""

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, rows_Lnn: Tensor, cols_Knn: Tensor) -> None:
        num_images = rows_Lnn.shape[-1]
        cols_Knn = cols_Knn.to(rows_Lnn.device)
        new = (unbiased_hsic(rows_Lnn, cols_Knn), own_unbiased_hsic(rows_Lnn), own_unbiased_hsic(cols_Knn))
        weighted = [num_images * values.cpu() for values in new]
        before = self._sums or [torch.zeros_like(values) for values in weighted]
        cross, own, other = (value + old for value, old in zip(weighted, before, strict=True))
        self._sums = cross, own, other

    def cka(self) -> Array:
        if self._sums is None:
            raise InputError(f"there are no images to compare layers on; batches of at least {_FEWEST} are needed")
        cross_LK, own_L, other_K = self._sums
        size_L, size_K = (torch.where(own > 0, own, torch.nan).sqrt() for own in (own_L, other_K))
        matrix: Array = (cross_LK / (size_L[:, None] * size_K)).numpy()
        if np.isnan(matrix).all():
            raise InputError("layers cannot be compared: all images are equal in them; give different images")
        return matrix
