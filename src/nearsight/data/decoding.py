"""From image files to uint8 RGB arrays of one size, on all cores, with every unreadable file named.

Shape suffixes: n images of a chunk, C channels, H rows, W columns.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nearsight.data.opening import UnreadableError, opened_rgb
from nearsight.data.source import Chunk
from nearsight.errors import InputError

CHUNK = 512
"""Images decoded at a time."""


def _exact(picture: Image.Image, size: int) -> Image.Image:
    if picture.size != (size, size):
        raise UnreadableError(f"is {picture.width}×{picture.height}, but all must be {size}×{size}")
    return picture


def _fitted(picture: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to `size`, then the centre: what torchvision's Resize and CenterCrop do."""
    # In this order: a scale that is rounded before it is used makes some pictures a pixel smaller than torchvision's.
    width, height = (int(size * side / min(picture.size)) for side in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))


def _pixels(image: Path | bytes | None, size: int, fit: bool) -> NDArray[np.uint8] | str:
    """[C, H, W], or why there are none: an error in a worker must not hide those of its neighbours."""
    if image is None:
        return "has no bytes"
    try:
        with opened_rgb(image, shorter_side=size if fit else 0) as picture:
            picture = _fitted(picture, size) if fit else _exact(picture, size)
            return np.asarray(picture).transpose(2, 0, 1)
    except UnreadableError as error:
        return str(error)


def unreadable(where: Path, problems: Sequence[tuple[str, str]]) -> InputError:
    """One error for all files of a folder that could not be read."""
    shown = "; ".join(f"{name} ({reason})" for name, reason in problems[:5])
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return InputError(f"{len(problems)} image(s) in {where} cannot be used: {shown}{more}; repair or remove them")


def decode(
    where: Path, images: Sequence[Path], labels: Sequence[int], size: int, *, fit: bool = True
) -> Iterator[Chunk]:
    """Chunks of decoded images in the given order. `fit` resizes and crops; without it, another size is an error."""
    begins = range(0, len(images), CHUNK)
    several = ((images[begin : begin + CHUNK], labels[begin : begin + CHUNK]) for begin in begins)
    return decode_batches(where, several, size, fit=fit)


def decode_batches(
    where: Path,
    batches: Iterable[tuple[Sequence[Path | bytes | None], Sequence[int]]],
    size: int,
    *,
    fit: bool = True,
) -> Iterator[Chunk]:
    """A chunk for each batch of images and labels. Images in memory, which may be missing, are called by number."""
    problems: list[tuple[str, str]] = []
    first = 0
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow decodes without the interpreter lock
        for images, labels in batches:
            decoded = list(threads.map(lambda image: _pixels(image, size, fit), images))
            for number, (image, pixels) in enumerate(zip(images, decoded, strict=True), start=first):
                if isinstance(pixels, str):
                    name = str(image.relative_to(where)) if isinstance(image, Path) else f"image {number}"
                    problems.append((name, pixels))
            first += len(images)
            if not problems:
                chunk = np.stack([pixels for pixels in decoded if not isinstance(pixels, str)])
                yield chunk, np.asarray(labels, dtype=np.int64)
    if problems:
        raise unreadable(where, problems)
