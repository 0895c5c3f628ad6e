"""Running somebody's model to look into it, and leaving it as it was."""

import operator
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
        images = images.to(self.device, self.dtype)
        # Operations on a tensor that was made in inference mode alone are not taken apart, wherever they are done.
        return images.clone() if images.is_inference() else images


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
    """Batches of at most this many images [B, 3, H, W]; those that are larger are split.

    Of pairs (images, labels), as loaders of data give them, the images.
    """
    try:
        largest = operator.index(batch_size)  # NumPy's whole numbers, too, which torch does not take
    except TypeError as error:
        raise InputError(f"batch_size is {batch_size}, but a whole number is needed") from error
    given: Any = [images] if isinstance(images, Tensor) else images
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"images are a tensor [B, 3, H, W] or batches of such, not {type(given).__name__}")
    for batch in given:
        if isinstance(batch, tuple | list) and batch:
            batch = batch[0]
        if not isinstance(batch, Tensor):
            raise InputError(f"a batch of images is a tensor [B, 3, H, W], not {type(batch).__name__}")
        if batch.dim() != 4 or batch.shape[1] != 3:
            raise InputError(f"images of shape [B, 3, H, W] are needed, not {list(batch.shape)}")
        if not batch.is_floating_point():
            kind = str(batch.dtype).removeprefix("torch.")
            raise InputError(f"images are {kind}, not floating point: normalise them as the model expects them")
        yield from batch.split(largest) if len(batch) else ()


def not_finite(what: str) -> InputError:
    """The error for something that was seen in a model."""
    return InputError(f"{what} is NaN or infinite: the model's weights or the images are not finite")


def surveyed(model: nn.Module, image: Tensor) -> Survey:
    """The survey of a model that has spatial attention and takes images like this one."""
    name, (height, width) = type(model).__name__, image.shape[-2:]
    try:
        found = survey(model, image)
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
            if _runs(model, image):
                raise  # a defect of the lens, and to be seen as one
            hint = "; give a model, or the part of one, that takes images alone"
        raise InputError(f"{name} fails on images of {height}×{width} pixels: {reason}{hint}") from error
    if found.sites:
        return found
    if found.skipped:
        listed = "; ".join(f"{layer or name}: {reason}" for layer, reason in list(found.skipped.items())[:3])
        raise NoSpatialAttentionError(f"{name} has no spatial attention that can be measured ({listed})")
    looked_at = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
    raise NoSpatialAttentionError(f"no attention was seen in the forward of {name}; it is made of {looked_at}")


def _runs(model: nn.Module, image: Tensor) -> bool:
    """Whether the model takes such an image when nobody looks."""
    try:
        model(image[None])
    except Exception:
        return False
    return True
