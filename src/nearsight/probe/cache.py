"""Features on disk: computed once, then mapped into memory, found by what they were made from.

A folder per set of features, named by the hash of everything they depend on: the model's weights and settings, the
images' content, their preparation, and which features they are. In it:

record.json     what they were made from, in full
features.npy    the array, at its full size from the beginning on
chunks.json     the checksum of each chunk that is written; a chunk that has none, or another, is computed (again)

So a process that is killed loses one chunk, and a damaged chunk is computed again. A hash does not see
everything (what a function computes that a model calls); so the first image's features are always computed
and compared.
"""

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from nearsight.data.locations import user_cache_folder
from nearsight.data.segmentation import MaskedImages
from nearsight.errors import InputError
from nearsight.files import canonical_hash, output_folder, read_object, write_json
from nearsight.probe.features import Watch, unwatched
from nearsight.probe.frozen import Preparation
from nearsight.probe.settings import FeatureSpec

VERSION = 1
"""Raise it whenever the same key would mean other numbers."""
CHUNK_BYTES = 32 * 2**20
MAPS_BYTES = 2**30
"""Of maps of patches, which are large: more of one data set are kept only where a folder for them was named."""
_TOLERANCE = 2e-3
"""In deviations of the features: other devices, batch sizes and libraries round differently, but not by that much."""


@dataclass(frozen=True, kw_only=True)
class FeatureKey:
    """What a set of features depends on."""

    model: str
    """`nearsight.probe.frozen.model_identity` of the model."""
    data: str
    """Fingerprint of the data set."""
    part: str
    """Which part of it: train or test."""
    spec: FeatureSpec
    """Resolved, as `FeatureReader.spec` is."""
    preparation: Preparation

    def described(self) -> dict[str, Any]:
        return {"version": VERSION, **json.loads(json.dumps(asdict(self)))}

    @property
    def identity(self) -> str:
        return canonical_hash(self.described())


class MapReader(Protocol):
    """What reads features of images of one size or of several."""

    @property
    def spec(self) -> FeatureSpec:
        """Resolved."""
        ...

    def __call__(self, images: Tensor, /) -> Tensor: ...


def default_folder() -> Path:
    return user_cache_folder() / "features"


def cached_features(
    key: FeatureKey,
    reader: MapReader,
    images: Callable[[int, int], Tensor],
    num_images: int,
    *,
    folder: Path | None = None,
    batch_size: int = 64,
    watch: Watch = unwatched,
) -> Tensor:
    """The features of images 0 to `num_images`, float32, mapped from a file; what is missing there is computed.

    Args:
        images: gives the prepared images from one position up to another.
        folder: that holds a folder per key; by default in the user's cache.
        watch: passes the batches of new features on, to show progress.
    """
    if reader.spec != key.spec:
        raise InputError(f"the key is of {key.spec}, but the reader reads {reader.spec}")
    place = output_folder((folder or default_folder()) / key.identity)
    with _locked(place):
        _check_record(place / "record.json", key.described())
        first = reader(images(0, 1)).float().cpu().numpy()
        array = _open_array(place, (num_images, *first.shape[1:]))
        chunks = _Chunks(place / "chunks.json", array)
        if chunks.intact(0) and not np.allclose(array[:1], first, rtol=0, atol=_TOLERANCE * first.std()):
            raise InputError(
                f"the features in {place} are those of another model, although its weights and settings are the same; "
                "remove that folder"
            )
        _fill(chunks, reader, images, batch_size, watch)
    # Copy-on-write: torch wants memory it may write to, and the file must not change.
    return torch.from_numpy(np.load(place / "features.npy", mmap_mode="c"))


def keeps_maps(reader: MapReader, size: tuple[int, int], num_images: int, folder: Path | None) -> bool:
    """Whether so many maps of patches are kept."""
    return folder is not None or 4 * num_images * reader(torch.zeros(1, 3, *size)).numel() <= MAPS_BYTES


def whole_maps(
    reader: MapReader,
    images: MaskedImages,
    preparation: Preparation,
    *,
    model: str,
    data: str,
    part: str,
    device: torch.device,
    folder: Path | None = None,
    batch_size: int = 16,
    watch: Watch = unwatched,
) -> Tensor:
    """The maps of all images of a data set with masks, squeezed to the model's size, [N, C, h, w]. See
    `cached_features`; model and data: what identifies them."""
    key = FeatureKey(model=model, data=data, part=f"{part}, whole", spec=reader.spec, preparation=preparation)

    def prepared(begin: int, end: int) -> Tensor:
        opened = threads.map(images.__getitem__, range(begin, end))
        return torch.cat([preparation.whole(image_CHW, device) for image_CHW, _ in opened])

    with ThreadPoolExecutor() as threads:
        return cached_features(key, reader, prepared, len(images), folder=folder, batch_size=batch_size, watch=watch)


def _check_record(path: Path, described: Mapping[str, Any]) -> None:
    if not path.exists():
        write_json(path, described)
        return
    held = read_object(path, missing=str(path.parent), way_out="; remove its folder")
    differing = [name for name in described if held.get(name) != described[name]]
    if differing:
        raise InputError(
            f"{path.parent} holds the features of another {' and '.join(differing)} than these; remove that folder"
        )


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """One process at a time; the lock of one that was killed goes with it."""
    with (place / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another process is writing the features in {place}; wait until it is done") from error
        yield


def _open_array(place: Path, shape: tuple[int, ...]) -> np.memmap[Any, np.dtype[np.float32]]:
    path = place / "features.npy"
    if path.exists():
        with contextlib.suppress(Exception):  # a file that was cut short, or has another header, is written again
            array = open_memmap(path, mode="r+")
            if array.shape == shape and array.dtype == np.float32:
                return array
    (place / "chunks.json").unlink(missing_ok=True)
    try:
        array = open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        if hasattr(os, "posix_fallocate"):
            # So far no disk space is reserved, and writing to the mapped file on a full disk would kill the process.
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array
    except OSError as error:
        path.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}; make room, or choose another folder") from error


class _Chunks:
    """Which rows of the array are written."""

    def __init__(self, path: Path, array: np.memmap[Any, np.dtype[np.float32]]) -> None:
        self._path, self.array = path, array
        self.rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
        self._sums: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            held = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(held, dict) and held.pop("rows", None) == self.rows:
                self._sums = held

    def __len__(self) -> int:
        return len(range(0, len(self.array), self.rows))

    def span(self, number: int) -> tuple[int, int]:
        return number * self.rows, min((number + 1) * self.rows, len(self.array))

    def _sum(self, number: int) -> int:
        begin, end = self.span(number)
        return zlib.crc32(np.ascontiguousarray(self.array[begin:end]).data)

    def intact(self, number: int) -> bool:
        return str(number) in self._sums and self._sums[str(number)] == self._sum(number)

    def close(self, number: int) -> None:
        """The rows are written: first they reach the disk, then the note that they did."""
        self.array.flush()
        self._sums[str(number)] = self._sum(number)
        write_json(self._path, {"rows": self.rows, **self._sums})


def _fill(
    chunks: _Chunks, reader: MapReader, images: Callable[[int, int], Tensor], batch_size: int, watch: Watch
) -> None:
    missing = [number for number in range(len(chunks)) if not chunks.intact(number)]
    spans = [
        (number, begin, min(begin + batch_size, end))
        for number in missing
        for first, end in [chunks.span(number)]
        for begin in range(first, end, batch_size)
    ]
    batches = (reader(images(begin, end)).float().cpu() for _, begin, end in spans)
    for (number, begin, end), features in zip(spans, watch(batches), strict=True):
        chunks.array[begin:end] = features.numpy()
        if end == chunks.span(number)[1]:
            chunks.close(number)
