"""Trees as people really have them: parts in capitals, links, leftovers of systems and editors, folders kept shut."""

import errno
import io
import os
from pathlib import Path

import pytest
from small_files import write_cifar100_binary, write_picture, write_tree
from torchvision.datasets.folder import make_dataset

from nearsight.data import folder_images, list_datasets, load_dataset
from nearsight.data.cache import source_digest
from nearsight.data.decoding import EXTENSIONS
from nearsight.data.image_folder import listed_images, open_tree
from nearsight.data.segmentation import load_segmentation
from nearsight.errors import InputError

CLASSES = ("class0", "class1", "class2")


def labels_of(folder: Path) -> tuple[list[int], list[int]]:
    dataset = load_dataset("image-folder", data_dir=folder, image_size=8)
    assert dataset.classes == CLASSES
    return dataset.train.labels_N.tolist(), dataset.test.labels_N.tolist()


class TestParts:
    @pytest.mark.parametrize(
        "parts", [("Train", "Test"), ("TRAIN", "VAL"), ("training", "validation"), ("Training", "testing")]
    )
    def test_names_in_capitals_and_other_forms(self, data_dir: Path, parts: tuple[str, str]) -> None:
        write_tree(data_dir, parts, per_class=2)
        assert labels_of(data_dir) == ([0, 0, 1, 1, 2, 2],) * 2

    @pytest.mark.parametrize(
        ("parts", "layout"),
        [
            (("train", "val", "test"), "train and val (test not used)"),
            (("Train", "Test", "Validation"), "Train and Validation (Test not used)"),
            (("train", "test"), "train and test"),
        ],
    )
    def test_of_several_test_sets_validation_is_taken_and_that_is_said(
        self, tmp_path: Path, parts: tuple[str, ...], layout: str
    ) -> None:
        write_tree(tmp_path, parts, num_classes=1, per_class=1)
        assert open_tree(tmp_path, 8).layout == f"folder per class, {layout}"

    @pytest.mark.parametrize("parts", [("val", "test"), ("Test",)])
    def test_parts_are_no_classes(self, tmp_path: Path, parts: tuple[str, ...]) -> None:
        write_tree(tmp_path, parts, per_class=1)
        with pytest.raises(InputError, match="names of parts, not of classes"):
            open_tree(tmp_path, 8)

    def test_parts_within_parts_are_no_classes(self, tmp_path: Path) -> None:
        write_tree(tmp_path / "train", ("train", "test"), per_class=1)
        write_tree(tmp_path / "val", ("train", "test"), per_class=1)
        with pytest.raises(InputError, match="train has 'test', 'train', which are names of parts"):
            open_tree(tmp_path, 8)

    def test_one_name_in_two_spellings(self, tmp_path: Path) -> None:
        write_tree(tmp_path, ("train", "Val", "val"), per_class=1)
        with pytest.raises(InputError, match="Val and val differ only in capitals"):
            open_tree(tmp_path, 8)

    def test_the_vehicle_is_a_class(self, tmp_path: Path) -> None:
        for name in ("Bus", "Train"):
            for number in range(5):
                write_picture(tmp_path / name / f"{number}.png")
        assert open_tree(tmp_path, 8).classes == ("Bus", "Train")


class TestLeftovers:
    def test_what_is_hidden_or_left_by_macos_is_no_data(self, data_dir: Path) -> None:
        write_tree(data_dir, (), per_class=5)
        before = listed_images(data_dir)
        write_picture(data_dir / "class0" / ".ipynb_checkpoints" / "0-checkpoint.png")
        write_picture(data_dir / "__MACOSX" / "class0" / "0.png")
        assert labels_of(data_dir) == ([0] * 4 + [1] * 4 + [2] * 4, [0, 1, 2])
        assert listed_images(data_dir) == before

    def test_a_folder_with_the_name_of_a_picture(self, tmp_path: Path) -> None:
        write_picture(tmp_path / "scans.png" / "0.png")
        assert [path.name for path in listed_images(tmp_path)] == ["0.png"]


class TestLinks:
    def test_linked_folders_and_files_are_followed_as_in_torchvision(self, tmp_path: Path) -> None:
        write_tree(tmp_path / "tree", (), per_class=2)
        write_tree(tmp_path / "elsewhere", ("far",), per_class=3)
        (tmp_path / "tree" / "class1" / "more").symlink_to(tmp_path / "elsewhere" / "far" / "class0")
        (tmp_path / "tree" / "class2" / "linked.png").symlink_to(tmp_path / "elsewhere" / "far" / "class1" / "0.png")
        (tmp_path / "tree" / "class3").symlink_to(tmp_path / "elsewhere" / "far" / "class2")
        expected = make_dataset(str(tmp_path / "tree"), extensions=EXTENSIONS)
        assert len(expected) == 6 + 3 + 1 + 3
        assert listed_images(tmp_path / "tree") == sorted(Path(path) for path, _ in expected)
        assert load_dataset("image-folder", data_dir=tmp_path / "tree", image_size=8).num_classes == 4

    def test_a_file_behind_a_link_is_watched(self, tmp_path: Path) -> None:
        write_tree(tmp_path / "tree", (), per_class=2)
        write_picture(tmp_path / "elsewhere" / "0.png")
        (tmp_path / "tree" / "class1" / "more").symlink_to(tmp_path / "elsewhere")
        before = source_digest(open_tree(tmp_path / "tree", 8))
        os.utime(tmp_path / "elsewhere" / "0.png", ns=(1, 1))
        assert source_digest(open_tree(tmp_path / "tree", 8)) != before

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("nowhere.png", r"class0/link is a link to nowhere\.png, which is not there; remove it"),
            ("..", "class0/link leads back to a folder that contains it"),
            (".", "class0/link leads back to a folder that contains it"),
            ("link", "class0/link cannot be read: Too many levels of symbolic links"),
        ],
    )
    def test_links_that_lead_nowhere_or_in_a_circle(self, tmp_path: Path, target: str, message: str) -> None:
        write_tree(tmp_path, (), per_class=2)
        (tmp_path / "class0" / "link").symlink_to(target)
        with pytest.raises(InputError, match=message):
            load_dataset("image-folder", data_dir=tmp_path, image_size=8)


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that may not be read, as for a user who is not root."""
    paths: list[Path] = []

    def guarded(function):
        def call(path=".", *rest, **options):
            if not isinstance(path, int) and Path(os.fsdecode(path)) in paths:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path, *rest, **options)

        return call

    for module, name in ((os, "scandir"), (os, "listdir"), (io, "open")):
        monkeypatch.setattr(module, name, guarded(getattr(module, name)))
    return paths


class TestShut:
    def test_a_folder_below_a_class(self, tmp_path: Path, shut: list[Path]) -> None:
        write_tree(tmp_path, (), per_class=2)
        write_picture(tmp_path / "class1" / "more" / "0.png")
        shut.append(tmp_path / "class1" / "more")
        with pytest.raises(InputError, match="class1/more cannot be read: Permission denied"):
            folder_images(tmp_path)
        with pytest.raises(InputError, match="class1/more cannot be read: Permission denied"):
            load_dataset("image-folder", data_dir=tmp_path, image_size=8)

    @pytest.mark.parametrize("name", ["train.bin", "fine_label_names.txt"])
    def test_a_file_of_a_set(self, data_dir: Path, shut: list[Path], name: str) -> None:
        write_cifar100_binary(data_dir)
        shut.append(data_dir / "cifar-100-binary" / name)
        with pytest.raises(InputError, match=f"{name} cannot be read: Permission denied"):
            load_dataset("cifar100", data_dir=data_dir)

    def test_one_shut_set_does_not_hide_the_others(self, data_dir: Path, shut: list[Path]) -> None:
        write_cifar100_binary(data_dir)
        write_tree(data_dir / "imagenet", num_classes=1, per_class=1)
        voc = data_dir / "voc-small"
        for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
            (voc / folder).mkdir(parents=True)
        for part in ("train", "val"):
            (voc / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("a\n")
        shut += [voc / "JPEGImages", data_dir / "imagenet" / "train"]
        rows = {row.name: row for row in list_datasets(data_dir)}
        assert rows["cifar100"].state == "present"
        assert rows["voc-small"].detail == f"{voc / 'JPEGImages'} cannot be read: Permission denied"
        assert rows["imagenet"].detail == f"{data_dir / 'imagenet' / 'train'} cannot be read: Permission denied"
        with pytest.raises(InputError, match="JPEGImages cannot be read: Permission denied"):
            load_segmentation("voc-small", data_dir)
