"""The images that come with the package: which they are, that they can only be looked at, and what the sheet is."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import nearsight
from nearsight.cli import main
from nearsight.data import Dataset, check_dataset, list_datasets, load_dataset
from nearsight.data.cifar100_sample import CLASSES, FILE, PER_ROW, SIZE, sample_images
from nearsight.errors import InputError


def make_sheet(cifar100: Dataset) -> Image.Image:
    """The picture as it was made: `make_sheet(load_dataset("cifar100")).save(FILE, optimize=True)`."""
    labels = cifar100.test.labels_N
    places = [int((labels == label).nonzero()[number]) for number in range(2) for label in range(cifar100.num_classes)]
    rows = -(-len(places) // PER_ROW)
    sheet = Image.new("RGB", (PER_ROW * SIZE, rows * SIZE))
    for number, place in enumerate(places):
        image = Image.fromarray(cifar100.test.images_NCHW[place].permute(1, 2, 0).numpy())
        sheet.paste(image, (number % PER_ROW * SIZE, number // PER_ROW * SIZE))
    return sheet


@pytest.mark.parametrize("real_folder", ["cifar-100-binary"], indirect=True)
def test_they_are_the_first_two_of_each_class_of_the_test_file(real_folder: Path) -> None:
    cifar100 = load_dataset("cifar100", data_dir=real_folder)
    assert make_sheet(cifar100).tobytes() == Image.open(FILE).tobytes()
    sample = load_dataset("cifar100-sample", num_train=0)
    assert sample.classes == cifar100.classes
    assert (sample.mean, sample.std) == (cifar100.mean, cifar100.std)
    for label in range(100):
        of_class = cifar100.test.images_NCHW[cifar100.test.labels_N == label]
        assert torch.equal(sample.test.images_NCHW[sample.test.labels_N == label], of_class[:2])


def test_they_are_small_balanced_and_always_the_same() -> None:
    assert FILE.stat().st_size < 1_000_000
    assert load_dataset("cifar100-sample", num_train=0).fingerprint == (
        "aad6d7fa401822342c2f1145e3e103845a6be960af42b9dd3bf764025d1fcb54"
    )
    assert len(set(CLASSES)) == 100
    few = load_dataset("cifar100-sample", num_train=0, num_test=100)
    assert few.test.labels_N.tolist() == list(range(100))
    with pytest.raises(InputError, match="201 test images of cifar100-sample were asked for, but it has 200"):
        load_dataset("cifar100-sample", num_train=0, num_test=201)


def test_they_are_normalised_by_the_numbers_of_cifar100() -> None:
    images, labels = nearsight.sample_images()
    assert images.dtype == torch.float32
    assert labels.bincount().tolist() == [2] * 100
    dataset = load_dataset("cifar100-sample", num_train=0)
    for channel, (mean, std) in enumerate(zip(dataset.mean, dataset.std, strict=True)):
        pixels = images[:, channel].double() * std + mean
        expected = dataset.test.images_NCHW[:, channel].double() / 255
        torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-6)
    assert torch.equal(sample_images()[0], images)


def test_they_are_listed_and_checked(capsys: pytest.CaptureFixture[str], data_dir: Path) -> None:
    (listed,) = (row for row in list_datasets(data_dir) if row.name == "cifar100-sample")
    assert (listed.state, listed.detail) == ("built in", "always there")
    report = check_dataset("cifar100-sample")
    assert report.ok
    found = {finding.what: finding.detail for finding in report.findings}
    assert (found["training images"], found["test images"], found["test class balance"]) == ("0", "200", "2 per class")
    assert main(["data", "list", "--data-dir", str(data_dir)]) == 0
    assert "cifar100-sample" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "compact-shapes", "--data.name", "cifar100-sample"],
        ["probe", "knn", "compact_vit", "--data", "cifar100-sample"],
    ],
)
def test_nothing_is_trained_on_them(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith(
        "cifar100-sample has no training images, only test images to look at models with; name another set"
    )
    assert not list(tmp_path.rglob("*.safetensors"))
