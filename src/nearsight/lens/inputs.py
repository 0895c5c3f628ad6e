"""What a model is given: batches of images in the form it takes them, and where their pixels lie.

Pictures [B, C, H, W] of any number of channels; videos [B, T, C, H, W] or [B, C, T, H, W]; dictionaries of what a model
takes by name; and sequences of patches with the grid of each image beside them, as models of images of any size take
them: `grid_thw` (Qwen-VL and related models) or `spatial_shapes` (SigLIP 2 NaFlex).
"""

import hashlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.places import PADDING

Call = str | Callable[[nn.Module, Any], Any]
"""How a model is called with a batch: the name of the argument that takes it, or a function of model and batch."""
_NAMES = re.compile(r"pixel|image|video")
_MOST_CHANNELS = 4
"""The first axis of a video is its channels if it is at most this long and the second is longer."""


@dataclass(frozen=True)
class Batch:
    """Some images, and how the model is called with them."""

    images: Tensor
    """What holds their pixels, as the model takes it."""
    call: Callable[[nn.Module, Tensor, Mapping[str, Any]], Any]
    others: Mapping[str, Any] = field(default_factory=dict)
    """What else the model is given, by name."""
    place: Callable[[Tensor], Tensor] | None = None
    """From the numbers of pixels [images, frames, rows, columns] to those of `images`; None: pictures or videos."""
    raster: tuple[int, int, int] | None = None
    """(frames, rows, columns) of these pixels, if `place` is given."""
    pixel_size: float = 1.0
    """How many pixels of the picture one of these is wide: of a patch where the model is given patches; NaN if that is
    not known."""
    digests: Tensor | None = None
    """One for each image, by which it is known again."""
    masks: Tensor | None = None
    """[images, rows, columns] bool, where they are known: True on the foreground."""

    def __len__(self) -> int:
        return 1 if self.place is not None else len(self.images)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for images whose tokens lie at the same places."""
        if self.is_one:
            return self.images.shape, self.raster
        # Masks, sizes and orders say where tokens are, too.
        said = ((name, _content(value)) for name, value in self.part(slice(0, 1)).others.items())
        return self.images.shape[1:], *sorted(said)

    @property
    def is_alike(self) -> bool:
        """Whether all that is given beside the images is the same for each of them."""
        return all(
            bool((value == value[:1]).all())
            for value in self.others.values()
            if isinstance(value, Tensor) and value.dim() and len(value) == len(self.images)
        )

    @property
    def is_one(self) -> bool:
        """Whether it can only be one image."""
        return self.place is not None

    @property
    def size(self) -> tuple[int, int, int]:
        """(frames, rows, columns) of the pixels."""
        if self.raster is not None:
            return self.raster
        return (1 if self._time is None else self.images.shape[self._time], *self.images.shape[-2:])

    @property
    def _time(self) -> int | None:
        if self.images.dim() != 5:
            return None
        first, second = self.images.shape[1:3]
        return 2 if first <= _MOST_CHANNELS < second or (first == 3 and second != 3) else 1

    def numbers(self, pixels: Tensor) -> Tensor:
        """The number of each element's pixel, from those of the pixels [images, frames, rows, columns]."""
        if self.place is not None:
            return self.place(pixels).unsqueeze(-1).expand(self.images.shape)
        if self._time is None:
            return pixels.expand(self.images.shape)  # one frame, where the channels are
        return pixels.unsqueeze(3 - self._time).expand(self.images.shape)

    def run(self, model: nn.Module) -> Any:
        return self.call(model, self.images, self.others)

    def with_images(self, images: Tensor) -> "Batch":
        return replace(self, images=images)

    def part(self, which: slice) -> "Batch":
        """Some of the images."""
        count = len(self.images)
        others = {
            name: value[which] if isinstance(value, Tensor) and value.dim() and len(value) == count else value
            for name, value in self.others.items()
        }
        digests, masks = (None if of_each is None else of_each[which] for of_each in (self.digests, self.masks))
        return replace(self, images=self.images[which], others=others, digests=digests, masks=masks)

    def one_by_one(self) -> "Iterator[Batch]":
        """Each image as a batch of its own."""
        if self.is_one:
            yield self
            return
        for number in range(len(self)):
            yield self.part(slice(number, number + 1))

    def pair(self) -> "Batch":
        """The first image and the same turned by 180°, as a batch for a forward that is traced.

        Two, so that what belongs to which image shows; and unlike each other, so that a model which puts its tokens in
        another order for another image, or drops some, is found out.
        """
        one = self.part(slice(0, 1))
        others = {
            name: torch.cat([value, value]) if isinstance(value, Tensor) and value is not self.others[name] else value
            for name, value in one.others.items()
        }
        return replace(one, images=torch.cat([one.images, one.images.flip(-2, -1)]), others=others)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """Where and as the model takes them."""
        others = {name: _brought(value, device, dtype) for name, value in self.others.items()}
        return replace(self, images=_brought(self.images, device, dtype), others=others)


def _content(value: Any) -> object:
    """Equal for equal values; for tensors, only then."""
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return repr((value.shape, value.dtype, hashlib.sha256(data.numpy().tobytes()).hexdigest()))


def _brought(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
    # Operations on a tensor that was made in inference mode are not decomposed, in whatever mode they run.
    return value.clone() if value.is_inference() else value


def as_batch(image: "Tensor | Batch") -> Batch:
    """A batch of one image [C, H, W], or of the images in a tensor; a batch stays as it is."""
    if isinstance(image, Batch):
        return image
    return Batch(image if image.dim() > 3 else image[None], _plainly)


def batches(
    images: Any, batch_size: int, *, model: nn.Module | None = None, call: Call | None = None
) -> Iterator[Batch]:
    """Batches of at most this many images; those that are larger are split.

    Of pairs (images, labels), as data loaders yield them, the images are taken.
    """
    try:
        largest = operator.index(batch_size)  # NumPy's whole numbers, too, which torch does not take
    except TypeError as error:
        raise InputError(f"batch_size is {batch_size}, but a whole number is needed") from error
    given: Any = [images] if isinstance(images, Tensor | Mapping) else images
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"images are a tensor [B, C, H, W] or batches of such, not {type(given).__name__}")
    for item in given:
        if isinstance(item, tuple | list) and item:
            item = item[0]
        if isinstance(item, Batch):
            yield item
            continue
        if isinstance(item, Mapping):
            yield from _of_mapping(dict(item), largest, model, call)
            continue
        _check_images(item)
        batch = Batch(item, _caller(call))
        for begin in range(0, len(item), largest):
            yield batch.part(slice(begin, begin + largest))


def _check_images(batch: Any) -> None:
    if not isinstance(batch, Tensor):
        raise InputError(f"a batch of images is a tensor [B, C, H, W], not {type(batch).__name__}")
    if batch.dim() not in (4, 5) or not batch.shape[1]:
        raise InputError(
            f"images of shape [B, C, H, W] or videos of shape [B, T, C, H, W] are needed, not {list(batch.shape)}"
        )
    if not batch.is_floating_point():
        kind = str(batch.dtype).removeprefix("torch.")
        raise InputError(f"images are {kind}, not floating point: normalise them as the model expects them")


def _caller(call: Call | None) -> Callable[[nn.Module, Tensor, Mapping[str, Any]], Any]:
    if call is None:
        return _plainly
    if isinstance(call, str):
        return lambda model, images, others: model(**{call: images}, **others)
    if not callable(call):
        raise InputError(f"call is the name of an argument, or a function of model and batch, not {call!r}")
    return lambda model, images, others: call(model, images)


def _plainly(model: nn.Module, images: Tensor, others: Mapping[str, Any]) -> Any:
    return model(images, **others)


def _of_mapping(item: dict[str, Any], largest: int, model: nn.Module | None, call: Call | None) -> Iterator[Batch]:
    """Batches of what a model takes by name."""
    name, images = _images_in(item, call if isinstance(call, str) else None)
    others = {key: value for key, value in item.items() if key != name}

    def run(model: nn.Module, images: Tensor, others: Mapping[str, Any]) -> Any:
        given = {name: images, **others}
        return call(model, given) if callable(call) else model(**given)

    batch = Batch(images, run, others)
    if (grids := next((value for key, value in others.items() if key.endswith("grid_thw")), None)) is not None:
        yield from _packed(batch, grids, model)
    elif "spatial_shapes" in others and images.dim() == 3:
        for number, (rows, cols) in enumerate(others["spatial_shapes"].tolist()):
            yield _patches(batch.part(slice(number, number + 1)), (1, rows, cols), torch.flatten, model)
    else:
        _check_images(images)
        for begin in range(0, len(images), largest):
            part = batch.part(slice(begin, begin + largest))
            # Tokens may lie elsewhere for each: in the order of its own noise, say, or as far as its own mask goes.
            yield from [part] if part.is_alike else part.one_by_one()


def _images_in(item: Mapping[str, Any], named: str | None) -> tuple[str, Tensor]:
    """Which of them are the images: those that are named, or by what is usual, the one of most axes."""
    tensors = {key: value for key, value in item.items() if isinstance(value, Tensor) and value.is_floating_point()}
    if named is not None and named in tensors:
        return named, tensors[named]
    tensors = {key: value for key, value in tensors.items() if _NAMES.search(key)} or tensors
    most = max((value.dim() for value in tensors.values()), default=0)
    largest = [key for key, value in tensors.items() if value.dim() == most]
    if len(largest) != 1:
        said = f"{', '.join(largest)} may all be images" if largest else f"none of {', '.join(item)} are images"
        raise InputError(f"{said}: name the argument that takes them with call='…'")
    return largest[0], tensors[largest[0]]


def _packed(batch: Batch, grids: Tensor, model: nn.Module | None) -> Iterator[Batch]:
    """One image after the other, of a sequence of the patches of all."""
    merge = int(_said_by(model, "spatial_merge_size", 1))
    (name,) = (key for key in batch.others if key.endswith("grid_thw"))
    begin = 0
    if int(grids.prod(-1).sum()) != len(batch.images):
        raise InputError(f"{name} describes {int(grids.prod(-1).sum())} patches, but there are {len(batch.images)}")
    for number, (frames, rows, cols) in enumerate(grids.tolist()):
        end = begin + frames * rows * cols
        others = {**batch.others, name: grids[number : number + 1]}
        one = replace(batch, images=batch.images[begin:end], others=others)

        def in_groups(numbers: Tensor) -> Tensor:
            """Patches that are merged behind the last layer lie beside each other in the sequence."""
            split: Tensor = numbers.unflatten(2, (-1, merge)).unflatten(1, (-1, merge))
            return split.permute(0, 1, 3, 2, 4).flatten()

        yield _patches(one, (frames, rows, cols), in_groups, model)
        begin = end


def _said_by(model: nn.Module | None, name: str, otherwise: float) -> float:
    """A number that a model, or its config, has under this name."""
    found = (getattr(owner, name, None) for owner in (model, getattr(model, "config", None)))
    return next((float(value) for value in found if isinstance(value, int)), otherwise)


def _patches(
    batch: Batch, raster: tuple[int, int, int], order: Callable[[Tensor], Tensor], model: nn.Module | None
) -> Batch:
    """One image whose patches are given, [1, S, C] or [S, C], some of them perhaps only to fill up."""
    length = batch.images.shape[-2]

    def place(pixels: Tensor) -> Tensor:
        numbers = order(pixels[0])
        padded: Tensor = torch.cat([numbers, torch.full((length - len(numbers),), PADDING)])
        return padded.view(batch.images.shape[:-1])

    frames, rows, cols = raster
    if frames * rows * cols > length:
        raise InputError(f"an image of {frames} × {rows} × {cols} patches is given as {length}")
    return replace(batch, place=place, raster=raster, pixel_size=_said_by(model, "patch_size", math.nan))


def on_the_host() -> AbstractContextManager[Any]:
    """Around code of the lens: what it makes without naming a device is on the CPU, whatever device the caller's
    `torch.set_default_device` chose. The model itself runs as the caller has set it."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
