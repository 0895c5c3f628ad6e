"""Parquet files as the Hugging Face hub writes them."""

import sys
from pathlib import Path

import numpy as np
import pytest
from small_files import png, write_parquet, write_picture

from nearsight.data import list_datasets, load_dataset, parquet
from nearsight.data.decoding import is_image_name
from nearsight.data.image_folder import open_tree
from nearsight.data.parquet import open_parquet
from nearsight.errors import InputError


def test_parts_in_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", [0, 1, 2])
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", [2, 1])
    write_parquet(tmp_path / "data/validation-00000-of-00001.parquet", [1])
    source = open_parquet(tmp_path, 16)
    assert source.classes == ("zero", "one", "two")
    images, labels = (np.concatenate(arrays) for arrays in zip(*source.train(), strict=True))
    assert labels.tolist() == [0, 1, 2, 2, 1]
    assert images.shape == (5, 3, 16, 16)
    assert images[:, 0, 0, 0].tolist() == [0, 10, 20, 20, 10]
    assert [labels.tolist() for _, labels in source.test()] == [[1]]


def test_of_several_test_sets_the_same_is_taken_as_from_a_tree(tmp_path: Path) -> None:
    parts = {"train": 0, "test": 1, "validation": 2}
    for name, label in parts.items():
        write_parquet(tmp_path / f"data/{name}-00000-of-00001.parquet", [label])
    source = open_parquet(tmp_path, 16)
    assert [labels.tolist() for _, labels in source.test()] == [[parts["validation"]]]
    assert source.layout == "Hugging Face parquet, train and validation (test not used)"
    for name in parts:
        write_picture(tmp_path / "tree" / name / "a" / "0.png")
    assert open_tree(tmp_path / "tree", 16).layout == "folder per class, train and validation (test not used)"


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (["00000-of-00013"], "train-00001-of-00013.parquet and 11 more missing; get it again"),
        (["00001-of-00002"], "train-00000-of-00002.parquet missing"),
        (["00000-of-00002-0a1b2c"], "train-00001-of-00002.parquet missing"),
    ],
)
def test_half_a_download_is_not_the_set(tmp_path: Path, present: list[str], message: str) -> None:
    for name in present:
        write_parquet(tmp_path / f"mini-imagenet/data/train-{name}.parquet", [0])
    write_parquet(tmp_path / "mini-imagenet/data/test-00000-of-00001.parquet", [0])
    with pytest.raises(InputError, match=f"data is not complete: {message}"):
        load_dataset("mini-imagenet", data_dir=tmp_path)
    assert {row.name: row.state for row in list_datasets(tmp_path)}["mini-imagenet"] == "damaged"


def test_the_pictures_of_a_tree_are_not_gone_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in range(3):
        for number in range(50):
            (tmp_path / "train" / str(label)).mkdir(parents=True, exist_ok=True)
            (tmp_path / "train" / str(label) / f"{number}.png").touch()
    looked_at: list[str] = []
    monkeypatch.setattr(parquet, "is_image_name", lambda name: (looked_at.append(name), is_image_name(name))[1])
    assert open_parquet(tmp_path, 16) is None
    assert len(looked_at) == 3 + 3, "the classes, and a picture of each"


def test_absent_is_none(tmp_path: Path) -> None:
    assert open_parquet(tmp_path, 16) is None


def test_one_part_alone(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [0])
    with pytest.raises(InputError, match="train only"):
        open_parquet(tmp_path, 16)


@pytest.mark.parametrize(
    ("options", "labels", "message"),
    [
        ({"names": False}, [0], "does not say the names of its classes"),
        ({"image": "photo"}, [0], "columns photo, label"),
        ({}, [0, 3], r"train-0\.parquet: image 1 has label 3"),
        ({}, [0] * 700 + [3, 4], r"train-0\.parquet: image 700 has label 3.*2 wrong in all"),
        ({}, [0, None], r"train-0\.parquet: image 1 has the label None, but whole numbers are needed"),
        ({}, [0.0, 1.5], r"train-0\.parquet: image 0 has the label 0\.0, but whole numbers are needed"),
        ({"pictures": [b"no struct"]}, [0], r"image 0 \(has no bytes\)"),
        ({"pictures": [{"bytes": "/etc/motd"}]}, [0], r"image 0 \(has no bytes\)"),
    ],
)
def test_wrong_content(tmp_path: Path, options: dict[str, object], labels: list[int], message: str) -> None:
    write_parquet(tmp_path / "train-0.parquet", labels, **options)
    write_parquet(tmp_path / "test-0.parquet", [0])
    with pytest.raises(InputError, match=message):
        list(open_parquet(tmp_path, 16).train())


def test_pictures_that_cannot_be_used_are_all_called_by_their_number_in_the_file(tmp_path: Path) -> None:
    good, broken, elsewhere = ({"bytes": content, "path": "x.png"} for content in (png(1), b"broken", None))
    rows = [good] * 1_300
    rows[3], rows[700], rows[1_200], rows[1_299] = broken, elsewhere, None, broken
    write_parquet(tmp_path / "train-0.parquet", [0] * len(rows), pictures=rows)
    write_parquet(tmp_path / "test-0.parquet", [0])
    with pytest.raises(InputError) as raised:
        list(open_parquet(tmp_path, 16).train())
    assert (
        f"4 image(s) in {tmp_path}/train-0.parquet cannot be used: image 3 (is not a picture of a known format); "
        "image 700 (has no bytes); image 1200 (has no bytes); image 1299 (is not a picture of a known format); repair"
    ) in str(raised.value)


def test_truncated(tmp_path: Path) -> None:
    for name in ("train-0.parquet", "test-0.parquet"):
        write_parquet(tmp_path / name, [0])
    (tmp_path / "train-0.parquet").write_bytes((tmp_path / "train-0.parquet").read_bytes()[:-20])
    with pytest.raises(InputError, match=r"train-0\.parquet is truncated"):
        open_parquet(tmp_path, 16)


def test_without_pyarrow_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("train-0.parquet", "test-0.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"pyarrow is needed .*pip install 'nearsight\[data\]'"):
        open_parquet(tmp_path, 16)
