"""Digests of files, compared with what their makers published."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nearsight.data.source import Source
from nearsight.errors import InputError
from nearsight.files import reading


@dataclass(frozen=True)
class Checksum:
    """A file whose digest is published."""

    path: Path
    """The file."""
    expected: str
    """What its makers say (md5)."""
    found: str
    """What it has (md5)."""

    @property
    def ok(self) -> bool:
        return self.found == self.expected


def _md5(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def published_checksums(source: Source, md5: Mapping[str, str]) -> tuple[Checksum, ...]:
    """One entry per file of the source that has a published digest."""
    paths = ((source.folder / name, expected) for name, expected in md5.items())
    return tuple(Checksum(path, expected, _md5(path)) for path, expected in paths if path.is_file())


def check_published(source: Source, md5: Mapping[str, str]) -> None:
    """Refuse a source in which a file differs from the published one."""
    for checksum in published_checksums(source, md5):
        if not checksum.ok:
            raise InputError(
                f"{checksum.path} is damaged or was changed: its md5 is {checksum.found}, "
                f"but {checksum.expected} is published; get it again"
            )
