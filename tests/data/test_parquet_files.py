"""Parquet files as the Hugging Face hub writes them."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearsight.data.parquet import open_parquet
from nearsight.errors import InputError


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path: Path, labels: list[int], *, names: bool = True, image: str = "image") -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'nearsight[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.table(
        {
            image: [{"bytes": png(10 * label), "path": None} for label in labels],
            "label": labels,
        }
    )
    features = {"label": {"names": ["zero", "one", "two"], "_type": "ClassLabel"}} if names else {}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(metadata), path)


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


def test_absent_is_none(tmp_path: Path) -> None:
    assert open_parquet(tmp_path, 16) is None


def test_one_part_alone(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [0])
    with pytest.raises(InputError, match="train alone"):
        open_parquet(tmp_path, 16)


@pytest.mark.parametrize(
    ("options", "labels", "message"),
    [
        ({"names": False}, [0], "does not say the names of its classes"),
        ({"image": "photo"}, [0], "columns photo, label"),
        ({}, [0, 3], r"train-0\.parquet: image 1 has label 3"),
    ],
)
def test_wrong_content(tmp_path: Path, options: dict[str, object], labels: list[int], message: str) -> None:
    write_parquet(tmp_path / "train-0.parquet", labels, **options)
    write_parquet(tmp_path / "test-0.parquet", [0])
    with pytest.raises(InputError, match=message):
        list(open_parquet(tmp_path, 16).train())


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
