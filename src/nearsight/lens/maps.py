"""`attention_maps`: where every query of every head looks, as maps of the whole image."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens import inputs
from nearsight.lens.attention import Attention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.geometry import Declared, declared_grid
from nearsight.lens.inputs import Batch, as_batch
from nearsight.lens.mapframes import Frame, Heads
from nearsight.lens.mapsfile import DTYPES, InFile, LayerMaps, PictureMaps, keeping_maps, open_maps, size_of_maps
from nearsight.lens.running import (
    counting_images,
    never_compiled,
    other_attentions,
    running,
    surveyed,
    without_gradients,
)
from nearsight.lens.stream import Precision, in_full_precision, summing_dtype
from nearsight.lens.survey import Survey
from nearsight.lens.table import layer_positions

NUM_KEPT = 4
"""Pictures whose maps `measure(…, keep="maps")` keeps."""
MOST_KEPT_BYTES = 2**28
"""Of all kept maps: four pictures of ViT-B/16 at 224 pixels need a third of it."""
_FEW_LINES = 16
"""Rows and columns to which the maps of one picture are pooled if they need more."""
_BEYOND = 0.02
"""How far values of a picture may be beyond black and white by rounding and resampling."""


@never_compiled
def attention_maps(
    model: nn.Module,
    images: Tensor | Mapping[str, Any] | Iterable[Any],
    *,
    layers: Sequence[int | str] | None = None,
    heads: Heads | Mapping[int | str, Heads] = None,
    dtype: torch.dtype = torch.float32,
    out: str | Path | None = None,
    most_lines: int | None = None,
    batch_size: int = 16,
    device: torch.device | str | None = None,
    call: inputs.Call | None = None,
    grid: tuple[int, int] | None = None,
    prefix: int | None = None,
    progress: bool = False,
) -> list[LayerMaps]:
    """The attention maps of a model: one object per layer, with its `name` and its `weights_BHQK`.

    `weights_BHQK` is [images, heads, queries, keys]. The keys are the patches, row by row, so that a row of a map is a
    picture of `key_grid`; the queries are the patches, and then CLS and registers. What goes to those is in
    `other_weights_BHQO`; `full()` is all tokens to all tokens in the model's own order.

    Args:
        model: a ViT, unmodified, with fused attention or not. It is left as it was.
        images: normalised images [B, C, H, W] of one size, or whatever else `measure` takes. Over a video's frames keys
            are summed and queries averaged.
        layers: positions (from 0) or names of the layers; all by default. The forward ends with the last of them.
        heads: positions of the heads (from 0), in each of these layers; all by default. Or, instead of `layers`, a
            mapping from layers to heads: {0: [3], 5: None}, where None is all.
        dtype: of the maps: float32, float16, bfloat16 or float64. They are computed in float32, and in float64 for
            float64 (on MPS always in float32).
        out: a file that the maps are written to while they come, so that no more than a tile of them is in memory; what
            is returned is mapped from it, as by `nearsight.open_maps(out)`. It is safetensors: one file, which torch,
            NumPy and JAX can read, and which runs no code. It has its name only when it is complete.
        most_lines: patches are pooled to at most so many rows and columns, while they come.
        batch_size: images per forward; batches larger than this are split.
        device: where to run; by default where the model is.
        call, grid, prefix, progress: as for `measure`.
    """
    check_at_least("most_lines", 1 if most_lines is None else most_lines, 1)
    check_at_least("batch_size", batch_size, 1)
    if dtype not in DTYPES:
        raise InputError(f"dtype is one of {', '.join(map(str, DTYPES))}, not {dtype!r}")
    path = None if out is None else Path(out)
    num_images = len(images) if isinstance(images, Tensor) and images.dim() else None
    computing: Precision = "float64" if dtype == torch.float64 else "float32"
    with (
        keeping_maps(path, num_images) as kept,
        running(model, device) as run,
        counting_images(images, progress, "attention maps") as counted,
    ):
        coming = inputs.batches(images, batch_size, model=run.model, call=call)
        if (first := next(coming, None)) is None:
            raise InputError("there are no images to look at")
        with without_gradients():
            example = next(first.one_by_one()).to(run.device, run.dtype)
            found = surveyed(run.model, example, declared_grid(grid, prefix))
            chosen, known = _chosen(found, layers, heads), {first.key}
        frames = _Frames(run.model, found, chosen, dtype, most_lines)
        # The header of a file describes all maps: one image is enough to know it.
        if isinstance(kept, InFile) and num_images is not None:
            kept.begin(frames.seen_in(example))

        def fill(call: Call, which: slice, attention: Attention) -> None:
            frames.of(call, attention).fill(attention, kept, which, summing_dtype(computing, run.device))

        end = 0
        for batch in counted(itertools.chain([first], coming)):
            if (key := batch.key) not in known:
                with without_gradients():
                    again = surveyed(run.model, batch.to(run.device, run.dtype), declared_grid(grid, prefix))
                if not again.is_as(found):
                    raise InputError("attention maps are made of images of one size; make them for each size by itself")
                known.add(key)
            for one in batch.one_by_one() if found.is_alone else [batch]:
                begin, end = end, end + len(one)
                with without_gradients():
                    filling = {call: partial(fill, call, slice(begin, end)) for call in chosen}
                    _watch(run.model, one.to(run.device, run.dtype), found, filling)
        maps = kept.finished(frames.empty())
    return maps if path is None else open_maps(path)


def empty_maps(
    model: nn.Module,
    image: Tensor | Batch,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Heads | Mapping[int | str, Heads] = None,
    dtype: torch.dtype = torch.float32,
    most_lines: int | None = None,
    device: torch.device | str | None = None,
    declared: Declared | None = None,
) -> list[LayerMaps]:
    """What `attention_maps` would return of no images, from one image: `size_of_maps` says how large it would be."""
    with running(model, device) as run:
        example = next(as_batch(image).one_by_one()).to(run.device, run.dtype)
        found = surveyed(run.model, example, declared)
        return _Frames(run.model, found, _chosen(found, layers, heads), dtype, most_lines).seen_in(example)


class _Frames:
    """Where the attention of the chosen layers goes on their maps: known of each once it was seen."""

    def __init__(
        self, model: nn.Module, found: Survey, chosen: Mapping[Call, Heads], dtype: torch.dtype, most: int | None
    ) -> None:
        self._model, self._found, self._chosen, self._dtype, self._most = model, found, chosen, dtype, most
        self._frames: dict[Call, Frame] = {}

    def of(self, call: Call, attention: Attention) -> Frame:
        if call not in self._frames:
            site, heads = self._found.sites[call], self._chosen[call]
            self._frames[call] = Frame.of(self._model, attention, site, heads, self._dtype, self._most)
        return self._frames[call]

    def seen_in(self, one: Batch) -> list[LayerMaps]:
        """The maps of no images, from a forward of one."""
        with without_gradients():
            _watch(self._model, one, self._found, {call: partial(self.of, call) for call in self._chosen})
        return self.empty()

    def empty(self) -> list[LayerMaps]:
        """The maps of no images, in the order in which the layers are chosen."""
        return [self._frames[call].empty for call in self._chosen]


def kept_maps(
    model: nn.Module, batches: Sequence[Batch], layer_names: Sequence[str], declared: Declared | None
) -> PictureMaps:
    """The maps of these layers on pictures that were measured: whole, as long as they do not need more than
    `MOST_KEPT_BYTES`; of fewer pictures where they would, and pooled where not even one picture's fit."""
    for batch in batches:
        if batch.images.dim() != 4 or batch.images.shape[1] not in (1, 3):
            raise InputError(f"keep='maps' is for pictures [B, 3, H, W], not for {list(batch.images.shape)}")
    most_lines, one = None, empty_maps(model, batches[0], layers=layer_names, declared=declared)
    if (num_pictures := MOST_KEPT_BYTES // size_of_maps(one, 1)) == 0:
        num_pictures, most_lines = len(batches[0]), _FEW_LINES
    images_BCHW = torch.cat([batch.images for batch in batches])[:num_pictures]
    batch = replace(batches[0], images=images_BCHW, digests=None)
    grid, prefix = (None, None) if declared is None else (declared.grid_size, declared.prefix)
    maps = attention_maps(model, [batch], layers=layer_names, most_lines=most_lines, grid=grid, prefix=prefix)
    return PictureMaps(tuple(maps), as_pictures(model, images_BCHW))


def as_pictures(model: nn.Module, images_BCHW: Tensor) -> NDArray[np.uint8]:
    """Normalised images as people see them: by the mean and deviation that timm's models name or, where these cannot be
    what they were normalised with, stretched from their darkest to their brightest value."""
    images = images_BCHW.detach().cpu().float()
    named: Any = getattr(model, "pretrained_cfg", None) or {}
    named = named if isinstance(named, Mapping) else vars(named)
    mean, std = (
        torch.tensor(named.get(name) or default).view(-1, 1, 1) for name, default in (("mean", 0.0), ("std", 1.0))
    )
    seen = images * std + mean if len(mean) in (1, images.shape[1]) else images
    if seen.min() < -_BEYOND or seen.max() > 1 + _BEYOND:
        lowest, highest = (extreme(images, (1, 2, 3), keepdim=True) for extreme in (torch.amin, torch.amax))
        seen = (images - lowest) / (highest - lowest).clamp(min=1e-12)
    return (255 * seen.clamp(0, 1)).round().byte().permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()


def _chosen(
    found: Survey, layers: Sequence[int | str] | None, heads: Heads | Mapping[int | str, Heads]
) -> dict[Call, Heads]:
    """The calls that are these layers, in the order they are given in, and which heads."""
    names = [site.name for site in found.sites.values()]
    if isinstance(heads, Mapping):
        if layers is not None:
            raise InputError("heads says which layers by itself; give layers, or heads by layer, not both")
        positions, by_layer = layer_positions(names, list(heads)), list(heads.values())
    else:
        positions = list(range(len(names))) if layers is None else layer_positions(names, layers)
        by_layer = [heads] * len(positions)
    if not positions or len(set(positions)) < len(positions):
        raise InputError(
            "a layer is chosen twice; name each once" if positions else "layers is empty; name one or more"
        )
    calls = list(found.sites)
    return {calls[position]: which for position, which in zip(positions, by_layer, strict=True)}


class _Enough(BaseException):
    """Ends a forward when all that is needed was seen. Not an `Exception`: a model may catch those."""


def _watch(model: nn.Module, batch: Batch, found: Survey, wanted: Mapping[Call, Callable[[Attention], object]]) -> None:
    """Run the model up to the last of these attentions, and give each to its function."""
    waiting = dict(wanted)
    problems: list[Exception] = []
    # Hooks that others put around a module may have to finish what they began.
    may_stop = not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())

    def look(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if call not in waiting or problems:
            return
        see = waiting.pop(call)
        try:
            with in_full_precision(batch.images.device):
                see(candidates[found.sites[call].operand]())
        except Exception as error:  # raised after the forward: torch's own modules do not survive it
            problems.append(error)
        if may_stop and (problems or not waiting) and call.kind != "multihead":
            raise _Enough

    with suppress(_Enough), AttentionTap(model, look, found.calling):
        batch.run(model)
    if problems:
        raise problems[0]
    if waiting:
        raise other_attentions(model, next(iter(waiting)).layer_name)
