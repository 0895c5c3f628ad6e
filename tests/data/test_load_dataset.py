"""From a name to images: places, subsets, fingerprints and refusals."""

import os
import pwd
from pathlib import Path

import pytest
import torch
from small_files import (
    write_cifar10_binary,
    write_cifar100_binary,
    write_cifar100_python,
    write_tiny_imagenet,
    write_tree,
)

from nearsight.data import (
    DATASETS,
    Dataset,
    DatasetSpec,
    ImageSet,
    data_folder,
    list_datasets,
    load_dataset,
    register_dataset,
)
from nearsight.data.segmentation import SEGMENTATION_SETS, register_segmentation
from nearsight.errors import InputError


def test_registries() -> None:
    assert list(DATASETS) == [
        *("shapes", "cifar100-sample", "cifar10", "cifar100", "tiny-imagenet", "svhn"),
        *("imagenette", "mini-imagenet", "imagenet", "image-folder"),
    ], "the order in which they are listed"
    assert list(SEGMENTATION_SETS) == ["ade20k", "pascal-context", "coco-stuff", "voc2012", "camvid", "voc-small"]
    with pytest.raises(ValueError, match="there is a data set 'svhn' already"):
        register_dataset("svhn", DATASETS["svhn"])
    with pytest.raises(ValueError, match="there is a data set 'camvid' already"):
        register_segmentation("camvid", SEGMENTATION_SETS["camvid"])


def test_the_test_images_alone(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    for name, options in (("shapes", {"num_test": 4}), ("cifar100", {"data_dir": data_dir, "verify": False})):
        whole, alone = (load_dataset(name, num_train=num, **options) for num in (2, 0))  # type: ignore[arg-type]
        assert (len(whole.train), len(alone.train)) == (2, 0)
        assert torch.equal(alone.test.images_NCHW, whole.test.images_NCHW)
        assert alone.fingerprint != whole.fingerprint


def test_a_set_that_somebody_else_draws(tmp_path: Path) -> None:
    def draw(num_images: int, *, image_size: int, split: str) -> ImageSet:
        images_NCHW = torch.full((num_images, 3, image_size, image_size), len(split), dtype=torch.uint8)
        return ImageSet(images_NCHW, torch.arange(num_images) % 2)

    grey = {"about": "grey", "find": None, "image_size": 8, "mean": (0.5,) * 3, "std": (0.1,) * 3}
    with pytest.raises(ValueError, match="'grey' is neither found nor drawn"):
        register_dataset("grey", DatasetSpec(**grey))
    register_dataset("grey", DatasetSpec(**grey, draw=draw, classes=("a", "b"), num_train=6, num_test=4))
    dataset, listed = load_dataset("grey"), list_datasets(tmp_path)
    del DATASETS["grey"]
    assert (dataset.classes, len(dataset.train), len(dataset.test)) == (("a", "b"), 6, 4)
    assert (dataset.train.images_NCHW == 5).all()
    assert (dataset.test.images_NCHW == 4).all()
    assert next(each.state for each in listed if each.name == "grey") == "built in"


def test_the_embedded_set_needs_nothing() -> None:
    dataset = load_dataset("shapes", num_train=30, num_test=20, image_size=64)
    assert (len(dataset.train), len(dataset.test)) == (30, 20)
    assert dataset.image_size == (64, 64)
    assert not torch.equal(dataset.train.images_NCHW[:20], dataset.test.images_NCHW)


def test_fingerprints_tell_contents_apart() -> None:
    options = [{}, {"num_train": 40}, {"num_test": 30}, {"image_size": 64}]
    prints = [load_dataset("shapes", **({"num_train": 30, "num_test": 20} | option)).fingerprint for option in options]
    assert len(set(prints)) == 4
    assert prints[0] == load_dataset("shapes", num_train=30, num_test=20).fingerprint
    assert all(len(value) == 64 for value in prints)


def test_the_layout_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    write_cifar100_binary(tmp_path / "b")
    write_cifar100_python(tmp_path / "p")
    binary, python = (load_dataset("cifar100", data_dir=tmp_path / name, verify=False) for name in "bp")
    assert binary.fingerprint == python.fingerprint


def test_a_subset_is_balanced_and_always_the_same(data_dir: Path) -> None:
    write_cifar100_binary(data_dir, num_train=400)
    first, second = (load_dataset("cifar100", data_dir=data_dir, num_train=200, verify=False) for _ in range(2))
    whole = load_dataset("cifar100", data_dir=data_dir, verify=False)
    assert torch.bincount(first.train.labels_N).tolist() == [2] * 100
    assert torch.equal(first.train.images_NCHW, second.train.images_NCHW)
    assert first.fingerprint == second.fingerprint != whole.fingerprint


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tiny-imagenet", "image-folder"])
def test_every_family_loads_by_name(data_dir: Path, name: str) -> None:
    if name == "image-folder":
        write_tree(data_dir)
    else:
        writers = {
            "cifar10": write_cifar10_binary,
            "cifar100": write_cifar100_binary,
            "tiny-imagenet": write_tiny_imagenet,
        }
        writers[name](data_dir)
    dataset = load_dataset(name, data_dir=data_dir, verify=False)
    size = DATASETS[name].image_size
    assert dataset.train.images_NCHW.shape[1:] == (3, size, size)
    assert dataset.train.images_NCHW.dtype == torch.uint8
    assert dataset.mean == DATASETS[name].mean


@pytest.mark.parametrize("folder", ["imagenet", "mini-imagenet", "imagenette2-320"])
def test_trees_are_found_by_name_and_resized(data_dir: Path, folder: str) -> None:
    write_tree(data_dir / folder)
    dataset = load_dataset(folder.removesuffix("2-320"), data_dir=data_dir, image_size=16)
    assert dataset.test.images_NCHW.shape == (15, 3, 16, 16)


class TestPlaces:
    def test_the_argument_comes_before_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other = tmp_path / "one", tmp_path / "other"
        one.mkdir()
        other.mkdir()
        monkeypatch.setenv("NEARSIGHT_DATA", str(other))
        assert data_folder(one) == one
        assert data_folder() == other

    def test_without_either_it_is_the_cache_folder(self, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert data_folder() == cache_home / "nearsight" / "data"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/someone")
        assert data_folder() == Path("/home/someone/.cache/nearsight/data")

    def test_nobody_s_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for variable in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(variable)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
        with pytest.raises(InputError, match=r"no home folder is known for ~/\.cache; set HOME or XDG_CACHE_HOME"):
            data_folder()
        with pytest.raises(InputError, match="no home folder is known for ~nobody-of-that-name/data"):
            data_folder(Path("~nobody-of-that-name/data"))

    @pytest.mark.parametrize("where", ["data folder", "link to one", "class"])
    def test_names_that_cannot_be_written_down(self, tmp_path: Path, where: str) -> None:
        strange = os.fsdecode(b"b\xff")
        folder = tmp_path / (strange if where != "class" else "tree")
        try:
            write_tree(folder, (), num_classes=2)
            if where == "class":
                (folder / "class0").rename(folder / strange)
        except OSError:
            pytest.skip("this file system takes no such names")
        if where == "link to one":
            (tmp_path / "link").symlink_to(folder)
            folder = tmp_path / "link"
        with pytest.raises(InputError, match=r"b\\udcff has a name that is not UTF-8; rename it, or use another"):
            load_dataset("image-folder", data_dir=folder)

    def test_a_folder_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match="is not there; correct --data-dir"):
            data_folder(tmp_path / "nowhere")
        (tmp_path / "file").touch()
        monkeypatch.setenv("NEARSIGHT_DATA", str(tmp_path / "file"))
        with pytest.raises(InputError, match="is a file, not a folder; correct NEARSIGHT_DATA"):
            data_folder()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar1000", {}, "'cifar1000' is not a known data set; did you mean 'cifar100'"),
        ("shapes", {"num_train": -1}, "num_train is -1, but must be at least 0"),
        ("cifar100-sample", {}, "cifar100-sample has no training images"),
        ("cifar100-sample", {"num_train": 10}, "cifar100-sample has no training images"),
        ("shapes", {"num_test": -1}, "num_test is -1"),
        ("shapes", {"image_size": 48}, "32 or 64"),
        ("svhn", {"image_size": 64}, "svhn images are 32×32"),
        ("cifar100", {}, "cifar100 is not in .*nearsight data fetch cifar100"),
        ("imagenet", {}, "imagenet is not in .*put it there"),
    ],
)
def test_bad_input(data_dir: Path, name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_dataset(name, data_dir=data_dir, **options)


def test_more_images_than_there_are(data_dir: Path) -> None:
    write_cifar10_binary(data_dir)
    with pytest.raises(InputError, match="51 training images of cifar10 were asked for, but it has 50"):
        load_dataset("cifar10", data_dir=data_dir, num_train=51, verify=False)


def test_files_that_differ_from_the_published_ones_are_refused(data_dir: Path, cache_home: Path) -> None:
    write_cifar100_binary(data_dir)
    load_dataset("cifar100", data_dir=data_dir, verify=False)  # must not open a back door for the next line
    with pytest.raises(
        InputError, match=r"train\.bin is damaged or was changed: its md5 is [0-9a-f]{32}, but 6172c7755cfe09b2fe270c85"
    ):
        load_dataset("cifar100", data_dir=data_dir)


class TestTypes:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    labels = torch.arange(4)

    @pytest.mark.parametrize(
        ("images", "labels", "message"),
        [
            (images.float(), labels, "uint8"),
            (images[0], labels, "uint8"),
            (images, labels.int(), "int64"),
            (images, labels[:3], "4 images need"),
        ],
    )
    def test_an_image_set_checks_its_tensors(self, images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
        with pytest.raises(InputError, match=message):
            ImageSet(images, labels)

    def test_a_dataset_checks_labels_and_size(self) -> None:
        part = ImageSet(self.images, self.labels)
        fields = {"name": "x", "mean": (0.5,) * 3, "std": (0.5,) * 3, "train": part, "test": part, "fingerprint": ""}
        assert Dataset(classes=tuple("abcd"), image_size=(8, 8), **fields).num_classes == 4
        with pytest.raises(InputError, match="x train: image 3 has label 3, but 3 classes have labels 0 to 2"):
            Dataset(classes=tuple("abc"), image_size=(8, 8), **fields)
        with pytest.raises(InputError, match=r"\[3, 16, 16\] is needed"):
            Dataset(classes=tuple("abcd"), image_size=(16, 16), **fields)
