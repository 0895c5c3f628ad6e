"""Writing so that a crash at any moment leaves the old file or the new one, never half of either."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from nearsight.errors import InputError

Moment = Literal["written", "flushed", "renamed"]

disturb: Callable[[Moment, Path], None] | None = None
"""Faults that tests inject: called in every write, with the file that is being made, when its content is written, when
that has reached the disk, and when it has its name. It may raise, or end the process."""

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "it would be larger than files may be here",
    errno.EROFS: "the disk is read-only",
    errno.ENOENT: "its folder has gone",
    errno.ESTALE: "its network folder has gone",
}
_NO_FLUSHING = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
"""What file systems say that cannot flush a folder, or do not let it be opened for that."""

_SECONDS_TO_WRITE = 3600.0
"""No file takes longer."""


class WriteError(OSError, InputError):
    """Something could not be written; what was there before is still there."""

    def __str__(self) -> str:
        reason = _REASONS.get(self.errno or 0, self.strerror)
        return f"{self.filename} cannot be written: {reason}; make room, or choose another --out"


@contextlib.contextmanager
def _naming(path: Path, *others: Path) -> Iterator[None]:
    """An error that is about the file to be written, or what is on the way to it, names it. Those about files that are
    read meanwhile stay what they are."""
    try:
        yield
    except OSError as error:
        here = error.filename is None or Path(os.fsdecode(error.filename)) in (path, *others, *path.parents)
        if error.errno is None or not here:
            raise
        raise WriteError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def reading(what: Path) -> Iterator[None]:
    """An error about a file or folder that is read is an `InputError` that names it, or `what` where it has no name."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if error.filename is not None else what
        if error.errno == errno.ENOENT and path.is_symlink():
            raise InputError(f"{path} is a link to {os.readlink(path)}, which is not there; remove it") from error
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def replacing(path: Path, *, lasting: bool = True) -> Iterator[Path]:
    """Yield a temporary neighbour of `path`; when the body succeeds it takes `path`'s place in one rename.

    The data reach the disk before the rename, and the rename before the return: after a power cut the name holds the
    old content or all of the new one. That takes some 10 ms on a common disk. What can be made from other files need
    not be `lasting`: a crash of the process leaves it whole all the same, and only a power cut may not.
    """
    # Not by the process's number: containers that share a folder have equal ones, and so do threads.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp{path.suffix}")
    with _naming(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            _reached("written", temporary)
            if lasting:
                _flush_to_disk(temporary)
            _reached("flushed", temporary)
            os.replace(temporary, path)
            _reached("renamed", path)
            if lasting:
                _flush_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):  # of a folder that has gone
                temporary.unlink()


def _reached(moment: Moment, path: Path) -> None:
    if disturb is not None:
        disturb(moment, path)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(path: Path) -> None:
    try:
        _flush_to_disk(path)
    except OSError as error:
        if error.errno not in _NO_FLUSHING:
            raise


def remove_remains(folder: Path, *, shared: bool = False) -> None:
    """Remove what killed writes left behind. In a `shared` folder, a young one may be of somebody who is writing."""
    for remains in folder.glob(".*.tmp*"):
        with contextlib.suppress(FileNotFoundError):
            if not shared or time.time() - remains.stat().st_mtime > _SECONDS_TO_WRITE:
                remains.unlink()


def write_text(path: Path, text: str, *, lasting: bool = True) -> None:
    with replacing(path, lasting=lasting) as temporary:
        temporary.write_text(text, encoding="utf-8")


def as_json(value: Any, *, allow_nan: bool = True) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan) + "\n"


def write_json(path: Path, value: Any, *, allow_nan: bool = True) -> None:
    """`allow_nan`: let NaN and infinity pass, which Python reads and JSON does not have."""
    write_text(path, as_json(value, allow_nan=allow_nan))


def append_line(path: Path, line: str) -> None:
    """Add to a file that only grows. A line that a crash cut short is closed first: every line stays readable."""
    with _naming(path), path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")


def read_object(path: Path, *, missing: str, way_out: str = "") -> dict[str, Any]:
    """The JSON object in a file; else an `InputError`, which for a file that is not there says what is `missing`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{missing}: {path.name} is missing{way_out}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not JSON or not UTF-8; brackets without end
        raise InputError(f"{path} is damaged: {error}{way_out}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: it does not hold an object{way_out}")
    return value


def canonical_hash(value: Any, digits: int = 16) -> str:
    """The first hex digits of the sha256 of a value's canonical JSON (sorted keys, no spaces, no NaN)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def check_output_folder(path: Path) -> None:
    """Refuse a path that cannot become a folder to write to; nothing is made yet."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        problem = "is a file" if existing == path else f"lies below {existing}, which is a file"
        raise InputError(f"{path} {problem}, but a folder to write to is needed; choose another --out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written to: permission denied in {existing}; choose another --out")


def output_folder(path: Path) -> Path:
    """`path` as a folder that can be written to, made if need be."""
    check_output_folder(path)
    with _naming(path):
        path.mkdir(parents=True, exist_ok=True)
    return path
