"""From the bytes of a picture to one of its crops at the size a model takes, with no more decoding than that needs.

A JPEG is decoded at a half, a quarter or an eighth of its size (what its blocks give by themselves) as long as the crop
has at least as many pixels as the result, on both sides. Its pixels are then resized as `ResizedCrop` does on the
device: bilinear, antialiased, nothing from outside the crop; where the picture was reduced, the crop's edges may lie
between two pixels.

simplejpeg decodes a JPEG faster than Pillow and to the same pixels. Pillow has the last word on a file that simplejpeg
refuses, opens all else, and does all of it where simplejpeg is not installed.

Shape suffixes: C channels, H rows, W columns of the picture, S the side of the result.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from nearsight.data.decoding import CHUNK, UnreadableError, fitted, loaded_rgb, undecoded_image, unreadable
from nearsight.data.pictures import Pictures
from nearsight.data.registry import Chunk
from nearsight.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

REDUCTIONS = (8, 4, 2)
"""By how much a JPEG's sides can be divided while it is decoded."""
_PLAIN = ("L", "RGB")
"""Modes of JPEGs that simplejpeg decodes to what Pillow does; inks are not among them."""


@functools.cache
def _simplejpeg() -> Any:
    """The library; None where it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


class Crop(NamedTuple):
    """A rectangle of a picture, in its own pixels."""

    top: int
    left: int
    rows: int
    columns: int


def stored_shape(content: bytes) -> tuple[int, int]:
    """(rows, columns) of a picture within the limits, from its head."""
    with undecoded_image(content) as picture:
        return picture.height, picture.width


def reduction(crop: Crop, size: int) -> int:
    """By how much a picture may be reduced, so that this crop of it still has `size` pixels on both sides."""
    return next((by for by in REDUCTIONS if min(crop.rows, crop.columns) >= by * size), 1)


def cropped(content: bytes, crop: Crop, size: int, *, fast: bool = True) -> Tensor:
    """The crop, resized: uint8 [3, S, S]. `fast` uses simplejpeg, if it is there."""
    with undecoded_image(content) as picture:
        by = reduction(crop, size) if picture.format == "JPEG" else 1
        pixels_HWC = _fast(content, picture, by) if fast else None
        if pixels_HWC is None:
            pixels_HWC = _by_pillow(picture, by)
    return _resized(pixels_HWC, crop, by, size)


def centred(content: bytes, size: int, resized: int) -> Tensor:
    """The middle of the picture, as models are evaluated: all of it decoded, bicubic; uint8 [3, S, S]."""
    with undecoded_image(content, shorter_side=resized) as picture:
        pixels_HWC = _fast(content, picture, 1)
        whole = loaded_rgb(picture) if pixels_HWC is None else Image.fromarray(pixels_HWC)
        middle = np.asarray(fitted(whole, size, resized))
    return torch.from_numpy(middle.copy()).permute(2, 0, 1)


def middles(pictures: Pictures, size: int, resized: int) -> Iterator[Chunk]:
    """All of them as models are evaluated, a bounded number at a time; every one that cannot be read is named."""
    problems: list[tuple[str, str]] = []

    def middle(position: int) -> Tensor | None:
        try:
            return centred(pictures.read(position), size, resized)
        except UnreadableError as error:
            problems.append((pictures.name(position), str(error)))
            return None

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for begin in range(0, len(pictures), CHUNK):
            positions = range(begin, min(begin + CHUNK, len(pictures)))
            found = list(threads.map(middle, positions))
            if not problems:
                images_n = [image_CHW for image_CHW in found if image_CHW is not None]
                yield torch.stack(images_n).numpy(), pictures.labels_N[positions.start : positions.stop].numpy()
    if problems:
        raise unreadable(pictures.folder, sorted(problems))


def _fast(content: bytes, picture: Image.Image, by: int) -> NDArray[np.uint8] | None:
    """By simplejpeg; None where it is not there, or does not take the picture."""
    library = _simplejpeg()
    if library is None or picture.format != "JPEG" or picture.mode not in _PLAIN:
        return None
    rows, columns = -(-picture.height // by), -(-picture.width // by)
    try:
        pixels_HWC: Any = library.decode_jpeg(content, "RGB", min_height=rows, min_width=columns, min_factor=by)
    except ValueError:
        return None
    return pixels_HWC if pixels_HWC.shape[:2] == (rows, columns) else None


def _by_pillow(picture: Image.Image, by: int) -> NDArray[np.uint8]:
    if by > 1:
        picture.draft(None, (picture.width // by, picture.height // by))
    return np.asarray(loaded_rgb(picture)).copy()


def _resized(pixels_HWC: NDArray[np.uint8], crop: Crop, by: int, size: int) -> Tensor:
    if by > 1:
        top, left, bottom, right = (
            edge / by for edge in (crop.top, crop.left, crop.top + crop.rows, crop.left + crop.columns)
        )
        picture = Image.fromarray(pixels_HWC)
        box = (left, top, min(right, picture.width), min(bottom, picture.height))
        resized = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR, box=box)).copy()
        return torch.from_numpy(resized).permute(2, 0, 1)
    inside_1CHW = torch.from_numpy(
        pixels_HWC[crop.top : crop.top + crop.rows, crop.left : crop.left + crop.columns]
    ).permute(2, 0, 1)[None]
    if (crop.rows, crop.columns) == (size, size):
        return inside_1CHW[0]
    # torch's own resizing of bytes takes less than half of Pillow's time.
    return torch.nn.functional.interpolate(inside_1CHW, size=(size, size), mode="bilinear", antialias=True)[0]
