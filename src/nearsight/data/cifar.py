"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), in the binary and in the python version, as published.

Binary: records of one (CIFAR-10) or two (CIFAR-100: coarse, fine) label bytes and 3,072 pixel bytes, planes R, G, B.
Python: pickled dictionaries with the same pixels as a [N, 3072] array and the labels as a list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearsight.data.dataset import check_label_range
from nearsight.data.pickled import read_pickled_arrays
from nearsight.data.source import Chunk, Source
from nearsight.data.texts import read_published
from nearsight.errors import InputError
from nearsight.files import reading

_SIZE = 32
_NUM_PIXELS = 3 * _SIZE * _SIZE
_NUM_RESIZED = 512  # at a time: all training images at 224 pixels are 7.5 GB


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a version keeps what."""

    version: str
    """"binary" or "python"."""
    folder: str
    """Folder below the data folder."""
    train: tuple[str, ...]
    """Files of the training set, in order."""
    test: str
    """File of the test set."""
    names: str
    """File of the class names."""
    num_classes: int
    """How many names that file has."""
    label_at: int = 0
    """Binary: which label byte of a record is the class."""
    label_key: str = "labels"
    """Python: which entry is the class."""
    names_key: str = "label_names"
    """Python: which entry of the names file lists the classes."""


CIFAR10 = (
    Layout(
        version="binary",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test="test_batch.bin",
        names="batches.meta.txt",
        num_classes=10,
    ),
    Layout(
        version="python",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test="test_batch",
        names="batches.meta",
        num_classes=10,
    ),
)
CIFAR100 = (
    Layout(
        version="binary",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        names="fine_label_names.txt",
        num_classes=100,
        label_at=1,
    ),
    Layout(
        version="python",
        folder="cifar-100-python",
        train=("train",),
        test="test",
        names="meta",
        num_classes=100,
        label_key="fine_labels",
        names_key="fine_label_names",
    ),
)


def _read_binary(path: Path, layout: Layout) -> Chunk:
    # CIFAR-10 records begin with one label byte, CIFAR-100 records with two: the class is the last.
    record = layout.label_at + 1 + _NUM_PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % record:
        raise InputError(
            f"{path} is truncated or no CIFAR file: it has {len(content)} bytes, "
            f"but a whole number of {record}-byte records is expected; get it again"
        )
    records = content.reshape(-1, record)
    return records[:, -_NUM_PIXELS:].reshape(-1, 3, 32, 32), records[:, layout.label_at].astype(np.int64)


def _read_python(path: Path, layout: Layout) -> Chunk:
    content = read_pickled_arrays(path)
    pixels, labels = content.get("data"), content.get(layout.label_key)
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (_NUM_PIXELS,)):
        raise InputError(f"{path} has no uint8 array [N, {_NUM_PIXELS}] named 'data'; get it again")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise InputError(f"{path} has no list of {len(pixels)} labels named {layout.label_key!r}; get it again")
    if not all(isinstance(label, int) for label in labels):
        raise InputError(f"{path} has labels that are not whole numbers; get it again")
    return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.int64)


def _read(paths: tuple[Path, ...], layout: Layout, image_size: int) -> Iterator[Chunk]:
    for path in paths:
        images_nCHW, labels_n = (_read_binary if layout.version == "binary" else _read_python)(path, layout)
        check_label_range(str(path), torch.from_numpy(labels_n), layout.num_classes)
        if image_size == _SIZE:
            yield images_nCHW, labels_n
            continue
        for begin in range(0, len(images_nCHW), _NUM_RESIZED):
            some = slice(begin, begin + _NUM_RESIZED)
            yield _resized(images_nCHW[some], image_size), labels_n[some]


def _resized(images_nCHW: NDArray[np.uint8], image_size: int) -> NDArray[np.uint8]:
    """Bicubic, as Pillow does it: how CIFAR is shown to models made for larger pictures."""
    # Here, because it takes a quarter of a second.
    from torchvision.transforms.v2.functional import InterpolationMode, resize

    images, size = torch.from_numpy(images_nCHW.copy()), [image_size, image_size]
    # Enlarging has no use for antialiasing, but without it torch takes another cubic than Pillow.
    resized: NDArray[np.uint8] = resize(images, size, InterpolationMode.BICUBIC, antialias=True).numpy()
    return resized


def _class_names(path: Path, layout: Layout) -> tuple[str, ...]:
    names: Any
    if layout.version == "binary":
        names = read_published(path).split()
    else:
        names = read_pickled_arrays(path).get(layout.names_key)
    if not isinstance(names, list):
        raise InputError(f"{path} has no list named {layout.names_key!r}; get it again")
    if len(names) != layout.num_classes:
        raise InputError(f"{path} has {len(names)} class names, but {layout.num_classes} are expected; get it again")
    return tuple(map(str, names))


def _find(folder: Path, layout: Layout, image_size: int) -> Source:
    train, test, names = tuple(folder / name for name in layout.train), folder / layout.test, folder / layout.names
    files = (*train, test, names)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise InputError(f"{folder} is not complete: {', '.join(missing)} missing; get it again")
    return Source(
        folder=folder,
        layout=f"{layout.version} version",
        files=files,
        classes=_class_names(names, layout),
        train=lambda: _read(train, layout, image_size),
        test=lambda: _read((test,), layout, image_size),
    )


def _find_any(data_dir: Path, layouts: tuple[Layout, ...], image_size: int) -> Source | None:
    """The first version that is complete; the error about the first that is not, if none is."""
    incomplete: list[InputError] = []
    for layout in layouts:
        folder = data_dir / layout.folder
        try:
            with reading(folder):
                if folder.is_dir():
                    return _find(folder, layout, image_size)
        except InputError as error:
            incomplete.append(error)
    if incomplete:
        raise incomplete[0]
    return None


def find_cifar10(data_dir: Path, image_size: int) -> Source | None:
    return _find_any(data_dir, CIFAR10, image_size)


def find_cifar100(data_dir: Path, image_size: int) -> Source | None:
    return _find_any(data_dir, CIFAR100, image_size)
