"""Looking through folders of data: links are followed, what is hidden is left out, nothing is skipped in silence."""

import os
from collections.abc import Iterator
from pathlib import Path

from nearsight.errors import InputError

_LEFT_BY_MACOS = "__MACOSX"
"""The folder with which macOS doubles whatever it packs into a zip file."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder is an editor's or a system's, and no data."""
    return name.startswith(".") or name == _LEFT_BY_MACOS


def entries_below(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Every file and folder below a folder, in no order; one that cannot be listed is an `OSError`."""
    return _entries(str(folder), link=None, above=frozenset())


def _entries(folder: str, *, link: str | None, above: frozenset[tuple[int, int]]) -> Iterator["os.DirEntry[str]"]:
    status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise InputError(f"{link or folder} leads back to a folder in which it lies, and so on without end; remove it")
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            yield entry
            if entry.is_dir():
                last_link = entry.path if entry.is_symlink() else link
                yield from _entries(entry.path, link=last_link, above=above | {identity})
