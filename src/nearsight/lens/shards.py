"""The images of a table in shards, which are measured separately, kept in files, and merged when all are there.

A folder per set of shards, named by the hash of what their numbers depend on. In it, for each shard that is done:

3-of-16.npz     the table of its images
3-of-16.json    what was measured, in full, and the sha256 of the table; written last, so without it there is none

So a killed process loses only the shards it was working on, and files that are damaged or of another set are not used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.errors import InputError, check_at_least
from nearsight.files import canonical_hash, read_object, write_json
from nearsight.lens.table import HeadTable

VERSION = 2
"""Raise it whenever the same record would mean other numbers."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How many images are divided, and where the tables of the parts are kept."""

    folder: Path
    """Holds a folder per record."""
    record: Mapping[str, Any]
    """All that the numbers depend on, as JSON values: the model, the images, what is measured."""
    num_images: int
    num_shards: int

    def __post_init__(self) -> None:
        check_at_least("the number of shards", self.num_shards, 1)
        if self.num_shards > self.num_images:
            raise InputError(f"{self.num_images} images cannot be divided into {self.num_shards} shards; ask for fewer")

    def span(self, shard: int) -> range:
        """The positions of a shard's images: one run of them, all shards as large as each other within one image.

        It depends on the two numbers alone.
        """
        begin, end = (number * self.num_images // self.num_shards for number in (shard, shard + 1))
        return range(begin, end)

    def keep(self, shard: int, table: HeadTable) -> Path:
        """Write the table of a shard, atomically; its file."""
        assert table.num_images == len(self.span(shard))
        path = self.path(shard)
        table.save(path)
        write_json(path.with_suffix(".json"), {**self._described(shard), "sha256": _digest(path)})
        return path

    def read(self, shard: int) -> HeadTable:
        """The table of a shard; an `InputError` if it is not there, is damaged, or is of something else."""
        path = self.path(shard)
        held = read_object(path.with_suffix(".json"), missing=f"shard {shard} of {self.num_shards} is not measured")
        digest = held.pop("sha256", None)
        if held != self._described(shard):
            raise InputError(f"{path} is of another model, of other images, or measured in another way; remove it")
        try:
            found = _digest(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        if found != digest:
            raise InputError(f"{path} is damaged: its contents are not what was written")
        table = HeadTable.load(path)
        if table.num_images != len(self.span(shard)):
            raise InputError(f"{path} is damaged: it is of {table.num_images} images, not of {len(self.span(shard))}")
        return table

    def is_done(self, shard: int) -> bool:
        """Whether its table can be used; what is damaged, or of something else, is to be measured again."""
        try:
            self.read(shard)
        except InputError:
            return False
        return True

    def merged(self) -> HeadTable:
        """The table of all images. Who measured which shard, and when, changes nothing about it."""
        return HeadTable.merge(self.read(shard) for shard in range(self.num_shards))

    def path(self, shard: int) -> Path:
        identity = canonical_hash({"version": VERSION, **self.record})
        return self.folder / identity / f"{shard}-of-{self.num_shards}.npz"

    def _described(self, shard: int) -> dict[str, Any]:
        described = {"version": VERSION, "shard": shard, "num_shards": self.num_shards, "num_images": self.num_images}
        as_read: dict[str, Any] = json.loads(json.dumps({**described, "record": self.record}))
        return as_read


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
