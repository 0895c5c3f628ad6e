"""Decoded once, then mapped into memory: one file of raw uint8 pixels per data set, in the user's cache folder.

The file holds train pixels, test pixels, train labels and test labels, then a JSON record with a sum of its own, its
length and a magic word. The record comes last because counts and digest are known last; pixels come first so that they
are aligned.

Opening must not read a gigabyte, yet must not trust a changed file. So the writer sets the file's modification time to
one noted in the record: as long as it is still there the file is taken as it is, otherwise its sha256 is computed once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from nearsight.data.dataset import ImageSet, fingerprint
from nearsight.data.locations import check_spelling, entries_below, user_cache_folder
from nearsight.data.registry import Source
from nearsight.errors import InputError
from nearsight.files import canonical_hash, reading, replacing
from nearsight.lazy import np, torch

VERSION = 4
"""Raise it whenever decoding or this layout changes: caches of other versions are written again."""

_MAGIC = b"nearsght"
_LABEL_BYTES = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What a cache file says about itself."""

    version: int
    source: str
    """Digest of names, sizes and times of the files it was decoded from."""
    sealed_ns: int
    """The modification time it had when its content was last known to be right."""
    sha256: str
    """Of everything before the record."""
    classes: list[str]
    image_size: list[int]
    num_train: int
    num_test: int

    @property
    def pixel_bytes(self) -> tuple[int, int]:
        each = 3 * self.image_size[0] * self.image_size[1]
        return self.num_train * each, self.num_test * each

    @property
    def content_bytes(self) -> int:
        return sum(self.pixel_bytes) + (self.num_train + self.num_test) * _LABEL_BYTES


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A data set that was read from files."""

    classes: tuple[str, ...]
    """Class names in the order of the labels."""
    train: ImageSet
    """The official training set, mapped from the cache file; writing to it changes no file."""
    test: ImageSet
    """The official test set, mapped in the same way."""
    fingerprint: str
    """Digest of the exact content."""


class _UnusableError(Exception):
    """A cache file that must be written again; the message says why."""


def cache_file(name: str, source: Source, image_size: int) -> Path:
    """Where the decoded images of a source lie."""
    place = canonical_hash([str(check_spelling(source.folder.resolve())), source.layout], digits=8)
    return user_cache_folder() / "decoded" / f"{name}-{image_size}-{place}.images"


def source_digest(source: Source) -> str:
    """Changes when a file of the source is edited, added, removed or renamed, as far as sizes and times show it."""
    entries = []
    with reading(source.folder):
        for path in source.files:
            status = path.stat()
            sums = _folder_sums(path) if path.is_dir() else (1, status.st_size, status.st_mtime_ns)
            entries.append([str(path.relative_to(source.folder)), *sums])
    return canonical_hash(entries, digits=64)


def _folder_sums(folder: Path) -> tuple[int, int, int]:
    """Number of entries below a folder, and sums of their sizes and times.

    A sorted list of a hundred thousand names would take longer than the whole opening may. Sums need no names: an edit
    changes a file's time, and any other change that of its folder.
    """
    num, size, time_ns = 1, 0, folder.stat().st_mtime_ns
    for entry in entries_below(folder):
        status = entry.stat()
        num, time_ns = num + 1, time_ns + status.st_mtime_ns
        if not entry.is_dir():  # whose size depends on the file system
            size += status.st_size
    return num, size, time_ns


def open_cached(
    name: str, source: Source, image_size: int, *, before_decoding: Callable[[], object] = lambda: None
) -> Decoded:
    """The decoded images of a source, from the cache if it is up to date, otherwise decoded now."""
    path = cache_file(name, source, image_size)
    digest = source_digest(source)
    record = None
    try:
        record = _check(path, digest)
    except (FileNotFoundError, NotADirectoryError):
        _log.info("decoding %s from %s", name, source.folder)
    except OSError as error:
        raise InputError(f"the image cache {path} cannot be read: {error.strerror}; remove it") from error
    except _UnusableError as reason:
        _log.warning("the image cache %s is written again: %s", path, reason)
    if record is None:
        before_decoding()
        record = _write(path, source, digest, image_size)
    return _map(path, record)


def verify_cache(name: str, source: Source, image_size: int) -> bool:
    """Whether the cache file of a source has the content it was written with. Reads all of it."""
    path = cache_file(name, source, image_size)
    try:
        return _content_sha256(path, record := _read_record(path)) == record.sha256
    except (FileNotFoundError, _UnusableError):
        return False


def _check(path: Path, digest: str) -> _Record:
    record = _read_record(path)
    if record.source != digest:
        raise _UnusableError("the files it was decoded from have changed")
    if path.stat().st_mtime_ns != record.sealed_ns:
        if _content_sha256(path, record) != record.sha256:
            raise _UnusableError("its checksum is wrong")
        _seal(path, record.sealed_ns)
    return record


def _read_record(path: Path) -> _Record:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = len(_MAGIC) + 8
        if size < tail:
            raise _UnusableError("it is truncated")
        file.seek(size - tail)
        length, magic = int.from_bytes(file.read(8), "little"), file.read()
        if magic != _MAGIC or length > size - tail:
            raise _UnusableError("it is damaged")
        file.seek(size - tail - length)
        try:
            fields = json.loads(file.read(length))
            if fields["version"] != VERSION:
                raise _UnusableError(f"it has version {fields['version']}, and this nearsight writes {VERSION}")
            if fields.pop("seal") != _seal_of(fields):
                raise _UnusableError("it is damaged")
            record = _Record(**fields)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _UnusableError("it is damaged") from error
    if record.content_bytes != size - tail - length:
        raise _UnusableError("it is damaged")
    return record


def _seal_of(fields: dict[str, object]) -> str:
    """The record's own sum: that of the content does not notice other class names."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _content_sha256(path: Path, record: _Record) -> str:
    digest, left = hashlib.sha256(), record.content_bytes
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _seal(path: Path, sealed_ns: int) -> None:
    try:
        os.utime(path, ns=(sealed_ns, sealed_ns))
    except OSError as error:  # another user's file can still be read
        _log.info("%s could not be marked as verified: %s", path, error)


def _write(path: Path, source: Source, digest: str, image_size: int) -> _Record:
    try:
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                record = _write_content(file, source, digest, image_size)
            _seal(temporary, record.sealed_ns)
        return record
    except OSError as error:
        if error.filename is not None and Path(error.filename).is_relative_to(source.folder):
            raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise InputError(
            f"the image cache {path} cannot be written: {reason}; make room, or set XDG_CACHE_HOME to another folder"
        ) from error


def _write_content(file: BinaryIO, source: Source, digest: str, image_size: int) -> _Record:
    sha256 = hashlib.sha256()

    def put(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        data = np.ascontiguousarray(array).data
        sha256.update(data)
        file.write(data)

    labels = []
    for part, read in (("train", source.train), ("test", source.test)):
        labels_of_part = []
        for images_nCHW, labels_n in read() if read is not None else ():
            assert images_nCHW.shape == (len(labels_n), 3, image_size, image_size), images_nCHW.shape
            put(images_nCHW)
            labels_of_part.append(labels_n)
        if not labels_of_part and read is not None:
            raise InputError(f"{source.folder} has no {part} images")
        labels.append(np.concatenate(labels_of_part or [np.empty(0, dtype=np.int64)]))
    for labels_N in labels:
        put(labels_N.astype("<i8"))
    record = _Record(
        version=VERSION,
        source=digest,
        # An even second, because some file systems keep no finer times.
        sealed_ns=time.time_ns() // 2_000_000_000 * 2_000_000_000,
        sha256=sha256.hexdigest(),
        classes=list(source.classes),
        image_size=[image_size, image_size],
        num_train=len(labels[0]),
        num_test=len(labels[1]),
    )
    fields = asdict(record)
    text = json.dumps({**fields, "seal": _seal_of(fields)}).encode()
    file.write(text + len(text).to_bytes(8, "little") + _MAGIC)
    return record


def _map(path: Path, record: _Record) -> Decoded:
    # Copy-on-write: torch wants memory it may write to, and the file must not change.
    content = np.memmap(path, dtype=np.uint8, mode="c")[: record.content_bytes]
    train_bytes, test_bytes = record.pixel_bytes
    labels = torch.from_numpy(content[train_bytes + test_bytes :].copy().view("<i8").astype(np.int64))

    def part(begin: int, num_bytes: int, labels_N: torch.Tensor) -> ImageSet:
        pixels = torch.from_numpy(content[begin : begin + num_bytes])
        return ImageSet(pixels.view(len(labels_N), 3, *record.image_size), labels_N)

    return Decoded(
        classes=tuple(record.classes),
        train=part(0, train_bytes, labels[: record.num_train]),
        test=part(train_bytes, test_bytes, labels[record.num_train :]),
        fingerprint=fingerprint(
            record.sha256, record.num_train, record.num_test, (record.image_size[0], record.image_size[1])
        ),
    )
