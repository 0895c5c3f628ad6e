"""Writing so that a crash at any moment leaves the old file or the new one, never half of either."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nearsight.errors import InputError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of `path`; when the body succeeds it takes `path`'s place in one rename.

    The data reach the disk before the rename, and the rename before the return: after a power cut the name holds the
    old content or all of the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        _flush_to_disk(temporary)
        os.replace(temporary, path)
        _flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


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
    path.mkdir(parents=True, exist_ok=True)
    return path
