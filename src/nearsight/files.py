"""Writing so that a crash at any moment leaves the old file or the new one, never half of either."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from nearsight.errors import InputError
from nearsight.owner import has_ended, process_mark

Moment = Literal["written", "flushed", "renamed"]

disturb: Callable[[Moment, Path], None] | None = None
"""Faults that tests inject: called in every write, with the file that is being made, when its content is written, when
that has reached the disk, and when it has its name. It may raise, or end the process."""

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "it would be larger than files may be here",
    errno.EROFS: "the disk is read-only",
    errno.ENOENT: "its folder no longer exists",
    errno.ESTALE: "its network folder no longer exists",
}
_NO_FLUSHING = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
"""Errors of file systems that cannot flush a folder, or do not let it be opened for that."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of those that do not support hard links."""

_SECONDS_UNTIL_FORGOTTEN = 24 * 3600.0
"""Age after which unfinished files are removed if it cannot be seen from here whether their writer has ended."""
_REMAINS = re.compile(r"\..*\.(?P<mark>[0-9a-f]{8}-\d+-\d+)-[0-9a-f]{8}\.tmp.*")

RUN, STUDY, PROBES, MEASURED = "config.json", "study.json", "probes.csv", "heads.csv"
ABLATED = "ablated.json"
FINETUNED = "finetune.json"
_WORDS = {
    STUDY: "a study",
    PROBES: "what nearsight probe all left",
    ABLATED: "what nearsight ablate left of a study",
    RUN: "a run",
    MEASURED: "a measured model",
}
"""What a folder holds, by one file of each kind: some files of two kinds have the same name, and would be mixed up.
The first that exists decides: runs and studies have a heads.csv, too."""

_tidied: set[Path] = set()
"""Folders that this process has looked through for remains."""
_guards: dict[Path, Callable[[], None]] = {}
"""Folder → what is called before anything is written into it."""


@contextlib.contextmanager
def guarded(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """While the body runs, everything that this process writes into the folder calls `check` first.

    It is called at the last moment, right before a file gets its name. If it raises a `LostError`, the file is not
    written.
    """
    place = folder.absolute()
    assert place not in _guards
    _guards[place] = check
    try:
        yield
    finally:
        del _guards[place]


def _ask(path: Path) -> None:
    if _guards and (check := _guards.get(path.parent.absolute())) is not None:
        check()


class LostError(Exception):
    """What is to be written now belongs to another process; raised by a guard, or where an exclusive file exists."""


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
        if error.errno is None or not here or isinstance(error, WriteError):
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
def replacing(path: Path, *, lasting: bool = True, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary neighbour of `path`; when the body succeeds it takes `path`'s place in one rename.

    An `exclusive` file must not be there yet: if several processes make it at the same time one succeeds, and the
    others get a `LostError`.

    The data reach the disk before the rename, and the rename before the return: after a power cut the name holds the
    old content or all of the new one. That takes some 10 ms on a common disk. What can be made from other files need
    not be `lasting`: a crash of the process still leaves it whole; only a power cut may not.
    """
    temporary = path.with_name(f".{path.name}.{process_mark()}-{secrets.token_hex(4)}.tmp{path.suffix}")
    with _naming(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path.parent)
        try:
            yield temporary
            _reached("written", temporary)
            if lasting:
                _flush_to_disk(temporary)
            _reached("flushed", temporary)
            _ask(path)
            _give_name(temporary, path, exclusive=exclusive)
            _reached("renamed", path)
            if lasting:
                _flush_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):  # of a folder that no longer exists
                temporary.unlink()


def _give_name(temporary: Path, path: Path, *, exclusive: bool) -> None:
    if not exclusive:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise LostError(f"{path} was written by another process in the meantime") from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():  # on such a disk, a race is possible only between these two lines
            raise LostError(f"{path} was written by another process in the meantime") from error
        os.replace(temporary, path)


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


def _tidy(folder: Path) -> None:
    """What killed writes left in a folder is removed when this process first writes there."""
    if (place := folder.absolute()) not in _tidied:
        _tidied.add(place)
        remove_remains(folder)


def remove_remains(folder: Path, *, below: bool = False) -> None:
    """Remove what killed writes left behind in a folder, or also `below` it. Files of a writer that is, or
    may be, still running stay."""
    for remains in folder.rglob(".*.tmp*") if below else folder.glob(".*.tmp*"):
        match = _REMAINS.fullmatch(remains.name)
        ended = has_ended(match["mark"]) if match else None
        with contextlib.suppress(FileNotFoundError):
            if ended is None:  # a file of another machine, or of an earlier version
                ended = time.time() - remains.stat().st_mtime > _SECONDS_UNTIL_FORGOTTEN
            if ended:
                remains.unlink()


def write_text(path: Path, text: str, *, lasting: bool = True, exclusive: bool = False) -> None:
    with replacing(path, lasting=lasting, exclusive=exclusive) as temporary:
        temporary.write_text(text, encoding="utf-8")


def as_json(value: Any, *, allow_nan: bool = True) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=allow_nan) + "\n"


def write_json(path: Path, value: Any, *, allow_nan: bool = True) -> None:
    """`allow_nan`: let NaN and infinity pass, which Python reads and JSON does not have."""
    write_text(path, as_json(value, allow_nan=allow_nan))


def append_line(path: Path, line: str) -> None:
    """Add to a file that only grows. A line that a crash cut short is closed first: every line stays readable."""
    _ask(path)
    with _naming(path), path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")


def check_file(path: Path) -> None:
    """Refuse what is neither a file nor a folder: reading a pipe would wait, and a device may have no end. Other faults
    are reported when it is read."""
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise InputError(f"{path} is a pipe or a device, not a file")


def read_object(path: Path, *, missing: str, way_out: str = "") -> dict[str, Any]:
    """The JSON object in a file; otherwise an `InputError`, which names what is `missing` if there is no file."""
    check_file(path)
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


def is_url(place: str) -> bool:
    """Whether it is a place that fsspec reaches, and no path."""
    return "://" in place


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
        reason = "the disk is read-only" if _is_read_only(existing) else f"permission denied in {existing}"
        raise InputError(f"{path} cannot be written to: {reason}; choose another --out")


def _is_read_only(folder: Path) -> bool:
    return hasattr(os, "statvfs") and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def output_folder(path: Path) -> Path:
    """`path` as a folder that can be written to, made if need be."""
    check_output_folder(path)
    with _naming(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def mark_of(folder: Path) -> str | None:
    """The file that says what a folder holds; None where it holds none of these."""
    return next((mark for mark in _WORDS if (folder / mark).exists()), None)


def check_kind(folder: Path, own: str | None) -> None:
    """Refuse a folder that holds something of another kind than the one that is to be written there (None: of any)."""
    found = mark_of(folder)
    if found not in (None, own):
        raise InputError(f"{folder} holds {_WORDS[found]}, whose files would be lost; choose another --out")
