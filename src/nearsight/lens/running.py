"""Running somebody's model to look into it, and leaving it as it was."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import inputs
from nearsight.lens.geometry import Declared
from nearsight.lens.inputs import Batch, as_batch
from nearsight.lens.survey import Survey, survey

_HIGHER_ORDER = re.compile(r"HigherOrderOperator (\w+)")
"""In what torch says of an operator that a dispatch mode does not see the parts of."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """The same function, which runs as it was written even in a region that its caller compiles."""
    disabled: _Function = torch.compiler.disable(function)
    return disabled


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
        return as_batch(images).to(self.device, self.dtype).images.view(images.shape)


@contextmanager
def without_gradients() -> Iterator[None]:
    """Around a forward that is looked at: no gradients, and no inference mode, which hides elementary operations.

    `running` is that already, but what makes the images may have changed it: so around each forward of a batch, with
    the bringing of its images.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def running(model: nn.Module, device: torch.device | str | None = None) -> Iterator[Running]:
    """The model in eval mode without gradients, by default where it is, and none of it compiled.

    Its mode and device and the state of the random generators are afterwards as they were.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model: what it was compiled from
    if not isinstance(model, nn.Module):
        raise InputError(f"a model is a torch.nn.Module, not {str(model)[:80]!r}; timm.create_model(name) makes one")
    # Some models have whole numbers among their parameters, which say nothing about images.
    parameter = next((one for one in model.parameters() if one.is_floating_point()), torch.zeros(()))
    home = parameter.device
    target = home if device is None else torch.device(device)
    # Where nobody asks for it, no model is moved: one may lie on several devices, and quantised ones refuse it.
    moving = nullcontext() if device is None else _moved(model, home, target)
    with without_gradients(), _uncompiled(), _left_as_found(model), moving:
        model.eval()
        yield Running(model, target, parameter.dtype)


def _uncompiled() -> AbstractContextManager[None]:
    """Whatever is compiled in the model runs as it was written: compiled code calls nothing that could be seen."""
    if torch.compiler.is_dynamo_compiling():
        return nullcontext()
    try:
        return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
    except RuntimeError:  # within a region that the caller compiles, which has a stance of its own
        return nullcontext()


@contextmanager
def _moved(model: nn.Module, home: torch.device, target: torch.device) -> Iterator[None]:
    try:
        model.to(target)
        yield
    finally:
        with torch.inference_mode(False):  # what made the images may have left it on
            model.to(home)


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore each module's training mode and every random generator."""
    modes = {module: module.training for module in model.modules()}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        # All GPUs by name: else torch warns where there are several. Other accelerators are left to it.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) or None):
            yield
    finally:
        with without_gradients():
            _set_modes(model, modes)
        for module, training in modes.items():
            module.training = training
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _set_modes(module: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """By the modules' own `train`, as it was their own `eval`: these may do more than set a flag, such as take LoRA's
    weights out of the others and add them again."""
    wanted = modes.get(module, module.training)  # a forward may make modules that were not there before
    if any(modes.get(part, wanted) != wanted for part in module.modules()):
        for child in module.children():
            _set_modes(child, modes)
    elif module.training != wanted:
        module.train(wanted)


def batches(images: Tensor | Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Batches of at most this many pictures [B, C, H, W], which the model is given as they are."""
    for batch in inputs.batches(images, batch_size):
        if batch.others or batch.images.dim() != 4:
            raise InputError(f"pictures of shape [B, C, H, W] are needed here, not {list(batch.images.shape)}")
        yield batch.images


def not_finite(what: str) -> InputError:
    """The error for something that was seen in a model."""
    return InputError(f"{what} is NaN or infinite: the model's weights or the images are not finite")


def surveyed(model: nn.Module, image: Tensor | Batch, declared: Declared | None = None) -> Survey:
    """The survey of a model that has spatial attention and takes images like this one."""
    batch = as_batch(image)
    name, (_, height, width) = type(model).__name__, batch.size
    try:
        found = survey(model, batch, declared)
    except torch.OutOfMemoryError:
        raise  # not the model's fault: the caller may have a way out
    except Exception as error:
        if isinstance(error, NotImplementedError) and (operator := _HIGHER_ORDER.search(str(error))):
            raise InputError(
                f"{name} uses {operator[1]}, which cannot be looked into; let it use scaled_dot_product_attention "
                "(in transformers: attn_implementation='sdpa')"
            ) from error
        reason, hint = " ".join(str(error).split())[:200] or type(error).__name__, ""
        if not isinstance(error, AssertionError | RuntimeError | ValueError):
            if _runs(model, batch):
                raise  # a defect of the lens, and to be seen as one
            hint = "; give a model, or the part of one, that takes images alone"
        raise InputError(
            f"{name} fails on images of {height}×{width} pixels{_channels(batch)}: {reason}{hint}"
        ) from error
    if found.sites:
        return found
    if found.skipped:
        listed = "; ".join(f"{layer or name}: {reason}" for layer, reason in list(found.skipped.items())[:3])
        raise NoSpatialAttentionError(f"{name} has no spatial attention that can be measured ({listed})")
    looked_at = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
    raise NoSpatialAttentionError(f"no attention was seen in the forward of {name}; it is made of {looked_at}")


def _channels(batch: Batch) -> str:
    """How many channels, where these are not the usual ones."""
    pictures = batch.images.dim() == 4 and not batch.is_one
    return f" and {batch.images.shape[1]} channels" if pictures and batch.images.shape[1] != 3 else ""


def _runs(model: nn.Module, batch: Batch) -> bool:
    """Whether the model takes such an image when nobody looks."""
    try:
        (batch if batch.is_one else batch.part(slice(0, 1))).run(model)
    except Exception:
        return False
    return True
