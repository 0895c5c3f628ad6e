"""Atomic writes: the old file or the new one, never half of either. Folders of one kind are not written over by what
makes another."""

import errno
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.files import (
    MEASURED,
    PROBES,
    RUN,
    STUDY,
    LostError,
    append_line,
    canonical_hash,
    check_kind,
    guarded,
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


def killed_while_writing(path: Path) -> None:
    """Leave what a process leaves that ends in the middle of a write."""
    process = multiprocessing.get_context("fork").Process(target=write_and_end, args=(path,))
    process.start()
    process.join(30)
    assert process.exitcode == 9


def write_and_end(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half")
        os._exit(9)


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, which Windows cannot")
def test_remains_go_once_their_writer_has_ended(tmp_path: Path) -> None:
    """As soon as somebody writes there again; and never those of somebody who is still there, or may be."""
    killed_while_writing(tmp_path / "runs.csv")
    killed_while_writing(tmp_path / "runs" / "history.csv")
    elsewhere = tmp_path / ".runs.csv.00000000-1-1-12345678.tmp.csv"
    of_an_earlier_version = tmp_path / ".runs.csv.0123456789abcdef.tmp.csv"
    for path in (elsewhere, of_an_earlier_version):
        path.write_text("half")
    assert len(list(tmp_path.iterdir())) == 4
    with replacing(tmp_path / "file.images") as temporary:
        temporary.touch()
        remove_remains(tmp_path)
        assert {path for path in tmp_path.iterdir() if path.is_file()} == {temporary, elsewhere, of_an_earlier_version}
        assert len(list((tmp_path / "runs").iterdir())) == 1
        remove_remains(tmp_path, below=True)
        assert list((tmp_path / "runs").iterdir()) == []
        days_ago = time.time() - 2 * 24 * 3600
        for path in (elsewhere, of_an_earlier_version, temporary):  # a clock may have jumped
            os.utime(path, (days_ago, days_ago))
        remove_remains(tmp_path)
        assert {path for path in tmp_path.iterdir() if path.is_file()} == {temporary}


def test_what_is_guarded_is_written_only_as_long_as_the_guard_agrees(tmp_path: Path) -> None:
    """The guard is asked when the content is there and the file has no name yet."""
    asked: list[list[str]] = []
    is_ours = True

    def guard() -> None:
        asked.append(sorted(os.listdir(tmp_path / "guarded")))
        if not is_ours:
            raise LostError("it is somebody else's")

    path = tmp_path / "guarded" / "file.txt"
    path.parent.mkdir()
    with guarded(path.parent, guard):
        write_text(path, "first")
        append_line(path.parent / "log", "first")
        is_ours = False
        for write in (write_text, append_line):
            with pytest.raises(LostError):
                write(path, "second")
        write_text(tmp_path / "beside.txt", "free")
    assert path.read_text() == "first"
    assert len(asked) == 4
    assert len(asked[0]) == 1
    assert asked[0][0].startswith(".file.txt")
    write_text(path, "third")
    assert path.read_text() == "third"
    assert sorted(os.listdir(path.parent)) == ["file.txt", "log"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_several_who_make_an_exclusive_file_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refused(*_: object) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "file.txt"
    write_text(path, "first", exclusive=True)
    with pytest.raises(LostError, match=r"file\.txt was written by another process"):
        write_text(path, "second", exclusive=True)
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["file.txt"]


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


COMMANDS = {
    RUN: ["train", "compact-shapes", "--data.num-train", "100", "--protocol.max-epochs", "1"],
    STUDY: ["study", "run", "protocol-cifar100", "--scale", "small"],
    PROBES: ["probe", "all", "vit_tiny_patch16_224", "--probes", "knn", "--image-size", "32"],
    MEASURED: ["measure", "vit_tiny_patch16_224", "--num-images", "2"],
    "result.json": ["probe", "knn", "vit_tiny_patch16_224", "--image-size", "32"],
    "report.html": ["demo", "--num-train", "100", "--epochs", "1"],
}


@pytest.mark.parametrize(
    ("own", "held"), [(own, held) for own in COMMANDS for held in (RUN, STUDY, PROBES, MEASURED) if own != held]
)
def test_every_command_keeps_away_from_other_kinds(
    own: str, held: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / held).write_text("{}")
    (tmp_path / "provenance.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*COMMANDS[own], "--device", "cpu", "--out", str(tmp_path)]) == 2
    words = {RUN: "a run", STUDY: "a study", PROBES: "probe all", MEASURED: "a measured model"}[held]
    assert words in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_kind_of_a_folder_is_what_it_is_as_a_whole(tmp_path: Path) -> None:
    check_kind(tmp_path, None)
    (tmp_path / MEASURED).touch()
    check_kind(tmp_path, MEASURED)
    (tmp_path / RUN).touch()
    check_kind(tmp_path, RUN)  # a run has its heads' table, too
    for other in (MEASURED, STUDY, PROBES, None):
        with pytest.raises(InputError, match="holds a run, whose files would be lost"):
            check_kind(tmp_path, other)
