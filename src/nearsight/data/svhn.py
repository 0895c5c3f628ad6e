"""SVHN (Netzer et al. 2011), format 2: 32×32 crops in two `.mat` files. There the digit 0 has label 10."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from nearsight.data.dataset import check_label_range
from nearsight.data.matfile import read_mat_arrays
from nearsight.data.source import Chunk, Source
from nearsight.errors import InputError

FILES = ("train_32x32.mat", "test_32x32.mat")


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
        train, test = (folder / name for name in FILES)
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
            raise InputError(f"{folder} is not complete: {missing.name} missing; get it again")
    return None
