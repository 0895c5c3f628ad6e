"""`attention_maps`: where every query of every head looks, as maps of the whole image."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens import inputs
from nearsight.lens.attention import Attention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.inputs import Batch
from nearsight.lens.mapframes import Frame, Heads
from nearsight.lens.mapsfile import DTYPES, InFile, LayerMaps, keeping_maps, open_maps
from nearsight.lens.measuring import Precision, declared_grid, summing_dtype
from nearsight.lens.running import never_compiled, other_attentions, running, surveyed, without_gradients
from nearsight.lens.stream import in_full_precision
from nearsight.lens.survey import Survey
from nearsight.lens.table import layer_positions


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
        call, grid, prefix: as for `measure`.
    """
    check_at_least("most_lines", 1 if most_lines is None else most_lines, 1)
    check_at_least("batch_size", batch_size, 1)
    if dtype not in DTYPES:
        raise InputError(f"dtype is one of {', '.join(map(str, DTYPES))}, not {dtype!r}")
    path = None if out is None else Path(out)
    num_images = len(images) if isinstance(images, Tensor) and images.dim() else None
    computing: Precision = "float64" if dtype == torch.float64 else "float32"
    frames: dict[Call, Frame] = {}
    with keeping_maps(path, num_images) as kept, running(model, device) as run:
        coming = inputs.batches(images, batch_size, model=run.model, call=call)
        if (first := next(coming, None)) is None:
            raise InputError("there are no images to look at")
        with without_gradients():
            example = next(first.one_by_one()).to(run.device, run.dtype)
            found = surveyed(run.model, example, declared_grid(grid, prefix))
        chosen, known = _chosen(found, layers, heads), {first.key}

        def frame(call: Call, attention: Attention) -> Frame:
            if call not in frames:
                frames[call] = Frame.of(run.model, attention, found.sites[call], chosen[call], dtype, most_lines)
            return frames[call]

        def fill(call: Call, which: slice, attention: Attention) -> None:
            frame(call, attention).fill(attention, kept, which, summing_dtype(computing, run.device))

        # The header of a file describes all maps: one image is enough to know it.
        if isinstance(kept, InFile) and num_images is not None:
            with without_gradients():
                _watch(run.model, example, found, {call: partial(frame, call) for call in chosen})
            kept.begin([frames[call].empty for call in chosen])
        end = 0
        for batch in itertools.chain([first], coming):
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
        maps = kept.finished([frames[call].empty for call in chosen])
    return maps if path is None else open_maps(path)


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
