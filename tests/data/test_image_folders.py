"""Tiny-ImageNet, trees with a folder per class, and plain folders of pictures."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_files import write_picture, write_tiny_imagenet, write_tree

from nearsight.data import folder_images, stratified_split
from nearsight.data.decoding import decode
from nearsight.data.image_folder import open_tree
from nearsight.data.registry import Reader
from nearsight.data.tiny_imagenet import find_tiny_imagenet
from nearsight.errors import InputError


def read_all(read: Reader) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*read(), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def as_array(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).transpose(2, 0, 1)


class TestTinyImageNet:
    def test_training_images_in_the_order_of_wnids(self, data_dir: Path) -> None:
        write_tiny_imagenet(data_dir)
        source = find_tiny_imagenet(data_dir, 64)
        images, labels = read_all(source.train)
        assert source.classes == ("name 2", "name 1", "name 0")
        assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        path = data_dir / "tiny-imagenet-200" / "train" / "n00000001" / "images" / "n00000001_2.JPEG"
        np.testing.assert_array_equal(images[6], as_array(path))

    def test_validation_labels_come_from_the_annotations(self, data_dir: Path) -> None:
        write_tiny_imagenet(data_dir)
        images, labels = read_all(find_tiny_imagenet(data_dir, 64).test)
        assert labels.tolist() == [0, 1, 2, 0, 1, 2]
        path = data_dir / "tiny-imagenet-200" / "val" / "images" / "val_4.JPEG"
        np.testing.assert_array_equal(images[4], as_array(path))

    def test_grey_pictures_become_rgb(self, data_dir: Path) -> None:
        write_tiny_imagenet(data_dir)
        source = find_tiny_imagenet(data_dir, 64)
        for read in (source.train, source.test):
            grey, coloured = read_all(read)[0][:2]
            assert grey.shape == (3, 64, 64)
            assert (grey[0] == grey[1]).all()
            assert (coloured[0] != coloured[1]).any()

    def test_classes_of_one_name_stay_apart(self, data_dir: Path) -> None:
        write_tiny_imagenet(data_dir)
        (data_dir / "tiny-imagenet-200" / "words.txt").write_text("n00000002\tcrane\nn00000000\tcrane, bird\n")
        assert find_tiny_imagenet(data_dir, 64).classes == ("crane (n00000002)", "n00000001", "crane (n00000000)")

    def test_absent_and_incomplete(self, data_dir: Path) -> None:
        assert find_tiny_imagenet(data_dir, 64) is None
        write_tiny_imagenet(data_dir)
        folder = data_dir / "tiny-imagenet-200"
        (folder / "train" / "n00000001").rename(folder / "elsewhere")
        with pytest.raises(InputError, match="train/n00000001/images missing"):
            find_tiny_imagenet(data_dir, 64)
        (folder / "wnids.txt").unlink()
        with pytest.raises(InputError, match=r"wnids\.txt missing"):
            find_tiny_imagenet(data_dir, 64)

    @pytest.mark.parametrize("line", ["val_0.JPEG\tn99999999", "../../secret.JPEG\tn00000001", "val_0.JPEG", ""])
    def test_a_wrong_annotation_is_named(self, data_dir: Path, line: str) -> None:
        write_tiny_imagenet(data_dir)
        (data_dir / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text(
            f"val_1.JPEG\tn00000001\t0\n{line}\n"
        )
        with pytest.raises(InputError, match=r"val_annotations\.txt line 2"):
            read_all(find_tiny_imagenet(data_dir, 64).test)

    def test_another_size_is_named_with_expected_and_found(self, data_dir: Path) -> None:
        write_tiny_imagenet(data_dir)
        write_picture(data_dir / "tiny-imagenet-200/train/n00000001/images/n00000001_1.JPEG", size=(64, 48))
        with pytest.raises(InputError, match=r"n00000001_1\.JPEG \(is 64×48, but all must be 64×64\)"):
            read_all(find_tiny_imagenet(data_dir, 64).train)


class TestTree:
    @pytest.mark.parametrize("test_name", ["val", "test", "validation"])
    def test_train_and_test_folders(self, tmp_path: Path, test_name: str) -> None:
        write_tree(tmp_path, ("train", test_name))
        source = open_tree(tmp_path, 32)
        assert source.classes == ("class0", "class1", "class2")
        for read in (source.train, source.test):
            images, labels = read_all(read)
            assert images.shape == (15, 3, 32, 32)
            assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5

    def test_a_single_tree_is_split_by_class(self, tmp_path: Path) -> None:
        write_tree(tmp_path, ())
        source = open_tree(tmp_path, 32)
        (train, train_labels), (test, test_labels) = read_all(source.train), read_all(source.test)
        assert np.bincount(train_labels).tolist() == [4, 4, 4]
        assert np.bincount(test_labels).tolist() == [1, 1, 1]
        together = np.concatenate([train, test]).reshape(15, -1)
        assert len(np.unique(together, axis=0)) == 15, "no image is in both parts"

    def test_pictures_are_resized_as_torchvision_does(self, tmp_path: Path) -> None:
        v2 = pytest.importorskip("torchvision.transforms.v2")
        prepare = v2.Compose([v2.Resize(24, interpolation=v2.InterpolationMode.BICUBIC), v2.CenterCrop(24)])
        for number, size in enumerate([(40, 60), (60, 40), (33, 24), (24, 24), (10, 13), (101, 37)]):
            path = tmp_path / f"{number}.png"
            write_picture(path, number, size)
            [(images, _)] = decode(tmp_path, [path], [0], 24)
            with Image.open(path) as picture:
                expected = np.asarray(prepare(picture)).transpose(2, 0, 1)
            np.testing.assert_array_equal(images[0], expected)

    def test_no_classes(self, tmp_path: Path) -> None:
        write_picture(tmp_path / "lonely.png")
        with pytest.raises(InputError, match="has no classes"):
            open_tree(tmp_path, 32)
        (tmp_path / "train").mkdir()
        (tmp_path / "val").mkdir()
        with pytest.raises(InputError, match="train has no classes"):
            open_tree(tmp_path, 32)

    def test_a_class_without_images(self, tmp_path: Path) -> None:
        write_tree(tmp_path)
        (tmp_path / "train" / "class9").mkdir()
        (tmp_path / "val" / "class9").mkdir()
        with pytest.raises(InputError, match="class9 holds no images"):
            read_all(open_tree(tmp_path, 32).train)

    def test_classes_that_differ_between_the_parts(self, tmp_path: Path) -> None:
        write_tree(tmp_path)
        (tmp_path / "val" / "class9").mkdir()
        with pytest.raises(InputError, match=r"same classes: class9 is in one of them alone"):
            open_tree(tmp_path, 32)

    def test_no_test_folder(self, tmp_path: Path) -> None:
        write_tree(tmp_path, ("train",))
        with pytest.raises(InputError, match="none named 'val'"):
            open_tree(tmp_path, 32)

    def test_unreadable_files_are_all_named_at_once(self, tmp_path: Path) -> None:
        write_tree(tmp_path)
        (tmp_path / "train/class0/bad.png").write_bytes(b"no picture")
        (tmp_path / "train/class2/cut.png").write_bytes((tmp_path / "train/class2/1.png").read_bytes()[:300])
        with pytest.raises(InputError, match=r"2 image\(s\).*class0/bad\.png.*class2/cut\.png"):
            read_all(open_tree(tmp_path, 32).train)


class TestPlainFolder:
    def test_pictures_in_order_and_below(self, tmp_path: Path) -> None:
        write_picture(tmp_path / "b.png", size=(30, 20))
        write_picture(tmp_path / "a" / "z.jpg", size=(12, 13), mode="L")
        (tmp_path / "notes.txt").write_text("not a picture")
        pictures = list(folder_images(tmp_path))
        assert [picture.size for picture in pictures] == [(12, 13), (30, 20)]
        assert all(picture.mode == "RGB" for picture in pictures)

    def test_a_choice_is_always_the_same(self, tmp_path: Path) -> None:
        for number in range(12):
            write_picture(tmp_path / f"{number:02}.png", size=(8 + number, 8))
        first, second = ([picture.size for picture in folder_images(tmp_path, 5)] for _ in range(2))
        assert first == second
        assert len(set(first)) == 5
        assert len(list(folder_images(tmp_path, 100))) == 12

    def test_unreadable_files_are_named_before_the_first_picture(self, tmp_path: Path) -> None:
        write_picture(tmp_path / "a.png")
        (tmp_path / "b.png").write_bytes(b"")
        (tmp_path / "c.jpg").write_bytes(b"\xff\xd8 nonsense")
        with pytest.raises(InputError, match=r"2 image\(s\).*b\.png.*c\.jpg"):
            folder_images(tmp_path)

    def test_many_unreadable_files_are_counted(self, tmp_path: Path) -> None:
        for number in range(8):
            (tmp_path / f"{number}.png").write_bytes(b"")
        with pytest.raises(InputError, match="and 3 more"):
            folder_images(tmp_path)

    def test_empty_missing_or_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="holds no images"):
            folder_images(tmp_path)
        with pytest.raises(InputError, match="is not there"):
            folder_images(tmp_path / "nowhere")
        write_picture(tmp_path / "a.png")
        with pytest.raises(InputError, match="is a file"):
            folder_images(tmp_path / "a.png")
        with pytest.raises(InputError, match="at least 1"):
            folder_images(tmp_path, 0)


def test_the_fifth_of_a_single_tree_is_the_stratified_one(tmp_path: Path) -> None:
    import torch

    write_tree(tmp_path, (), per_class=10)
    _, held_out = stratified_split(torch.arange(30) // 10, 0.2, seed=0)
    paths = sorted(tmp_path.glob("*/*.png"))
    [(expected, _)] = decode(tmp_path, [paths[index] for index in held_out.tolist()], [0] * 6, 32)
    np.testing.assert_array_equal(read_all(open_tree(tmp_path, 32).test)[0], expected)
