"""SVHN (Netzer et al. 2011), format 2: 32×32 crops in two `.mat` files. There the digit 0 has label 10.

Only the part of MATLAB's level 5 files that SVHN uses is read, so that it needs no library. After a header of 128 bytes
come elements: a type, a length and data padded to 8 bytes; up to 4 bytes of data sit in the tag itself. An array is an
element that holds four others: flags, dimensions, name and values, which run column by column. It may be compressed as
a whole. (MathWorks, "MAT-File Format", chapter 1)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearsight.data.dataset import check_label_range
from nearsight.data.locations import incomplete
from nearsight.data.registry import Chunk, DatasetSpec, Download, Source, register_dataset
from nearsight.errors import InputError
from nearsight.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FILES = ("train_32x32.mat", "test_32x32.mat")

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def _read(path: Path) -> Iterator[Chunk]:
    arrays = read_mat_arrays(path)
    if not {"X", "y"} <= arrays.keys():
        raise InputError(f"{path} holds {', '.join(arrays) or 'no arrays'}, but X and y are expected; get format 2")
    pixels_HWCN, digits_N1 = arrays["X"], arrays["y"]
    num = pixels_HWCN.shape[-1]
    if pixels_HWCN.shape != (32, 32, 3, num) or pixels_HWCN.dtype != np.uint8 or digits_N1.size != num:
        raise InputError(
            f"{path} holds images {list(pixels_HWCN.shape)} and {digits_N1.size} labels, "
            "but uint8 [32, 32, 3, N] and N are expected; get format 2 (cropped digits)"
        )
    digits_N = digits_N1.reshape(-1).astype(np.int64)
    labels_N = np.where(digits_N == 10, 0, digits_N)
    check_label_range(str(path), torch.from_numpy(labels_N), 10)
    yield np.ascontiguousarray(pixels_HWCN.transpose(3, 2, 0, 1)), labels_N


def find_svhn(data_dir: Path, _image_size: int) -> Source | None:
    for folder in (data_dir / "svhn", data_dir):
        train, test = (folder / name for name in _FILES)
        if train.is_file() and test.is_file():
            return Source(
                folder=folder,
                layout="format 2",
                files=(train, test),
                classes=tuple("0123456789"),
                train=partial(_read, train),
                test=partial(_read, test),
            )
        if train.is_file() or test.is_file():
            missing = test if train.is_file() else train
            raise incomplete(folder, [missing.name])
    return None


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(type, content) of each element."""
    position = 0
    while position < len(data):
        kind, length = struct.unpack_from("<II", data, position)
        if kind >> 16:  # short: length and type share the first word, the data have the second
            kind, length, begin = kind & 0xFFFF, kind >> 16, position + 4
            position += 8
        else:
            begin = position + 8
            position = begin + length + (-length % 8 if kind != _COMPRESSED else 0)
        if begin + length > len(data):
            raise ValueError("it ends in the middle of an array")
        yield kind, data[begin : begin + length]


def _matrix(data: memoryview) -> tuple[str, NDArray[Any]] | None:
    """Name and values, or None for what is not an array of numbers."""
    parts = list(_elements(data))
    if len(parts) < 4 or parts[3][0] not in _DTYPES:
        return None
    _, (_, dimensions), (_, name), (kind, values) = parts[:4]
    array = np.frombuffer(values, dtype="<" + _DTYPES[kind])
    return bytes(name).decode("ascii"), array.reshape(np.frombuffer(dimensions, dtype="<i4"), order="F")


def read_mat_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of numbers in a file, by name."""
    content = path.read_bytes()
    try:
        if len(content) < _HEADER or content[126:128] != b"IM":
            raise ValueError("it has no MATLAB level 5 header")
        arrays = {}
        for kind, data in _elements(memoryview(content)[_HEADER:]):
            if kind == _COMPRESSED:
                kind, data = next(_elements(memoryview(zlib.decompress(data))))
            if kind == _MATRIX and (named := _matrix(data)) is not None:
                arrays[named[0]] = named[1]
        return arrays
    except (ValueError, struct.error, zlib.error, StopIteration) as error:
        raise InputError(f"{path} is truncated or not a MATLAB file: {error}; get it again") from error


register_dataset(
    "svhn",
    DatasetSpec(
        about="SVHN, cropped digits (Netzer et al. 2011)",
        find=find_svhn,
        num_classes=10,
        num_train=73_257,
        num_test=26_032,
        image_size=32,
        balanced=False,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        md5={
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
        downloads=(
            Download(
                url="http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                md5="e26dedcc434d2e4c54c9b2d4a06d8373",
                folder="svhn",
            ),
            Download(
                url="http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                md5="eb5a983be6a315427106f1b164d9cef3",
                folder="svhn",
            ),
        ),
    ),
)
