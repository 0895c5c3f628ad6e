"""Running a model to look into it, and leaving it as it was."""

import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import inputs
from nearsight.lens.geometry import Declared
from nearsight.lens.inputs import Batch, as_batch
from nearsight.lens.survey import Survey, survey
from nearsight.randomness import generators_kept

_HIGHER_ORDER = re.compile(r"HigherOrderOperator (\w+)")
"""In what torch says of an operator that a dispatch mode does not see the parts of."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
MEASURING = threading.RLock()
"""Hooks, random generators and a model's mode belong to the whole process: threads that measure take turns."""


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

    `running` is that already, but what makes the images may have changed it: so it surrounds each forward of a batch,
    including the loading of its images.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def running(model: nn.Module, device: torch.device | str | None = None) -> Iterator[Running]:
    """The model in eval mode without gradients, by default where it is, and none of it compiled.

    Its mode and device and the state of the random generators are afterwards as they were.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model: what it was compiled from
    check_model(model)
    # Some models have whole numbers among their parameters, which say nothing about images.
    parameter = next((one for one in model.parameters() if one.is_floating_point()), torch.zeros(()))
    home = parameter.device
    target = home if device is None else torch.device(device)
    # Without a device= no model is moved: one may lie on several devices, and quantised ones refuse it.
    moving = nullcontext() if device is None else _moved(model, home, target)
    with MEASURING, without_gradients(), uncompiled(), _left_as_found(model), moving:
        # A program of torch.export has no modes: it does what it did when it was made.
        with suppress(NotImplementedError):
            model.eval()
        yield Running(model, target, parameter.dtype)


def check_model(model: object) -> None:
    """Refuse what is no model that runs."""
    if isinstance(model, torch.export.ExportedProgram):
        raise InputError("an exported program is not a model that runs; give its .module()")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("TorchScript calls nothing that could be seen; give the model that it was made from")
    if not isinstance(model, nn.Module):
        raise InputError(f"a model is a torch.nn.Module, not {str(model)[:80]!r}; timm.create_model(name) makes one")


@dataclass
class _Stance:
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    stance: AbstractContextManager[None] | None = None


_EAGER = _Stance()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Whatever is compiled in the model runs as it was written: compiled code calls nothing that could be seen.

    torch has one stance for all threads. The first that needs it sets it and the last gives back what was there: if
    each gave back what it had found, one that ends late would leave all compiled code of the process uncompiled.
    """
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    with _EAGER.lock:
        if not _EAGER.users:
            with suppress(RuntimeError):  # within a region that the caller compiles, which has a stance of its own
                _EAGER.stance = torch.compiler.set_stance("force_eager")
        _EAGER.users += 1
    try:
        yield
    finally:
        with _EAGER.lock:
            _EAGER.users -= 1
            if not _EAGER.users and _EAGER.stance is not None:
                _EAGER.stance.__exit__(None, None, None)
                _EAGER.stance = None


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
        # All GPUs by name: otherwise torch warns where there are several. Other accelerators are left to it.
        with generators_kept(range(torch.cuda.device_count()) or None):
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


@contextmanager
def counting_images(images: Any, shown: bool, label: str) -> Iterator[Callable[[Iterable[Batch]], Iterator[Batch]]]:
    """Passes batches on and, if `shown`, counts their images in a bar: tqdm's, a widget in notebooks, or rich's.

    How many there will be is known of a tensor, and of a loader with its data set.
    """
    if not shown:
        yield iter
        return
    whole = images if isinstance(images, Tensor) else getattr(images, "dataset", None)
    total = len(whole) if isinstance(whole, Sized) else None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        from rich.progress import Progress

        with Progress() as bars:
            task = bars.add_task(label, total=total)
            yield partial(_counted, advance=lambda num: bars.update(task, advance=num))
    else:
        with tqdm(total=total, desc=label, unit=" images") as bar:
            yield partial(_counted, advance=bar.update)


def _counted(batches: Iterable[Batch], advance: Callable[[int], object]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        advance(len(batch))


def batches(images: Tensor | Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Batches of at most this many pictures [B, C, H, W], which the model is given as they are."""
    for batch in inputs.batches(images, batch_size):
        if batch.others or batch.images.dim() != 4:
            raise InputError(f"pictures of shape [B, C, H, W] are needed here, not {list(batch.images.shape)}")
        yield batch.images


def not_finite(what: str) -> InputError:
    """The error for something that was seen in a model."""
    return InputError(f"{what} is NaN or infinite: the model's weights or the images are not finite")


def other_attentions(model: nn.Module, layer_name: str) -> InputError:
    """The error for a layer that was there in the survey, and is not for other images."""
    return InputError(
        f"{type(model).__name__} computes other attentions for these images than for the first ({layer_name} is "
        "missing): its layers depend on what it sees"
    )


@contextmanager
def remembering_surveys() -> Iterator[None]:
    """While active, a model is surveyed once for images of one size. For callers that do not change it meanwhile:
    another attention in it, or another way to compute one, would not be noticed."""
    _remembered.append({})
    try:
        yield
    finally:
        _remembered.pop()


_remembered: list[dict[tuple[object, ...], tuple[nn.Module, Survey]]] = []
"""With its model, so that no other one gets its identity."""


def surveyed(model: nn.Module, image: Tensor | Batch, declared: Declared | None = None) -> Survey:
    """The survey of a model that has spatial attention and takes images like this one."""
    batch = as_batch(image)
    if not _remembered:
        return surveyed_anew(model, batch, declared)
    key = (id(model), batch.key, declared, batch.images.device, batch.images.dtype)
    if key not in _remembered[-1]:
        _remembered[-1][key] = model, surveyed_anew(model, batch, declared)
    return _remembered[-1][key][1]


def surveyed_anew(model: nn.Module, batch: Batch, declared: Declared | None) -> Survey:
    """For whoever changes the model afterwards: it is not remembered."""
    if any(tensor.is_meta for tensor in model.parameters()):
        raise InputError(f"weights of {type(model).__name__} are on the meta device, which holds none; load them first")
    name, (_, height, width) = type(model).__name__, batch.size
    try:
        found = survey(model, batch, declared)
    except torch.OutOfMemoryError:
        raise  # not the model's fault: the caller may have a way out
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    except Exception as error:
        if isinstance(error, NotImplementedError) and (operator := _HIGHER_ORDER.search(str(error))):
            raise InputError(
                f"{name} uses {operator[1]}, which cannot be looked into; let it use scaled_dot_product_attention "
                "(in transformers: attn_implementation='sdpa')"
            ) from error
        reason, hint = " ".join(str(error).split())[:200] or type(error).__name__, ""
        if "Guard failed" in reason:
            hint = "; export it for one image, or with dynamic_shapes for any number"
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
    """Whether the model takes such an image without the lens."""
    try:
        (batch if batch.is_one else batch.part(slice(0, 1))).run(model)
    except Exception:
        return False
    return True
