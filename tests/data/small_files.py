"""Small files in the official layouts, so that every reader is tested on every machine."""

import io
import json
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

NUM_PIXELS = 3 * 32 * 32


def pixels(num: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random images [num, 3, 32, 32]."""
    return np.random.default_rng(seed).integers(0, 256, (num, 3, 32, 32), dtype=np.uint8)


def write_cifar10_binary(data_dir: Path, per_file: int = 10) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Five batches and a test batch; labels count round. Returns all training images and the test images."""
    folder = data_dir / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    images = pixels(6 * per_file)
    labels = np.arange(per_file, dtype=np.uint8) % 10
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for number, name in enumerate(names):
        of_file = images[number * per_file : (number + 1) * per_file].reshape(per_file, NUM_PIXELS)
        (folder / name).write_bytes(np.concatenate([labels[:, None], of_file], axis=1).tobytes())
    (folder / "batches.meta.txt").write_text("".join(f"class{number}\n" for number in range(10)) + "\n")
    return images[: 5 * per_file], images[5 * per_file :]


def write_cifar100_binary(data_dir: Path, num_train: int = 200, num_test: int = 100) -> NDArray[np.uint8]:
    """Returns the training images. The coarse label is 19 everywhere, so that reading it by mistake shows."""
    folder = data_dir / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, num in (("train.bin", num_train), ("test.bin", num_test)):
        labels = np.stack([np.full(num, 19), np.arange(num) % 100], axis=1).astype(np.uint8)
        records = np.concatenate([labels, pixels(num, seed=num).reshape(num, NUM_PIXELS)], axis=1)
        (folder / name).write_bytes(records.tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{number}" for number in range(100)))
    return pixels(num_train, seed=num_train)


def write_cifar100_python(data_dir: Path, num_train: int = 200, num_test: int = 100) -> None:
    """The same content as `write_cifar100_binary`, pickled as Python 2 did: bytes keys, protocol 2."""
    folder = data_dir / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, num in (("train", num_train), ("test", num_test)):
        content = {
            b"data": pixels(num, seed=num).reshape(num, NUM_PIXELS),
            b"fine_labels": [number % 100 for number in range(num)],
            b"coarse_labels": [19] * num,
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = {b"fine_label_names": [f"class{number}" for number in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))


def write_picture(path: Path, seed: int = 0, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> None:
    """A smooth picture (JPEG keeps those nearly exact); `size` is width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(path, quality=95)


def write_tiny_imagenet(data_dir: Path, num_classes: int = 3, per_class: int = 4) -> None:
    """The first training picture and the first validation picture are grey, as 1.8 % of the real ones are."""
    folder = data_dir / "tiny-imagenet-200"
    wnids = [f"n0000000{number}" for number in range(num_classes)][::-1]  # the official order is not alphabetical
    for label, wnid in enumerate(wnids):
        for number in range(per_class):
            mode = "L" if label == number == 0 else "RGB"
            write_picture(folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", 100 * label + number, mode=mode)
    lines = []
    for number in range(num_classes * 2):
        write_picture(
            folder / "val" / "images" / f"val_{number}.JPEG", 1000 + number, mode="L" if number == 0 else "RGB"
        )
        lines.append(f"val_{number}.JPEG\t{wnids[number % num_classes]}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(wnids))
    (folder / "words.txt").write_text("".join(f"{wnid}\tname {wnid[-1]}, other name\n" for wnid in wnids))


def write_tree(
    folder: Path, parts: tuple[str, ...] = ("train", "val"), num_classes: int = 3, per_class: int = 5
) -> None:
    """A folder per class, pictures of several sizes; with no parts, classes lie right below the folder."""
    for part in parts or ("",):
        for label in range(num_classes):
            for number in range(per_class):
                size = (40 + 10 * number, 60)
                write_picture(folder / part / f"class{label}" / f"{number}.png", 10 * label + number, size)


def mat_element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def mat_file(arrays: dict[str, NDArray[np.uint8]], *, compressed: bool = True) -> bytes:
    """A MATLAB level 5 file of uint8 arrays."""
    content = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    for name, array in arrays.items():
        matrix = mat_element(
            14,
            mat_element(6, struct.pack("<II", 9, 0))
            + mat_element(5, struct.pack(f"<{array.ndim}i", *array.shape))
            # A name of up to four letters sits in the tag itself.
            + struct.pack("<I", len(name) << 16 | 1)
            + name.encode().ljust(4, b"\0")
            + mat_element(2, array.tobytes(order="F")),
        )
        if compressed:
            squeezed = zlib.compress(matrix)
            matrix = struct.pack("<II", 15, len(squeezed)) + squeezed
        content += matrix
    return content


def write_svhn(data_dir: Path, num: int = 20, *, compressed: bool = True) -> NDArray[np.uint8]:
    """Digits 1 to 10 round and round, as published: 10 stands for 0. Returns the images of both files."""
    folder = data_dir / "svhn"
    folder.mkdir(parents=True)
    digits = (np.arange(num, dtype=np.uint8) % 10 + 1).reshape(-1, 1)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        images = {"X": pixels(num).transpose(2, 3, 1, 0), "y": digits}
        (folder / name).write_bytes(mat_file(images, compressed=compressed))
    return pixels(num)


def png(value: int) -> bytes:
    """The content of a file of one colour."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(
    path: Path, labels: list[int | None], *, names: bool = True, image: str = "image", pictures: list | None = None
) -> None:
    """A file as the hub writes them, with three classes; `pictures` are the rows of the image column."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'nearsight[data]'")
    files = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.table(
        {
            image: pictures or [{"bytes": png(10 * (label or 0)), "path": None} for label in labels],
            "label": labels,
        }
    )
    features = {"label": {"names": ["zero", "one", "two"], "_type": "ClassLabel"}} if names else {}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    files.write_table(table.replace_schema_metadata(metadata), path)
