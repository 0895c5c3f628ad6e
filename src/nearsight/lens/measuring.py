"""`measure`: how far and how selectively every head of a ViT looks, over many images."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.lens.capture import Attention, AttentionTap
from nearsight.lens.geometry import token_grid
from nearsight.lens.stream import reduce_attention
from nearsight.lens.table import Array, HeadTable
from nearsight.metrics import Moments


def measure(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    batch_size: int = 64,
    layers: Sequence[int | str] | None = None,
    device: torch.device | str | None = None,
) -> HeadTable:
    """Mean attention distance and normalised entropy of every attention head, over the images (S1 §3 and §4.5).

    Args:
        model: a ViT, unmodified. It runs in eval mode without gradients; its mode, hooks, device and the state of the
            random generators are afterwards as they were.
        images: normalised images [B, 3, H, W], or an iterable of such batches.
        batch_size: images per forward; batches larger than this are split.
        layers: positions (from 0) or names of the layers to keep; all by default.
        device: where to run; by default where the model is.
    """
    check_at_least("batch_size", batch_size, 1)
    parameter = next(model.parameters(), None)
    home = torch.device("cpu") if parameter is None else parameter.device
    target = home if device is None else torch.device(device)
    dtype = torch.float32 if parameter is None else parameter.dtype
    table: HeadTable | None = None
    with _left_as_found(model, home), torch.no_grad():
        model.to(target).eval()
        for batch in _batches(images, batch_size):
            names, mad, entropy = _measure_batch(model, batch.to(target, dtype))
            new = HeadTable(names, Moments.of(mad), Moments.of(entropy))
            table = new if table is None else HeadTable.merge([table, new])
    if table is None:
        raise InputError("there are no images to measure on")
    return table if layers is None else _choose(table, layers)


def _measure_batch(model: nn.Module, images: Tensor) -> tuple[tuple[str, ...], Array, Array]:
    """Layer names, and MAD and entropy of each image: [B, layers, heads], padded with NaN."""
    image_size = (images.shape[-2], images.shape[-1])
    found: dict[str, tuple[Array, Array]] = {}

    def reduce(attention: Attention) -> None:
        name, times = attention.layer_name, 1
        while name in found:
            times += 1
            name = f"{attention.layer_name}#{times}"
        grid_size, num_prefix_tokens = token_grid(model, image_size, attention.num_tokens)
        mad, entropy = reduce_attention(attention, grid_size, num_prefix_tokens)
        if torch.isnan(mad).any():
            raise InputError(f"the attention of {name} is NaN: the model's weights or the images are not finite")
        found[name] = mad.cpu().numpy(), entropy.cpu().numpy()

    with AttentionTap(model, reduce):
        model(images)
    if not found:
        looked_at = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
        raise InputError(f"no attention was seen in the forward of {type(model).__name__}; it is made of {looked_at}")
    return (
        tuple(found),
        _padded([mad for mad, _ in found.values()]),
        _padded([entropy for _, entropy in found.values()]),
    )


def _padded(per_layer: Sequence[Array]) -> Array:
    """Stack [B, heads] arrays of different widths into [B, layers, most heads], with NaN where there is no head."""
    widest = max(values.shape[1] for values in per_layer)
    out = np.full((per_layer[0].shape[0], len(per_layer), widest), np.nan)
    for layer, values in enumerate(per_layer):
        out[:, layer, : values.shape[1]] = values
    return out


def _batches(images: Tensor | Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    for batch in [images] if isinstance(images, Tensor) else images:
        if batch.dim() != 4 or batch.shape[1] != 3:
            raise InputError(f"images of shape [B, 3, H, W] are needed, not {list(batch.shape)}")
        yield from batch.split(batch_size) if len(batch) else ()


def _choose(table: HeadTable, layers: Sequence[int | str]) -> HeadTable:
    chosen = []
    for layer in layers:
        position = table.layer_names.index(layer) if layer in table.layer_names else layer
        if not isinstance(position, int) or not -len(table.layer_names) <= position < len(table.layer_names):
            known = ", ".join(table.layer_names[:12])
            raise InputError(f"layer {layer!r} is not one of the {len(table.layer_names)} layers: {known}")
        chosen.append(position % len(table.layer_names))

    def pick(moments: Moments) -> Moments:
        return Moments(moments.count, moments.mean[chosen], moments.squared_deviations[chosen])

    names = tuple(table.layer_names[position] for position in chosen)
    return HeadTable(names, pick(table.mad_moments), pick(table.entropy_moments), table.skipped)


@contextmanager
def _left_as_found(model: nn.Module, home: torch.device) -> Iterator[None]:
    """Restore each module's training mode, the model's device and every random generator."""
    modes = {module: module.training for module in model.modules()}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.to(home)
        for module, training in modes.items():
            module.training = training
        random.setstate(python_state)
        np.random.set_state(numpy_state)
