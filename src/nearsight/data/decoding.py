"""From image files to pixels: opened within limits, then as uint8 RGB arrays of one size, on all cores.

All images and masks are opened here, and no file takes more than the limits allow. Every unreadable file is named.

Shape suffixes: n images of a chunk, C channels, H rows, W columns.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Condition
from typing import IO, TYPE_CHECKING, Any

from PIL import Image, UnidentifiedImageError

from nearsight.data.registry import Chunk
from nearsight.errors import InputError
from nearsight.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that are read. It knows others, and for one of them (EPS) it runs a program."""
CHUNK = 512
"""Images decoded at a time."""
MOST_PIXELS = 50_000_000
"""Of a picture, stored or resized, and of all that are in memory at a time. Decoding takes up to 16 bytes for each."""
LONGEST_SIDE = 2**16
"""Of a picture, in pixels."""
MOST_BYTES = 2**29
"""Of a file; some formats are read whole before anything is known of them."""
MOST_SCANS = 100
"""Of a progressive JPEG: each passes over all pixels again, and takes a few bytes. Encoders make about ten."""

_SCAN = b"\xff\xda"
_TILE_WIDTH, _TILE_HEIGHT = 322, 323
"""Tags of TIFF."""


def is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


class UnreadableError(Exception):
    """An image that cannot be decoded; the message says why."""


class _Room:
    """A budget of pixels: a picture in memory has taken its share, and one that finds too few left waits."""

    def __init__(self, pixels: int) -> None:
        self._left, self._released = pixels, Condition()

    @contextmanager
    def taking(self, pixels: int) -> Iterator[None]:
        with self._released:
            self._released.wait_for(lambda: pixels <= self._left)
            self._left -= pixels
        try:
            yield
        finally:
            with self._released:
                self._left += pixels
                self._released.notify_all()


_room = _Room(MOST_PIXELS)


@contextmanager
def undecoded_image(image: Path | bytes, *, shorter_side: int = 0) -> Iterator[Image.Image]:
    """A picture of which only the head is read, and whose pixels are accounted for; see `opened_image`."""
    with ExitStack() as stack:
        with _unreadable():
            file = stack.enter_context(_content(image))
            picture = stack.enter_context(Image.open(file, formats=FORMATS))
            _check_scans(picture, file)
            stack.enter_context(_room.taking(_pixels_needed(picture, shorter_side)))
        yield picture


@contextmanager
def opened_image(image: Path | bytes, *, shorter_side: int = 0) -> Iterator[Image.Image]:
    """A picture as it is stored, decoded; in memory for as long as this lasts, which others may wait for.

    `shorter_side`: what it is going to be resized to, if that is known. A long and narrow picture becomes a huge one.
    """
    with undecoded_image(image, shorter_side=shorter_side) as picture:
        with _unreadable():
            picture.load()
        yield picture


@contextmanager
def opened_rgb(image: Path | bytes, *, shorter_side: int = 0) -> Iterator[Image.Image]:
    """The same as RGB, which grey ones of 8 or 16 bits, palettes, inks (CMYK) and transparent ones become.

    A camera's note of how it was held (EXIF) turns nothing: pixels stay as they are stored, as in torchvision.
    """
    with undecoded_image(image, shorter_side=shorter_side) as picture:
        yield loaded_rgb(picture)


def loaded_rgb(picture: Image.Image) -> Image.Image:
    """The same, of a picture that is open, decoded or not."""
    with _unreadable():
        picture.load()
        as_bytes = _in_8_bits(picture) if picture.mode.startswith(("I", "F")) else picture
        return as_bytes if as_bytes.mode == "RGB" else as_bytes.convert("RGB")


def stored_size(image: Path) -> tuple[int, int]:
    """(columns, rows) of a picture, from the head of its file alone; what could not be opened is refused here, too."""
    with _unreadable(), _content(image) as file, Image.open(file, formats=FORMATS) as picture:
        _pixels_needed(picture, 0)
        return picture.size


def open_rgb(image: Path | bytes) -> Image.Image:
    """The same as `opened_rgb`, for callers that hold one picture at a time."""
    with opened_rgb(image) as picture:
        return picture


@contextmanager
def _unreadable() -> Iterator[None]:
    """Pillow's decoders raise whatever their parsers do (SyntaxError for a broken PNG, say); all mean the same here."""
    try:
        yield
    except UnreadableError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableError("is not a picture of a known format") from error
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UnreadableError(reason or str(error) or type(error).__name__) from error


@contextmanager
def _content(image: Path | bytes) -> Iterator[IO[bytes]]:
    if isinstance(image, bytes):
        check_bytes(len(image))
        yield io.BytesIO(image)
        return
    with regular_file(image) as file:
        check_bytes(os.fstat(file.fileno()).st_size)
        yield file


@contextmanager
def regular_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is one: opening a pipe without a writer would wait, and a device may notice that it is opened."""
    _check_regular(path.stat())
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check_regular(os.fstat(file.fileno()))  # which may have replaced the one that was checked
        yield file


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError("is not a file")


def check_bytes(num_bytes: int) -> None:
    if num_bytes > MOST_BYTES:
        raise UnreadableError(f"has {num_bytes:,} bytes, but a picture has at most {MOST_BYTES:,}")


def _check_scans(picture: Image.Image, file: IO[bytes]) -> None:
    if "progressive" not in picture.info:
        return
    file.seek(0)
    num_scans = sum(block.count(_SCAN) for block in iter(lambda: file.read(2**20), b""))
    if num_scans > MOST_SCANS:
        raise UnreadableError(f"has {num_scans:,} scans, but a JPEG has at most {MOST_SCANS}")


def _pixels_needed(picture: Image.Image, shorter_side: int) -> int:
    """How many pixels a picture has, or will have when it is resized; too many are refused."""
    width, height = picture.size
    # A tile is decoded whole, however little of it lies in the picture.
    tags: Any = getattr(picture, "tag_v2", {})
    tile_width, tile_height = int(tags.get(_TILE_WIDTH, 0)), int(tags.get(_TILE_HEIGHT, 0))
    stored, in_tile = width * height, tile_width * tile_height
    resized = stored * shorter_side**2 // min(width, height) ** 2
    if max(width, height) > LONGEST_SIDE:
        raise UnreadableError(f"is {width}×{height}, but a side has at most {LONGEST_SIDE:,} pixels")
    if stored > MOST_PIXELS:
        raise UnreadableError(f"is {width}×{height}, but a picture has at most {MOST_PIXELS:,} pixels")
    if in_tile > MOST_PIXELS:
        raise UnreadableError(f"has tiles of {tile_width}×{tile_height}, but a tile has at most {MOST_PIXELS:,} pixels")
    if resized > MOST_PIXELS:
        raise UnreadableError(
            f"is {width}×{height}: resized to {shorter_side} on its shorter side it has {resized:,} pixels, "
            f"but a picture has at most {MOST_PIXELS:,}"
        )
    return max(stored, in_tile, resized)


def _in_8_bits(picture: Image.Image) -> Image.Image:
    """A picture of more than 8 bits per channel, scaled; Pillow's own conversion cuts all above 255 off instead."""
    pixels = np.asarray(picture)
    # In 32 bits, small values may be those of 8 bits or of a dark picture of 16.
    unclear = picture.mode == "I" and pixels.max() <= 255
    if picture.mode == "F" or unclear or pixels.min() < 0 or pixels.max() > 65_535:
        raise UnreadableError("has values of unknown range; save it with 8 or 16 bits per channel")
    return Image.fromarray((pixels // 257).astype(np.uint8))


def _exact(picture: Image.Image, size: int) -> Image.Image:
    if picture.size != (size, size):
        raise UnreadableError(f"is {picture.width}×{picture.height}, but all must be {size}×{size}")
    return picture


def fitted(picture: Image.Image, size: int, resized: int | None = None) -> Image.Image:
    """The shorter side resized to `resized` (or `size`), then the centre: torchvision's Resize and CenterCrop."""
    # In this order: a scale that is rounded before it is used makes some pictures a pixel smaller than torchvision's.
    width, height = (int((resized or size) * side / min(picture.size)) for side in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))


def _pixels(image: Path | bytes | None, size: int, fit: bool) -> NDArray[np.uint8] | str:
    """[C, H, W], or why there are none: an error in a worker must not hide those of its neighbours."""
    if image is None:
        return "has no bytes"
    try:
        with opened_rgb(image, shorter_side=size if fit else 0) as picture:
            picture = fitted(picture, size) if fit else _exact(picture, size)
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
