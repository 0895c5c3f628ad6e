"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), in the binary and in the python version, as published.

Binary: records of one (CIFAR-10) or two (CIFAR-100: coarse, fine) label bytes and 3,072 pixel bytes, planes R, G, B.
Python: pickled dictionaries with the same pixels as a [N, 3072] array and the labels as a list.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearsight.data.dataset import check_label_range
from nearsight.data.locations import read_published
from nearsight.data.registry import Chunk, DatasetSpec, Download, Source, register_dataset
from nearsight.errors import InputError
from nearsight.files import reading
from nearsight.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
            f"{path} is truncated or not a CIFAR file: it has {len(content)} bytes, "
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


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),  # numpy 1 and before
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes in protocol 2
}


class _ArraysOnly(pickle.Unpickler):
    """A pickle can call any function it names. These need three, which rebuild numpy arrays; all others are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which array files never need")
        if name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # in whichever module this numpy has it
        return super().find_class(module, name)


def _check_places(stored: bytes) -> None:
    """Refuse a memo index far beyond all others: memory is allocated for all before it, too."""
    for operation, argument, _ in pickletools.genops(stored):
        if operation.name.endswith("PUT") and int(argument or 0) > len(stored):
            raise pickle.UnpicklingError(f"it has a place {argument}, but {len(stored)} bytes")


def read_pickled_arrays(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR batch file."""
    try:
        # From memory: a file would allocate whatever size the pickle claims before it is known how much there is.
        stored = path.read_bytes()
        _check_places(stored)
        # latin1 maps bytes to code points one to one; the files were written by Python 2.
        content = _ArraysOnly(io.BytesIO(stored), encoding="latin1").load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InputError(f"{path} is not a CIFAR batch file: {error or type(error).__name__}; get it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a CIFAR batch file: it holds a {type(content).__name__}; get it again")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in content.items()}


register_dataset(
    "cifar10",
    DatasetSpec(
        about="CIFAR-10 (Krizhevsky 2009)",
        find=find_cifar10,
        num_classes=10,
        num_train=50_000,
        num_test=10_000,
        image_size=32,
        other_sizes=True,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        md5={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
            "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
        },
        downloads=(
            Download(
                url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                md5="c58f30108f718f92721af3b95e74349a",
                folder="cifar-10-batches-py",
            ),
        ),
    ),
)
register_dataset(
    "cifar100",
    DatasetSpec(
        about="CIFAR-100 (Krizhevsky 2009), the 100 fine classes",
        find=find_cifar100,
        num_classes=100,
        num_train=50_000,
        num_test=10_000,
        image_size=32,
        other_sizes=True,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        md5={
            "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
            "test.bin": "4499cfba6c016c1be1438163640a0898",
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
            "meta": "7973b15100ade9c7d40fb424638fde48",
        },
        downloads=(
            Download(
                url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                md5="eb9058c3a382ffc7106e4002c42a8d85",
                folder="cifar-100-python",
            ),
        ),
    ),
)
