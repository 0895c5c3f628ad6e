"""Studies that run: what is missing and nothing else, whatever came between, and refusals that change nothing."""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_study import FACTORS, tiny_base, tiny_study

from nearsight.errors import InputError
from nearsight.study import Cell, Study, StudyFolder, StudyListener, run_study
from nearsight.study import folder as folder_module
from nearsight.study.lock import SECONDS_UNTIL_STALE, Locks
from nearsight.train import HistoryRow, RunConfig, RunFolder, Stop, StoppedError, TrainingError, train_run


class Recorder(StudyListener):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.groups: list[list[Cell]] = []
        self.epochs: list[tuple[str, int]] = []
        self.done: list[str] = []
        self.aside: list[tuple[Path, str]] = []

    def taken(self, cells: Sequence[Cell]) -> None:
        self.groups.append(list(cells))

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.epochs.append((config.identity, row.epoch))

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        self.done.append(config.identity)

    def set_aside(self, path: Path, problem: str) -> None:
        self.aside.append((path, problem))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_runs(a: Path, b: Path) -> None:
    """Equal to the bit, apart from times."""
    for run in (cell.run for cell in tiny_study().cells):
        for name in ("model.safetensors", "heads.csv", "result.json"):
            assert (a / "runs" / run / name).read_bytes() == (b / "runs" / run / name).read_bytes()
    tables = [pd.read_csv(folder / "runs.csv").drop(columns=["images_per_second", "wall_seconds"]) for folder in (a, b)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_a_study_is_its_runs(finished: Path, tmp_path: Path) -> None:
    cell = tiny_study().cells[5]
    alone = train_run(cell.config, tmp_path / "alone")
    for name in ("model.safetensors", "heads.csv", "result.json", "config.json"):
        assert (alone.path / name).read_bytes() == (finished / "runs" / cell.run / name).read_bytes()
    assert sorted(path.name for path in finished.iterdir()) == ["locks", "runs", "runs.csv", "study.json"]
    assert list((finished / "locks").iterdir()) == []
    stored = json.loads((finished / "study.json").read_text())
    assert [each["run"] for each in stored["cells"]] == [each.run for each in tiny_study().cells]


def test_again_does_nothing(folder: Path) -> None:
    before, recorder = contents(folder), Recorder()
    run_study(tiny_study(), folder, listener=recorder)
    assert (recorder.groups, recorder.epochs) == ([], [])
    assert contents(folder) == before


def test_only_what_is_missing_is_done(folder: Path, finished: Path) -> None:
    missing = tiny_study().cells[2].run
    shutil.rmtree(folder / "runs" / missing)
    recorder = Recorder()
    run_study(tiny_study(), folder, listener=recorder)
    assert recorder.done == [missing]
    assert_same_runs(folder, finished)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({}, [8]), ({"cells_per_stack": 5}, [5, 3]), ({"cells_per_stack": 1}, [1] * 8)],
)
def test_what_trains_together_changes_no_number(
    tmp_path: Path, finished: Path, options: dict[str, Any], sizes: list[int]
) -> None:
    recorder = Recorder()
    run_study(tiny_study(), tmp_path / "study", listener=recorder, checkpoint_every=10, **options)
    assert [len(group) for group in recorder.groups] == sizes
    assert [cell.seed for group in recorder.groups for cell in group] == [0] * 4 + [1] * 4
    assert_same_runs(tmp_path / "study", finished)


def test_more_seeds_are_added(folder: Path) -> None:
    recorder = Recorder()
    run_study(tiny_study(seeds=3), folder, listener=recorder)
    assert len(recorder.done) == 4
    assert list(pd.read_csv(folder / "runs.csv")["seed"]) == [0] * 4 + [1] * 4 + [2] * 4
    run_study(tiny_study(seeds=1), folder)  # fewer leave the others where they are
    assert len(json.loads((folder / "study.json").read_text())["cells"]) == 12


class StopAfter(Recorder):
    """Wishes for a stop at the end of the n-th epoch of a cell."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.stop, self.n = Stop(), n

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        super().epoch(config, row)
        if len(self.epochs) == self.n:
            self.stop.request("SIGTERM")


@pytest.mark.parametrize("n", [1, 6, 10])
def test_a_stop_frees_the_cells_and_the_same_call_continues(tmp_path: Path, finished: Path, n: int) -> None:
    path, listener = tmp_path / "study", StopAfter(n)
    with pytest.raises(StoppedError, match="the same command continues"):
        run_study(tiny_study(), path, listener=listener, stop=listener.stop, checkpoint_every=10)
    locks = Locks(path / "locks")
    assert all(locks.holder(cell.run) is None for cell in tiny_study().cells)
    recorder = Recorder()
    run_study(tiny_study(), path, listener=recorder)
    assert not set(listener.epochs) & set(recorder.epochs)
    assert len(listener.epochs) + len(recorder.epochs) == 16
    assert_same_runs(path, finished)


def test_a_cell_that_diverges_does_not_keep_the_others(tmp_path: Path) -> None:
    base = dataclasses.replace(tiny_base(), protocol=dataclasses.replace(tiny_base().protocol, warmup_epochs=0))
    study = Study(base, factors={"lr": (1e-3, 1e30), "smoothing": (0.0, 0.1)}, seeds=2)
    with pytest.raises(TrainingError, match=r"4 cells could not be done: .*the loss of .* became nan"):
        run_study(study, tmp_path)
    assert list(pd.read_csv(tmp_path / "runs.csv")["lr"]) == [0.001] * 4
    assert {state.state for state in StudyFolder(tmp_path).states() if "lr" in state.condition} == {"missing"}
    assert StudyFolder(tmp_path).locks().holder(study.cells[-1].run) is None


def damaged(folder: Path, name: str, content: bytes | None) -> Path:
    """The run folder in which a file is not what it was."""
    run = folder / "runs" / tiny_study().cells[3].run
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    return run


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b"{"),
        ("result.json", b"{}"),
        ("result.json", None),
        ("provenance.json", b""),
        ("heads.csv", b"epoch,layer\n"),
        ("heads.csv", None),
        ("history.csv", b"\xff"),
    ],
)
def test_a_complete_run_with_a_damaged_file_is_ended_again(
    folder: Path, finished: Path, name: str, content: bytes | None
) -> None:
    """From its checkpoint: nothing is trained."""
    run, recorder = damaged(folder, name, content), Recorder()
    (state,) = (state for state in StudyFolder(folder).states() if state.run == run.name)
    assert state.state == "damaged"
    assert name in state.problem or "result" in state.problem
    run_study(tiny_study(), folder, listener=recorder)
    assert (recorder.done, recorder.epochs) == ([run.name], [])
    assert [path.name for path, _ in recorder.aside] == ["provenance.json"]
    assert (run / "provenance.json.damaged-1").exists()
    assert_same_runs(folder, finished)
    assert contents(run)["history.csv"] == contents(finished)[f"runs/{run.name}/history.csv"]


@pytest.mark.parametrize(
    ("name", "content", "aside"),
    [
        ("checkpoint.safetensors", b"not tensors", "checkpoint.safetensors"),
        ("config.json", b"{", None),
        ("config.json", b'{"schema": 1, "config": {"seed": "x"}}', None),
        ("config.json", None, None),
    ],
)
def test_an_unfinished_run_that_cannot_be_continued_is_done_anew(
    folder: Path, finished: Path, name: str, content: bytes | None, aside: str | None
) -> None:
    run, recorder = damaged(folder, name, content), Recorder()
    (run / "provenance.json").unlink()
    run_study(tiny_study(), folder, listener=recorder)
    assert recorder.done == [run.name]
    assert recorder.epochs == [(run.name, 1), (run.name, 2)]
    ((path, problem),) = recorder.aside
    assert name in problem
    kept = path.with_name(f"{path.name}.damaged-1")
    assert kept.exists()
    assert path == (run / aside if aside else run)
    assert_same_runs(folder, finished)


@pytest.mark.parametrize(("change", "words"), [("seed", "holds another run"), ("schema", "has schema 99")])
def test_what_is_not_ours_is_named_and_the_others_are_done(folder: Path, change: str, words: str) -> None:
    cells = tiny_study().cells
    theirs, missing = (folder / "runs" / cells[number].run for number in (3, 6))
    stored = json.loads((theirs / "config.json").read_text())
    if change == "seed":
        stored["config"]["seed"] = 77
    else:
        stored["schema"] = 99
    (theirs / "config.json").write_text(json.dumps(stored))
    (theirs / "provenance.json").unlink()
    shutil.rmtree(missing)
    before, recorder = contents(theirs), Recorder()
    with pytest.raises(InputError) as error:
        run_study(tiny_study(), folder, listener=recorder)
    assert words in str(error.value)
    assert str(theirs) in str(error.value)
    assert recorder.done == [missing.name]
    assert contents(theirs) == before


OTHERS = {
    "name: tiny there, other here": dataclasses.replace(tiny_study(), name="other"),
    "scale: full there, small here": tiny_study().small(),
    "levels of smoothing: 0, 0.1 there, 0, 0.2 here": dataclasses.replace(
        tiny_study(), factors={**FACTORS, "smoothing": (0.0, 0.2)}
    ),
    "levels of lr: none there, 0.1, 0.2 here": dataclasses.replace(tiny_study(), factors={**FACTORS, "lr": (0.1, 0.2)}),
    "conditions: +CutMix, +LabelSmoothing, Baseline, Modern there, Baseline here": tiny_study().only([{}]),
    "with other settings (protocol.max_epochs: 2 there, 3 here)": tiny_study(epochs=3),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_the_folder_of_another_study_is_refused(folder: Path, difference: str) -> None:
    before = contents(folder)
    with pytest.raises(InputError) as error:
        run_study(OTHERS[difference], folder)
    assert difference in str(error.value)
    assert "choose another --out" in str(error.value)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 99}, "has schema 99"),
        ({"schema": 0}, "was written by an older nearsight"),
    ],
)
def test_a_folder_of_another_schema_is_refused(folder: Path, change: dict[str, Any], words: str) -> None:
    stored = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(stored | change))
    with pytest.raises(InputError, match=words):
        run_study(tiny_study(), folder)


def test_settings_this_version_does_not_know(folder: Path) -> None:
    stored = json.loads((folder / "study.json").read_text())
    stored["cells"][0]["config"]["protocol"]["momentum"] = 1.0
    (folder / "study.json").write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"other settings: protocol\.momentum is not a setting this version knows"):
        run_study(tiny_study(), folder)


def test_refusals_write_nothing(tmp_path: Path) -> None:
    real = Study(RunConfig(data=dataclasses.replace(tiny_base().data, name="cifar100")), factors={"lr": (0.1, 0.2)})
    with pytest.raises(InputError, match="cifar100 is not in"):
        run_study(real, tmp_path / "study", data_dir=tmp_path)
    with pytest.raises(InputError, match="a study at small scale has none"):
        run_study(tiny_study().small(), tmp_path / "results" / "tiny")
    with pytest.raises(InputError, match="cells_per_stack is 0"):
        run_study(tiny_study(), tmp_path / "study", cells_per_stack=0)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs.csv").write_text("precious")
    with pytest.raises(InputError, match=r"holds runs\.csv but no study\.json"):
        run_study(tiny_study(), tmp_path)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InputError, match="is a file"):
        run_study(tiny_study(), tmp_path / "file")


def test_a_table_put_down_late_does_not_hide_what_was_completed_since(
    folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another runner completes a run, and writes its table, while this one still holds an older one in its hands."""
    late = tiny_study().cells[-1].run
    shutil.rmtree(folder / "runs" / late)
    write = folder_module.write_text

    def write_slowly(path: Path, text: str) -> None:
        if not (folder / "runs" / late).exists():
            shutil.copytree(finished / "runs" / late, folder / "runs" / late)
            shutil.copy(finished / "runs.csv", folder / "runs.csv")
        write(path, text)

    monkeypatch.setattr(folder_module, "write_text", write_slowly)
    StudyFolder(folder).write_runs()
    assert (folder / "runs.csv").read_bytes() == (finished / "runs.csv").read_bytes()


class Overtaken(Recorder):
    """In the first epoch, this runner seems to have been silent for long, and another takes one of its cells."""

    def __init__(self, path: Path, mine: Locks) -> None:
        super().__init__()
        self.path, self.mine, self.other, self.lost = path, mine, Locks(path / "locks"), ""

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        super().epoch(config, row)
        if not self.lost:
            self.lost = config.identity
            self.seem_silent(self.path / "locks" / f"{config.identity}.0")
            assert self.other.take(config.identity)
            self.mine.touch()

    def seem_silent(self, lock: Path) -> None:
        os.utime(lock, (time.time() - SECONDS_UNTIL_STALE - 5,) * 2)


def test_a_runner_that_was_overtaken_does_the_rest(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "study"
    locks = Locks(path / "locks")
    monkeypatch.setattr(StudyFolder, "locks", lambda self: locks)
    listener = Overtaken(path, locks)
    run_study(tiny_study(), path, listener=listener)
    runs = {cell.run for cell in tiny_study().cells}
    assert set(listener.done) == runs - {listener.lost}
    assert listener.epochs.count((listener.lost, 2)) == 0
    (state,) = (state for state in StudyFolder(path).states() if state.run == listener.lost)
    assert state.state == "running"
    assert state.epochs == 1
    assert state.holder is not None
    monkeypatch.undo()
    listener.other.release(listener.lost)
    run_study(tiny_study(), path)
    assert_same_runs(path, finished)
