"""CIFAR in its published versions, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_files import pixels, write_cifar10_binary, write_cifar100_binary, write_cifar100_python

from nearsight.data.cifar import find_cifar10, find_cifar100, read_pickled_arrays
from nearsight.data.registry import Reader
from nearsight.errors import InputError


def read_all(read: Reader) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*read(), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def test_cifar10_binary(data_dir: Path) -> None:
    train, test = write_cifar10_binary(data_dir)
    source = find_cifar10(data_dir, 32)
    assert source.classes == tuple(f"class{number}" for number in range(10))
    for read, expected in ((source.train, train), (source.test, test)):
        images, labels = read_all(read)
        np.testing.assert_array_equal(images, expected)
        np.testing.assert_array_equal(labels, np.arange(len(expected)) % 10)


def test_cifar100_reads_the_fine_label(data_dir: Path) -> None:
    expected = write_cifar100_binary(data_dir)
    images, labels = read_all(find_cifar100(data_dir, 32).train)
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(labels, np.arange(200) % 100)


def test_both_versions_give_the_same(tmp_path: Path) -> None:
    write_cifar100_binary(tmp_path / "b")
    write_cifar100_python(tmp_path / "p")
    binary, python = find_cifar100(tmp_path / "b", 32), find_cifar100(tmp_path / "p", 32)
    assert binary.classes == python.classes
    assert (binary.layout, python.layout) == ("binary version", "python version")
    for one, other in ((binary.train, python.train), (binary.test, python.test)):
        for array, same in zip(read_all(one), read_all(other), strict=True):
            np.testing.assert_array_equal(array, same)


def test_absent_is_none(data_dir: Path) -> None:
    assert find_cifar10(data_dir, 32) is None
    assert find_cifar100(data_dir, 32) is None


def test_a_missing_file_is_named(data_dir: Path) -> None:
    write_cifar10_binary(data_dir)
    (data_dir / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(InputError, match=r"data_batch_3\.bin missing"):
        find_cifar10(data_dir, 32)


def test_a_truncated_file_is_named_with_expected_and_found(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    path = data_dir / "cifar-100-binary" / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"train\.bin is truncated.* {200 * 3074 - 1} bytes.*3074-byte"):
        read_all(find_cifar100(data_dir, 32).train)


def test_labels_out_of_range_are_named(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    path = data_dir / "cifar-100-binary" / "train.bin"
    content = bytearray(path.read_bytes())
    content[5 * 3074 + 1] = 100
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"train\.bin: image 5 has label 100, but 100 classes have labels 0 to 99"):
        read_all(find_cifar100(data_dir, 32).train)


def test_a_wrong_number_of_class_names(data_dir: Path) -> None:
    write_cifar100_binary(data_dir)
    (data_dir / "cifar-100-binary" / "fine_label_names.txt").write_text("a\nb\n")
    with pytest.raises(InputError, match="has 2 class names, but 100"):
        find_cifar100(data_dir, 32)


class Malicious:
    """What an attacker would put into a pickle."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_that_call_functions_are_refused(tmp_path: Path, protocol: int) -> None:
    target, path = tmp_path / "touched", tmp_path / "train"
    path.write_bytes(pickle.dumps({b"data": Malicious(target)}, protocol=protocol))
    with pytest.raises(InputError, match="it asks for"):
        read_pickled_arrays(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())
    assert target.exists(), "an ordinary unpickler does call it, so this test means something"


@pytest.mark.parametrize("protocol", range(5))  # protocol 5 stores arrays in another way, and came after CIFAR
def test_arrays_of_every_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "train"
    path.write_bytes(pickle.dumps({b"data": pixels(3), "labels": [1, 2, 3]}, protocol=protocol))
    content = read_pickled_arrays(path)
    np.testing.assert_array_equal(content["data"], pixels(3))
    assert content["labels"] == [1, 2, 3]


def test_a_pickle_as_python_2_and_numpy_1_wrote_it(tmp_path: Path) -> None:
    """Byte for byte the opcodes of the published files: numpy.core, str data, protocol 2 of Python 2."""
    data = bytes(range(250, 256))
    content = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x06\x85cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06" + data + b"tbu."
    )
    path = tmp_path / "train"
    path.write_bytes(content)
    assert read_pickled_arrays(path)["data"].tolist() == list(data)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps([1, 2])[:-1], pickle.dumps([1, 2])])
def test_files_that_are_no_batches(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train"
    path.write_bytes(content)
    with pytest.raises(InputError, match="train is not a CIFAR batch file"):
        read_pickled_arrays(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": np.zeros((2, 7), np.uint8), "fine_labels": [0, 1]}, r"no uint8 array \[N, 3072\]"),
        ({"fine_labels": [0, 1]}, "no uint8 array"),
        ({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0]}, "no list of 2 labels"),
    ],
)
def test_batches_with_wrong_content(data_dir: Path, content: dict[str, object], message: str) -> None:
    write_cifar100_python(data_dir)
    (data_dir / "cifar-100-python" / "train").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match=message):
        read_all(find_cifar100(data_dir, 32).train)


def test_other_sizes_are_bicubic(data_dir: Path) -> None:
    train, _ = write_cifar10_binary(data_dir)
    images, labels = read_all(find_cifar10(data_dir, 80).train)
    assert images.shape == (50, 3, 80, 80)
    np.testing.assert_array_equal(labels, np.arange(50) % 10)
    for resized, image in zip(images[::10], train[::10], strict=True):
        pillow = Image.fromarray(image.transpose(1, 2, 0)).resize((80, 80), Image.Resampling.BICUBIC)
        difference = abs(resized.transpose(1, 2, 0).astype(int) - np.asarray(pillow))
        assert difference.max() <= 2  # each rounds twice
        assert difference.mean() < 0.02
