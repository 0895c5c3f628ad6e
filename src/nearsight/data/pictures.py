"""Pictures where they lie: each a file, or a stretch of bytes in a shard, read one at a time and never all at once.

Shape suffixes: N pictures, n chosen ones, F files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nearsight.data.decoding import UnreadableError, check_bytes, regular_file
from nearsight.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

WHOLE = -1
"""In place of a number of bytes: all of the file."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """One part of a data set in its files. Arrays, not objects: processes that are forked share their memory."""

    folder: Path
    """Where the files are."""
    files_F: NDArray[np.bytes_]
    """Their paths below it, as the file system spells them."""
    file_N: NDArray[np.int64]
    """In which of them each picture is."""
    begin_N: NDArray[np.int64]
    """Where it begins there."""
    bytes_N: NDArray[np.int64]
    """How long it is; `WHOLE`: a file of its own."""
    labels_N: Tensor
    """Class numbers (int64), counted from 0."""
    digest: str
    """Of the names and sizes of all files: content is not read for it, and times differ from machine to machine."""
    in_shards: bool = False
    """Whether neighbours lie in one file, so that reading them together is faster."""

    @classmethod
    def of_files(cls, folder: Path, paths: Sequence[Path], labels: Sequence[int]) -> Pictures:
        """Each a file of its own below the folder."""
        names = [os.fsencode(path.relative_to(folder)) for path in paths]
        num = len(names)
        return cls(
            folder=folder,
            files_F=np.array(names),
            file_N=np.arange(num),
            begin_N=np.zeros(num, dtype=np.int64),
            bytes_N=np.full(num, WHOLE),
            labels_N=torch.tensor(labels, dtype=torch.int64),
            digest=files_digest(names, [path.stat().st_size for path in paths]),
        )

    def __len__(self) -> int:
        return len(self.labels_N)

    def select(self, index_n: Tensor) -> Pictures:
        """Those at these positions, in this order."""
        chosen = index_n.numpy()
        return replace(
            self,
            file_N=self.file_N[chosen],
            begin_N=self.begin_N[chosen],
            bytes_N=self.bytes_N[chosen],
            labels_N=self.labels_N[index_n],
        )

    def path(self, index: int) -> Path:
        """Of the file that it is in."""
        return self.folder / os.fsdecode(bytes(self.files_F[self.file_N[index]]))

    def name(self, index: int) -> str:
        """What to call it in an error."""
        path = str(self.path(index).relative_to(self.folder))
        return path if self.bytes_N[index] == WHOLE else f"{path}, at byte {self.begin_N[index]}"

    def read(self, index: int) -> bytes:
        """Its bytes, undecoded."""
        begin, length = int(self.begin_N[index]), int(self.bytes_N[index])
        try:
            with regular_file(self.path(index)) as file:
                num = os.fstat(file.fileno()).st_size if length == WHOLE else length
                check_bytes(num)
                content = os.pread(file.fileno(), num, begin)
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from error
        if len(content) < num:
            raise UnreadableError("is cut off: its file is shorter than it was")
        return content


def files_digest(names: Sequence[bytes], sizes: Sequence[int]) -> str:
    """Of files by their names and sizes, in their order."""
    digest = hashlib.sha256()
    for name, size in zip(names, sizes, strict=True):
        digest.update(b"%d %b\0" % (size, name))
    return digest.hexdigest()
