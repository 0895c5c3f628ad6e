"""The real sets, where there are some: counts, fingerprints, and how fast they open."""

import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from nearsight.data import check_dataset, load_dataset
from nearsight.data.tiny_imagenet import find_tiny_imagenet


def needs(folder: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("real_folder", [folder], indirect=True)


@needs("cifar-100-binary")
def test_cifar100(real_folder: Path) -> None:
    dataset = load_dataset("cifar100", data_dir=real_folder)
    assert dataset.fingerprint == "83726763e67e76c4977d02b2e683ea1db26777d4935e0f468f0c8fffd7b2a9cb"
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (50_000, 10_000, 100)
    assert dataset.classes[int(dataset.train.labels_N[0])] == "cattle"
    values = dataset.train.images_NCHW[:10_000].double() / 255
    assert values.mean((0, 2, 3)).tolist() == pytest.approx(dataset.mean, abs=0.005)
    assert values.std((0, 2, 3)).tolist() == pytest.approx(dataset.std, abs=0.005)
    begin = time.perf_counter()
    load_dataset("cifar100", data_dir=real_folder)
    assert time.perf_counter() - begin < 0.5
    assert check_dataset("cifar100", real_folder).ok


@needs("cifar-10-batches-bin")
def test_cifar10(real_folder: Path) -> None:
    dataset = load_dataset("cifar10", data_dir=real_folder)
    assert dataset.fingerprint == "b5c0f562f3683195ba07a4754250033321bb71cd2b0861c1885f052861bc0e4c"
    assert dataset.classes[int(dataset.test.labels_N[0])] == "cat"
    assert check_dataset("cifar10", real_folder).ok


@needs("tiny-imagenet-200")
def test_tiny_imagenet_reads(real_folder: Path) -> None:
    source = find_tiny_imagenet(real_folder, 64)
    images, labels = (
        torch.cat([torch.from_numpy(chunk[part]) for chunk in islice(source.test(), 4)]) for part in (0, 1)
    )
    assert len(source.classes) == len(set(source.classes)) == 200
    assert images.shape == (2048, 3, 64, 64)
    assert source.classes[int(labels[0])] == "go-kart"
    grey = (images[:, 0] == images[:, 1]).flatten(1).all(1) & (images[:, 1] == images[:, 2]).flatten(1).all(1)
    assert 0.005 < float(grey.double().mean()) < 0.04  # 1.8 % of the JPEGs are grey


@pytest.mark.slow
@needs("tiny-imagenet-200")
def test_all_of_tiny_imagenet(real_folder: Path) -> None:
    dataset = load_dataset("tiny-imagenet", data_dir=real_folder)
    assert dataset.fingerprint == "3ddd0f7d9c4d1e251c820ece688d28b48647d173cf1fff487c4465cb4992eaba"
    assert (len(dataset.train), len(dataset.test)) == (100_000, 10_000)
    begin = time.perf_counter()
    load_dataset("tiny-imagenet", data_dir=real_folder)
    assert time.perf_counter() - begin < 1.0
    assert check_dataset("tiny-imagenet", real_folder).ok
