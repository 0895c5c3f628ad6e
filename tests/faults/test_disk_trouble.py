"""Disks that are full, read-only or gone, files that may not grow, clocks that jump and folders of other versions: what
was there before stays whole, one line says what is wrong, and the same work goes on when the trouble is over."""

import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from disturbed import as_nobody, run, take_cell
from PIL import Image
from tiny_study import tiny_base, tiny_study

from nearsight import files
from nearsight.cli import main
from nearsight.data import fetch_dataset
from nearsight.errors import InputError
from nearsight.files import WriteError, write_text
from nearsight.models import create_model
from nearsight.probe import FeatureKey, FeatureSpec, Preparation, cached_features, reading, weights_hash
from nearsight.study import StudyFolder, StudyListener, run_study
from nearsight.study.lock import SECONDS_UNTIL_STALE, Locks
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train import HistoryRow, Listener, RunConfig, RunFolder, train_run

FAULTS = pytest.mark.faults


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train_run(tiny_base(), tmp_path_factory.mktemp("whole") / "run")


def assert_same_numbers(a: RunFolder, b: RunFolder) -> None:
    for name in ("model.safetensors", "heads.csv", "result.json"):
        assert (a.path / name).read_bytes() == (b.path / name).read_bytes()
    ours, theirs = (pd.read_csv(folder.path / "history.csv").drop(columns="seconds") for folder in (a, b))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)


class FailFrom:
    """Every write from the n-th on fails."""

    def __init__(self, n: int, number: int) -> None:
        self.left, self.number = n, number

    def __call__(self, moment: files.Moment, path: Path) -> None:
        self.left -= moment == "written"
        if self.left <= 0:
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("write", "number", "words"),
    [
        (4, errno.ENOSPC, "cannot be written: the disk is full; make room, or choose another --out"),
        pytest.param(1, errno.ENOSPC, r"config\.json cannot be written: the disk is full", marks=FAULTS),
        pytest.param(5, errno.EDQUOT, "cannot be written: the disk quota is used up", marks=FAULTS),
        pytest.param(6, errno.EROFS, "cannot be written: the disk is read-only", marks=FAULTS),
        pytest.param(8, errno.ESTALE, "cannot be written: its network folder no longer exists", marks=FAULTS),
        pytest.param(10, errno.EIO, "cannot be written: Input/output error", marks=FAULTS),
    ],
)
def test_a_run_on_a_bad_disk_says_so_and_goes_on_later(
    tmp_path: Path, whole: RunFolder, monkeypatch: pytest.MonkeyPatch, write: int, number: int, words: str
) -> None:
    monkeypatch.setattr(files, "disturb", FailFrom(write, number))
    with pytest.raises(InputError, match=words):
        train_run(tiny_base(), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").is_complete
    assert [path.name for path in tmp_path.rglob("*.tmp*")] == []
    monkeypatch.undo()
    assert_same_numbers(train_run(tiny_base(), tmp_path / "run"), whole)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize(("call", "rename"), [("replace", 1), ("replace", 4), ("replace", 9), ("link", 1)])
@FAULTS
def test_a_rename_that_fails(
    tmp_path: Path, whole: RunFolder, monkeypatch: pytest.MonkeyPatch, call: str, number: int, rename: int
) -> None:
    """The content is there, and the file does not get its name."""
    real, left = getattr(os, call), rename

    def failing(*arguments: Any, **options: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(number, os.strerror(number), *arguments[:1], None, *arguments[1:2])
        real(*arguments, **options)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(InputError, match=f"cannot be written: {os.strerror(number)}"):
        train_run(tiny_base(), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").is_complete
    assert [path.name for path in tmp_path.rglob(".*.tmp*")] == []
    monkeypatch.undo()
    assert_same_numbers(train_run(tiny_base(), tmp_path / "run"), whole)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """What a disk that fills up does in the middle of a file; the kernel's own errors, not ours."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    write_text(tmp_path / "text", "old")
    save_tensors(tmp_path / "t.safetensors", {"w": torch.ones(3)}, {})
    with files_of_at_most(4096):
        with pytest.raises(WriteError, match="text cannot be written: it would be larger than files may be here"):
            write_text(tmp_path / "text", "new" * 4096)
        with pytest.raises(InputError, match=r"t\.safetensors cannot be written: .*make room"):
            save_tensors(tmp_path / "t.safetensors", {"w": torch.ones(4096)}, {})
    assert (tmp_path / "text").read_text() == "old"
    assert load_tensors(tmp_path / "t.safetensors")[0]["w"].tolist() == [1, 1, 1]
    assert sorted(os.listdir(tmp_path)) == ["t.safetensors", "text"]


def test_whoever_may_read_the_tables_may_read_the_weights(tmp_path: Path) -> None:
    """Of a study in a shared folder."""
    write_text(tmp_path / "text", "")
    save_tensors(tmp_path / "t.safetensors", {"w": torch.ones(3)}, {})
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_features_that_do_not_fit_are_refused_before_any_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that writes to mapped memory for which there is no room would be killed."""
    model, spec = create_model("compact_vit", depth=1, embed_dim=24, num_heads=3).eval(), FeatureSpec(tokens="cls")
    preparation = Preparation(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with reading(model, spec, image_size=(32, 32)) as reader:
        key = FeatureKey(model=weights_hash(model), data="d", part="test", spec=reader.spec, preparation=preparation)
        with pytest.raises(InputError, match=r"features\.npy cannot be written: No space left on device; make room"):
            cached_features(key, reader, lambda begin, end: torch.zeros(end - begin, 3, 32, 32), 8, folder=tmp_path)
    assert list(tmp_path.rglob("*.npy")) == []


class Remove(Listener):
    """Takes a folder away after the first epoch, as a network disk that is gone does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)


def test_a_folder_that_goes_away_is_missed_and_not_made_anew(tmp_path: Path, whole: RunFolder) -> None:
    """Half a run in a place where nobody looks for it would be worse than an error."""
    path = tmp_path / "run"
    with pytest.raises(
        InputError, match=r"run disappeared while it was written to|cannot be written: its folder no longer exists"
    ):
        train_run(tiny_base(), path, listener=Remove(path))
    assert not list(path.rglob("*.safetensors"))
    assert_same_numbers(train_run(tiny_base(), path), whole)


@FAULTS
def test_a_study_whose_folder_goes_away(tmp_path: Path) -> None:
    class Gone(StudyListener):
        def epoch(self, config: RunConfig, row: HistoryRow) -> None:
            shutil.rmtree(tmp_path / "study", ignore_errors=True)

    study = tiny_study(seeds=1).only([{}])
    with pytest.raises(InputError, match=r"has gone|disappeared|not the folder of a study"):
        run_study(study, tmp_path / "study", listener=Gone())
    run_study(study, tmp_path / "study")
    assert [state.state for state in StudyFolder(tmp_path / "study").states()] == ["done"]


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder of which whoever is not root sees something; those of pytest are its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_trained(open_to_all: Path) -> None:
    (open_to_all / "kept").mkdir(mode=0o555)
    ended = run(as_nobody, train_run, tiny_base(), open_to_all / "kept" / "run")
    assert re.search(r"InputError: .*run cannot be written to: permission denied in .*kept; choose", ended.failure)
    assert list((open_to_all / "kept").iterdir()) == []


@FAULTS
def test_what_another_user_began_is_left_alone_and_what_one_may_not_read_is_named(open_to_all: Path) -> None:
    """A run of root's: its folder cannot be written to. Its study's lock: it can be read, and is not touched."""
    train_run(tiny_base(), open_to_all / "run")
    before = {path.name: path.stat().st_mtime_ns for path in (open_to_all / "run").iterdir()}
    ended = run(as_nobody, train_run, dataclasses.replace(tiny_base(), seed=5), open_to_all / "run")
    assert ended.failure.startswith("InputError: ")
    (open_to_all / "run" / "config.json").chmod(0o000)
    ended = run(as_nobody, train_run, tiny_base(), open_to_all / "run")
    assert re.search(r"InputError: .*(cannot be read|cannot be written)", ended.failure)
    assert {path.name: path.stat().st_mtime_ns for path in (open_to_all / "run").iterdir()} == before
    locks = Locks(open_to_all / "locks")
    assert locks.take("cell")
    ended = run(as_nobody, take_cell, open_to_all / "locks")
    assert not ended.failure
    assert not locks.lost


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="nobody tells")
def test_a_read_only_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="run cannot be written to: permission denied in"):
        files.check_output_folder(tmp_path / "run")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NOSUID))
    with pytest.raises(InputError, match="run cannot be written to: the disk is read-only; choose another --out"):
        files.check_output_folder(tmp_path / "run")


@FAULTS
def test_folders_of_a_hundred_thousand_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pictures to choose from, and a run folder into which somebody has put them."""
    train_run(tiny_base(), tmp_path / "run")
    Image.new("RGB", (40, 40)).save(tmp_path / "picture.png")
    content = (tmp_path / "picture.png").read_bytes()
    for number in range(100_000):
        (tmp_path / "run" / f"{number}.png").write_bytes(content)
    began = time.monotonic()
    arguments = ["measure", "compact_vit", "--images", str(tmp_path / "run"), "--num-images", "3", "--json"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["report", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert train_run(tiny_base(), tmp_path / "run").is_complete
    assert time.monotonic() - began < 60


def test_errors_about_files_that_are_read_keep_their_name(tmp_path: Path) -> None:
    """Not everything that goes wrong during a write is the written file's fault."""
    with pytest.raises(FileNotFoundError) as error, files.replacing(tmp_path / "out") as temporary:
        temporary.write_bytes((tmp_path / "elsewhere" / "in").read_bytes())
    assert not isinstance(error.value, InputError)


def test_a_folder_that_cannot_be_flushed_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network disks."""
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    write_text(tmp_path / "text", "new")
    assert (tmp_path / "text").read_text() == "new"


def test_remains_of_killed_fetches_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", no_network)
    old, young = tmp_path / ".fetching-old", tmp_path / ".fetching-young"
    for folder in (old, young):
        (folder / "unpacked").mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    with pytest.raises(InputError, match="could not be fetched into"):
        fetch_dataset("cifar100", tmp_path)
    assert list(tmp_path.iterdir()) == [young]


@pytest.mark.parametrize("hours", [-30, 30])
def test_a_clock_that_jumps_leaves_locks_of_the_living_alone(tmp_path: Path, hours: int) -> None:
    """Backwards, a sign of life lies in the future; forwards, the next one comes before anybody takes over."""
    mine, other = Locks(tmp_path), Locks(tmp_path)
    assert mine.take("cell")
    sign = time.time() - 3600 * hours
    os.utime(tmp_path / "cell.0", (sign, sign))
    if hours > 0:
        holder = other.holder("cell")
        assert holder is not None
        assert holder.age > SECONDS_UNTIL_STALE
        mine.touch()
    assert not other.take("cell")
    mine.touch()
    assert not mine.lost
    mine.release("cell")
    assert other.take("cell")


@pytest.mark.parametrize(
    ("schema", "words"), [(99, "has schema 99, but this nearsight reads up to 1"), ("x", "not the")]
)
def test_a_run_of_another_version_is_left_alone(tmp_path: Path, whole: RunFolder, schema: object, words: str) -> None:
    path = Path(shutil.copytree(whole.path, tmp_path / "run"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "schema": schema}))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(InputError, match=words):
        train_run(tiny_base(), path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
