"""Running somebody's model to look into it, and leaving it as it was."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.survey import Survey, survey


class NoSpatialAttentionError(InputError):
    """A model has no attention among places of the image, so that there is nothing to measure."""


@dataclass(frozen=True)
class Running:
    """A model in eval mode, on a device."""

    model: nn.Module
    device: torch.device
    dtype: torch.dtype

    def brought(self, images: Tensor) -> Tensor:
        """The images where and as the model takes them."""
        return images.to(self.device, self.dtype)


@contextmanager
def running(model: nn.Module, device: torch.device | str | None = None) -> Iterator[Running]:
    """The model in eval mode without gradients, by default where it is.

    Its mode and device and the state of the random generators are afterwards as they were.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model: what it was compiled from
    parameter = next(model.parameters(), None)
    home = torch.device("cpu") if parameter is None else parameter.device
    target = home if device is None else torch.device(device)
    with _left_as_found(model, home), torch.no_grad():
        model.to(target).eval()
        yield Running(model, target, torch.float32 if parameter is None else parameter.dtype)


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


def batches(images: Tensor | Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Batches of at most this many images [B, 3, H, W]; those that are larger are split."""
    for batch in [images] if isinstance(images, Tensor) else images:
        if batch.dim() != 4 or batch.shape[1] != 3:
            raise InputError(f"images of shape [B, 3, H, W] are needed, not {list(batch.shape)}")
        yield from batch.split(batch_size) if len(batch) else ()


def surveyed(model: nn.Module, image: Tensor) -> Survey:
    """The survey of a model that has spatial attention and takes images like this one."""
    name, (height, width) = type(model).__name__, image.shape[-2:]
    try:
        found = survey(model, image)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{name} fails on images of {height}×{width} pixels: {reason}") from error
    if found.sites:
        return found
    if found.skipped:
        listed = "; ".join(f"{layer or name}: {reason}" for layer, reason in list(found.skipped.items())[:3])
        raise NoSpatialAttentionError(f"{name} has no spatial attention that can be measured ({listed})")
    looked_at = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
    raise NoSpatialAttentionError(f"no attention was seen in the forward of {name}; it is made of {looked_at}")
