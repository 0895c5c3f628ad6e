"""Numeric arrays from MATLAB level 5 files: the little of that format which SVHN uses, so that it needs no library.

After a header of 128 bytes come elements: a type, a length and data padded to 8 bytes; up to 4 bytes of data sit in the
tag itself. An array is an element that holds four others: flags, dimensions, name and values, which run column by
column. It may be compressed as a whole. (MathWorks, "MAT-File Format", chapter 1)
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearsight.errors import InputError

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


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
        raise InputError(f"{path} is truncated or no MATLAB file: {error}; get it again") from error
