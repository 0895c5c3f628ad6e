"""Image classification sets as the Hugging Face hub stores them: parquet files with an image and a label column."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearsight.data.dataset import check_label_range
from nearsight.data.decoding import decode
from nearsight.data.extras import require
from nearsight.data.source import Chunk, Source
from nearsight.errors import InputError

_TEST_NAMES = ("test", "validation", "valid", "val")
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_ROWS = 2_048


def _parts(folder: Path, name: str) -> tuple[Path, ...]:
    """`train-00000-of-00002.parquet` and the like, wherever below the folder they are, in order."""
    return tuple(sorted(path for path in folder.rglob("*.parquet") if path.name.split("-")[0].split(".")[0] == name))


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
    """What is wrong with a file names it."""
    try:
        yield
    except (InputError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # pyarrow reports damage as OSError, too
        raise InputError(f"{path} is truncated or no parquet file: {error}; get it again") from error


def _class_names(path: Path) -> tuple[str, ...]:
    """From the hub's own record in the file, which is where label numbers get their names."""
    schema = _open(path).schema_arrow
    label = _column(path, schema.names, _LABEL_COLUMNS)
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} does not say the names of its classes, as files of the hub do") from error
    return tuple(map(str, names))


def _read(folder: Path, paths: tuple[Path, ...], num_classes: int, size: int) -> Iterator[Chunk]:
    for path in paths:
        file = _open(path)
        image, label = (_column(path, file.schema_arrow.names, names) for names in (_IMAGE_COLUMNS, _LABEL_COLUMNS))
        for pictures, labels_n in _rows(path, file, image, label):
            check_label_range(str(path), torch.from_numpy(labels_n), num_classes)
            yield from decode(path, pictures, labels_n.tolist(), size)


def _rows(path: Path, file: Any, image: str, label: str) -> Iterator[tuple[list[bytes], NDArray[np.int64]]]:
    """Some pictures and their labels at a time."""
    with _naming(path):
        for batch in file.iter_batches(batch_size=_ROWS, columns=[image, label]):
            labels_n = np.asarray(batch.column(label).to_pylist(), dtype=np.int64)
            yield [row["bytes"] for row in batch.column(image).to_pylist()], labels_n


def open_parquet(folder: Path, image_size: int) -> Source | None:
    """The set in a folder, or None when there are no parquet files."""
    train = _parts(folder, "train")
    test = next((parts for name in _TEST_NAMES if (parts := _parts(folder, name))), ())
    if not train and not test:
        return None
    if not train or not test:
        raise InputError(f"{folder} has parquet files for {'test' if test else 'train'} alone; get the others as well")
    classes = _class_names(train[0])
    return Source(
        folder=folder,
        layout="Hugging Face parquet",
        files=(*train, *test),
        classes=classes,
        train=lambda: _read(folder, train, len(classes), image_size),
        test=lambda: _read(folder, test, len(classes), image_size),
    )
