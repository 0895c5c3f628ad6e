"""SVHN format 2, with the MATLAB reader it rests on."""

from pathlib import Path

import numpy as np
import pytest
from small_files import mat_file, write_svhn

from nearsight.data.svhn import find_svhn, read_mat_arrays
from nearsight.errors import InputError


@pytest.mark.parametrize("compressed", [True, False])
def test_images_and_labels(data_dir: Path, compressed: bool) -> None:
    expected = write_svhn(data_dir, 20, compressed=compressed)
    source = find_svhn(data_dir, 32)
    for read in (source.train, source.test):
        [(images, labels)] = read()
        np.testing.assert_array_equal(images, expected)
        assert labels.tolist() == [*range(1, 10), 0] * 2, "label 10 is the digit 0"


def test_files_right_below_the_data_folder_are_found(data_dir: Path) -> None:
    write_svhn(data_dir)
    for path in (data_dir / "svhn").iterdir():
        path.rename(data_dir / path.name)
    assert find_svhn(data_dir, 32).folder == data_dir


def test_absent_and_incomplete(data_dir: Path) -> None:
    assert find_svhn(data_dir, 32) is None
    write_svhn(data_dir)
    (data_dir / "svhn" / "test_32x32.mat").unlink()
    with pytest.raises(InputError, match=r"test_32x32\.mat missing"):
        find_svhn(data_dir, 32)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_named(data_dir: Path, share: float, compressed: bool) -> None:
    write_svhn(data_dir, compressed=compressed)
    path = data_dir / "svhn" / "train_32x32.mat"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(InputError, match=r"train_32x32\.mat"):
        list(find_svhn(data_dir, 32).train())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "X and y are expected"),
        ({"X": np.zeros((16, 16, 3, 2), np.uint8), "y": np.ones((2, 1), np.uint8)}, r"images \[16, 16, 3, 2\]"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1), np.uint8)}, "3 labels"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [11]], np.uint8)}, "image 1 has label 11"),
    ],
)
def test_wrong_content(data_dir: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    write_svhn(data_dir)
    (data_dir / "svhn" / "train_32x32.mat").write_bytes(mat_file(arrays))
    with pytest.raises(InputError, match=message):
        list(find_svhn(data_dir, 32).train())


@pytest.mark.parametrize("compressed", [True, False])
def test_files_of_scipy_are_read(tmp_path: Path, compressed: bool) -> None:
    scipy_io = pytest.importorskip("scipy.io", reason="scipy is not installed; it would write files to compare with")
    path = tmp_path / "a.mat"
    written = {
        "X": np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8),
        "y": np.arange(5.0).reshape(5, 1),
        "longer_name": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    scipy_io.savemat(path, {**written, "text": "not a number"}, do_compression=compressed)
    read = read_mat_arrays(path)
    for name, array in written.items():
        np.testing.assert_array_equal(read[name], array)
