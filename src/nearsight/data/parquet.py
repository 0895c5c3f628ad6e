"""Image classification sets as the Hugging Face hub stores them: parquet files with an image and a label column.

Shape suffix: N images of a file.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from nearsight.data.dataset import check_label_range
from nearsight.data.decoding import CHUNK, decode_batches, is_image_name
from nearsight.data.image_folder import TEST_NAMES, TRAIN_NAMES, unused_parts
from nearsight.data.locations import is_hidden
from nearsight.data.registry import Chunk, Source
from nearsight.errors import InputError
from nearsight.lazy import torch

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_NUMBERED = re.compile(r"(?P<name>.+?-)(?P<number>\d+)-of-(?P<num>\d+)")
"""`train-00000-of-00002` and, from older times, a digest after it."""


def require(module: str, purpose: str, *, extra: str = "data") -> Any:
    """Import an optional library, or say how to get it."""
    try:
        imported: ModuleType = importlib.import_module(module)
    except ImportError as error:
        library = module.split(".")[0]
        raise InputError(f"{library} is needed {purpose}; install it with: pip install 'nearsight[{extra}]'") from error
    return imported


def files_below(folder: Path, ending: str, *, is_top: bool = True) -> list[Path]:
    """The files with this ending below a folder.

    A folder with a picture in it is a class of a tree, and the rest of its pictures is not listed: ImageNet has a
    million. At the top, a picture may illustrate the set's description.
    """
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_top and is_image_name(entry.name):
                return []
            if entry.name.endswith(ending) and not is_hidden(entry.name):
                files.append(Path(entry.path))
            elif entry.is_dir(follow_symlinks=False) and not is_hidden(entry.name):
                folders.append(Path(entry.path))
    return files + [file for below in folders for file in files_below(below, ending, is_top=False)]


def _parts(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Files by the part of the set that they belong to, in order."""
    parts: dict[str, tuple[Path, ...]] = {}
    for path in sorted(files_below(folder, ".parquet")):
        name = path.name.split("-")[0].split(".")[0].lower()
        parts[name] = (*parts.get(name, ()), path)
    return parts


def _check_complete(files: tuple[Path, ...]) -> None:
    """Files say how many they are: `train-00000-of-00002.parquet`."""
    present: dict[tuple[Path, str, int], set[int]] = {}
    for path in files:
        if found := _NUMBERED.match(path.name):
            present.setdefault((path.parent, found["name"], int(found["num"])), set()).add(int(found["number"]))
    for (folder, name, num), numbers in present.items():
        num_missing = num - len(numbers)
        if num_missing > 0:
            first = next(number for number in range(num) if number not in numbers)
            more = f" and {num_missing - 1} more" if num_missing > 1 else ""
            raise InputError(
                f"{folder} is not complete: {name}{first:05}-of-{num:05}.parquet{more} missing; get it again"
            )


def _column(path: Path, names: list[str], wanted: tuple[str, ...]) -> str:
    for name in wanted:
        if name in names:
            return name
    raise InputError(f"{path} has the columns {', '.join(names)}, but one named {' or '.join(wanted)} is needed")


def _open(path: Path) -> Any:
    parquet = require("pyarrow.parquet", f"to read {path.name}")
    with _naming(path):
        return parquet.ParquetFile(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors about a file name it."""
    try:
        yield
    except InputError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"{path} cannot be read: {os.strerror(error.errno) if error.errno else error}") from error
    except Exception as error:  # pyarrow reports damage as OSError, too
        raise InputError(f"{path} is truncated or not a parquet file: {error}; get it again") from error


def _class_names(path: Path) -> tuple[str, ...]:
    """From the hub's own record in the file, which is where label numbers get their names."""
    schema = _open(path).schema_arrow
    label = _column(path, schema.names, _LABEL_COLUMNS)
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} does not say the names of its classes, as files of the hub do") from error
    return tuple(map(str, names))


def _read(paths: tuple[Path, ...], num_classes: int, size: int) -> Iterator[Chunk]:
    for path in paths:
        file = _open(path)
        image, label = (_column(path, file.schema_arrow.names, names) for names in (_IMAGE_COLUMNS, _LABEL_COLUMNS))
        labels = _labels(path, file, label, num_classes)
        yield from decode_batches(path, _batches(path, file, image, labels), size)


def _labels(path: Path, file: Any, column: str, num_classes: int) -> list[int]:
    """All labels of a file, which are small: an error names the label by its number in the file."""
    with _naming(path):
        labels: list[Any] = file.read(columns=[column]).column(column).to_pylist()
    wrong = [number for number, label in enumerate(labels) if not isinstance(label, int)]
    if wrong:
        raise InputError(
            f"{path}: image {wrong[0]} has the label {labels[wrong[0]]!r}, but whole numbers are needed "
            f"({len(wrong)} wrong in all)"
        )
    with _naming(path):  # numbers of more than 64 bits
        labels_N = torch.tensor(labels, dtype=torch.int64)
    check_label_range(str(path), labels_N, num_classes)
    return labels


def _batches(path: Path, file: Any, column: str, labels: list[int]) -> Iterator[tuple[list[bytes | None], list[int]]]:
    """Some pictures and their labels at a time; a picture that is not in the file is None."""
    begin = 0
    with _naming(path):
        for batch in file.iter_batches(batch_size=CHUNK, columns=[column]):
            rows = batch.column(0).to_pylist()
            contents = (row.get("bytes") if isinstance(row, dict) else None for row in rows)
            # Bytes only: a text would be taken for the path of some file of this machine.
            pictures = [content if isinstance(content, bytes) else None for content in contents]
            yield pictures, labels[begin : begin + len(rows)]
            begin += len(rows)


def open_parquet(folder: Path, image_size: int) -> Source | None:
    """The set in a folder, or None when there are no parquet files."""
    parts = _parts(folder)
    train_name, test_name = (
        next((name for name in names if name in parts), None) for names in (TRAIN_NAMES, TEST_NAMES)
    )
    if train_name is None and test_name is None:
        return None
    if train_name is None or test_name is None:
        only = "test" if train_name is None else "train"
        raise InputError(f"{folder} has parquet files for {only} only; get the others as well")
    train, test = parts[train_name], parts[test_name]
    for files in (train, test):
        _check_complete(files)
    classes = _class_names(train[0])
    return Source(
        folder=folder,
        layout=f"Hugging Face parquet, {train_name} and {test_name}" + unused_parts(test_name, parts),
        files=(*train, *test),
        classes=classes,
        train=lambda: _read(train, len(classes), image_size),
        test=lambda: _read(test, len(classes), image_size),
    )
