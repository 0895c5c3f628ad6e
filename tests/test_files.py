"""Atomic writes: the old file or the new one, never half of either."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from nearsight.errors import InputError
from nearsight.files import (
    canonical_hash,
    output_folder,
    reading,
    remove_remains,
    replacing,
    write_json,
    write_text,
)
from nearsight.tensorfile import load_tensors, save_tensors


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of the n")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_writers_of_one_file_in_one_process_or_with_one_number_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with replacing(path) as late:
        late.write_text("late, and long")
        with replacing(path) as early:
            early.write_text("early")
            assert early != late
        assert path.read_text() == "early"
    assert path.read_text() == "late, and long"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_what_a_killed_write_leaves_is_found(tmp_path: Path) -> None:
    with replacing(tmp_path / "file.images") as temporary:
        temporary.touch()
        remove_remains(tmp_path, shared=True)
        assert temporary.exists(), "somebody may still be writing it"
        remove_remains(tmp_path)
        assert not temporary.exists()
        temporary.touch()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for name, message in (
        ("absent", "absent cannot be read: No such file"),
        ("link", "is a link to nowhere, which is"),
    ):
        with pytest.raises(InputError, match=message), reading(tmp_path):
            (tmp_path / name).read_bytes()
    with pytest.raises(InputError, match=r"the set cannot be read: Input/output error"), reading(Path("the set")):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_missing_parents_are_made(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b.json", {"ε": 1})
    assert json.loads((tmp_path / "a" / "b.json").read_text(encoding="utf-8")) == {"ε": 1}


def test_numbers_that_json_does_not_have_are_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    for number in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json(tmp_path / "result.json", {"accuracy": number}, allow_nan=False)
    assert not any(tmp_path.iterdir())


def test_hash_ignores_order_and_whitespace_but_not_values() -> None:
    assert canonical_hash({"a": 1, "b": [1, 2]}) == canonical_hash({"b": [1, 2], "a": 1})
    assert canonical_hash({"a": 1}) != canonical_hash({"a": 1.5})
    assert canonical_hash({"a": 1}) == "015abd7f5cc57a2d"  # sha256 of {"a":1}
    with pytest.raises(ValueError):
        canonical_hash({"a": float("nan")})


def test_output_folder_says_why_it_cannot(tmp_path: Path) -> None:
    assert output_folder(tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        output_folder(tmp_path / "file")
    with pytest.raises(InputError, match="which is a file"):
        output_folder(tmp_path / "file" / "below")


def test_tensors_of_every_kind_round_trip(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(3, 4).t(),
        "bf16": torch.randn(5).to(torch.bfloat16),
        "int": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
    }
    save_tensors(tmp_path / "t.safetensors", tensors, {"note": "ε"})
    loaded, described = load_tensors(tmp_path / "t.safetensors")
    assert described == {"note": "ε"}
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype


def test_any_flipped_byte_of_the_contents_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_tensors(path, {"w": torch.randn(8)}, {})
    whole = path.read_bytes()
    for position in range(len(whole) - 32, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged"):
            load_tensors(path)
