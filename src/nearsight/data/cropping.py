"""From the bytes of a picture to one of its crops at the size a model takes, with no more decoding than that needs.

A JPEG is decoded no further down than the crop reaches, and at a quarter or an eighth of its size (what its blocks give
by themselves) as long as the crop has at least as many pixels as the result, on both sides. Its pixels are then resized
as `ResizedCrop` does on the device: bilinear, antialiased, nothing from outside the crop; where the picture was
reduced, the crop's edges may lie between two pixels.

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

REDUCTIONS = (8, 4)
"""By how much a JPEG's sides are divided while it is decoded, where they may be. A half saves nothing: most of the work
is to read its bits, and the faster way of resizing knows no edges between pixels."""
_MARKER, _SCAN, _END, _SEQUENTIAL = 0xFF, 0xDA, b"\xff\xd9", (0xC0, 0xC1)
_OTHER_FRAMES = (0xC2, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
"""Progressive, lossless and arithmetic ones."""
_LAST_BYTES = 64
_PLAIN = ("L", "RGB")
"""Modes of JPEGs that simplejpeg decodes to what Pillow does; inks are not among them."""


@functools.cache
def simplejpeg() -> Any:
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


def cropped(content: bytes, crop: Crop, size: int, *, fast: bool = True, reduce: bool = True) -> Tensor:
    """The crop, resized: uint8 [3, S, S]. `fast` uses simplejpeg, if it is there; without `reduce` all is decoded."""
    with undecoded_image(content) as picture:
        by = reduction(crop, size) if reduce and picture.format == "JPEG" else 1
        pixels_HWC = _fast(content, picture, by, crop.top + crop.rows) if fast else None
        if pixels_HWC is None:
            pixels_HWC = _by_pillow(picture, by)
    return _resized(pixels_HWC, crop, by, size)


def centred(content: bytes, size: int, resized: int) -> Tensor:
    """The middle of the picture, as models are evaluated: all of it decoded, bicubic; uint8 [3, S, S]."""
    with undecoded_image(content, shorter_side=resized) as picture:
        pixels_HWC = _fast(content, picture, 1, picture.height)
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


def _fast(content: bytes, picture: Image.Image, by: int, bottom: int) -> NDArray[np.uint8] | None:
    """The rows down to `bottom`, and some more, by simplejpeg; None where it is not there, or refuses the picture."""
    library = simplejpeg()
    if library is None or picture.format != "JPEG" or picture.mode not in _PLAIN:
        return None
    shorter = _ending_below(content, bottom)
    stored, height = shorter or (content, picture.height)
    rows, columns = -(-height // by), -(-picture.width // by)
    try:
        pixels_HWC: Any = library.decode_jpeg(
            stored, "RGB", min_height=rows, min_width=columns, min_factor=by, strict=shorter is None
        )
    except ValueError:
        return None
    return pixels_HWC if pixels_HWC.shape[:2] == (rows, columns) else None


def _ending_below(content: bytes, bottom: int) -> tuple[bytearray, int] | None:
    """The JPEG with a head that says that it has no more rows than are needed, and how many: decoders then leave out
    the rest, whose bits they would have to read, too. None where that saves nothing, or the file is not a plain one.

    A block's row more than the crop has, because colours are smoothed with the row below. What is left over at the end
    is a warning, which the decoder is told to ignore; so it is seen here that the file has its end.
    """
    if content.find(_END, -_LAST_BYTES) < 0:
        return None
    place, frame = 2, 0
    while place + 10 < len(content) and content[place] == _MARKER:
        kind = content[place + 1]
        if kind in _SEQUENTIAL:
            frame = place
        elif kind in _OTHER_FRAMES:
            return None
        elif kind == _SCAN:
            break
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    else:
        return None
    # All channels in one scan: otherwise what is left over would be the others.
    if not frame or content[place + 4] != content[frame + 9]:
        return None
    block = 8 * max(content[frame + 11 + 3 * channel] & 15 for channel in range(content[frame + 9]))
    height, rows = int.from_bytes(content[frame + 5 : frame + 7], "big"), block * (bottom // block + 2)
    if rows >= height:
        return None
    changed = bytearray(content)
    changed[frame + 5 : frame + 7] = rows.to_bytes(2, "big")
    return changed, rows


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
