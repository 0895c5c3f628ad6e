"""Tables of heads: round trips, frames and merging."""

from pathlib import Path

import numpy as np
import pytest

from nearsight.errors import InputError
from nearsight.lens import HeadTable
from nearsight.metrics import Moments


def table(seed: int = 0, num_images: int = 4, layers: int = 2) -> HeadTable:
    values = np.random.default_rng(seed).uniform(size=(2, num_images, layers, 3))
    values[:, :, 0, 2] = np.nan  # the first layer has two heads
    names = tuple(f"blocks.{i}.attn" for i in range(layers))
    return HeadTable(names, Moments.of(values[0]), Moments.of(values[1]), {"norm": "not attention"})


def test_round_trip(tmp_path: Path) -> None:
    original = table()
    original.extra["quantiles"] = np.arange(6.0).reshape(2, 3)
    original.save(tmp_path / "heads.npz")
    loaded = HeadTable.load(tmp_path / "heads.npz")
    for name in ("mad", "mad_std", "entropy", "entropy_std"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(original, name))
    assert loaded.layer_names == original.layer_names
    assert loaded.num_images == 4
    assert dict(loaded.skipped) == {"norm": "not attention"}
    np.testing.assert_array_equal(loaded.extra["quantiles"], original.extra["quantiles"])
    assert list(tmp_path.iterdir()) == [tmp_path / "heads.npz"]


def test_frame_has_a_row_per_head_that_exists() -> None:
    frame = table().to_frame()
    assert list(frame.columns) == [
        "layer",
        "layer_name",
        "head",
        "mad",
        "mad_std",
        "entropy",
        "entropy_std",
        "num_images",
    ]
    assert list(zip(frame["layer"], frame["head"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert not frame.isna().any().any()
    assert frame["mad"][4] == table().mad[1, 2]


def test_merging_needs_the_same_model() -> None:
    with pytest.raises(InputError, match="different models"):
        HeadTable.merge([table(layers=2), table(layers=3)])
    with pytest.raises(InputError, match="no tables"):
        HeadTable.merge([])


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "heads.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"heads\.npz is damaged"):
        HeadTable.load(path)


def test_missing_and_newer_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        HeadTable.load(tmp_path / "none.npz")
    table().save(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as archive:
        stored = {**archive, "format": np.array(99)}
    np.savez(tmp_path / "t.npz", **stored)
    with pytest.raises(InputError, match="newer nearsight"):
        HeadTable.load(tmp_path / "t.npz")


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", format=np.array([object()], dtype=object))
    with pytest.raises(InputError, match="damaged"):
        HeadTable.load(tmp_path / "t.npz")
