"""One queue: cells of several studies in it, what two of them share, its order, and several runners at it."""

import dataclasses
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from study_records import events, table
from tiny_study import tiny_base, tiny_study

from nearsight.augment import CutMix, Mixup
from nearsight.augment.pipeline import one_thread
from nearsight.cli import main
from nearsight.commands import study as study_command
from nearsight.errors import InputError
from nearsight.study import OFF, Cell, Study, StudyFolder, StudyListener, StudyPart, run_studies, run_study
from nearsight.study.executors import ProcessesExecutor
from nearsight.study.lock import Locks
from nearsight.train import HistoryRow, RunConfig, RunFolder, Stop, StoppedError, TrainingError


def other_study() -> Study:
    """Two conditions that the tiny study has too, and two of its own; one seed."""
    factors = {"cutmix": (OFF, CutMix(p=0.5)), "mixup": (OFF, Mixup(p=0.5))}
    return Study(tiny_base(), factors=factors, seeds=1, name="other")


class Recorder(StudyListener):
    def __init__(self) -> None:
        self.planned_runs: list[str] = []
        self.now: set[str] = set()
        self.most_at_once = 0
        self.started_runs: list[str] = []
        self.done: list[str] = []
        self.epochs: list[tuple[str, int]] = []

    def planned(self, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        self.planned_runs = [cell.run for cell in missing]

    def taken(self, cells: Sequence[Cell]) -> None:
        self.now |= {cell.run for cell in cells}
        self.most_at_once = max(self.most_at_once, len(self.now))

    def released(self, cells: Sequence[Cell]) -> None:
        self.now -= {cell.run for cell in cells}

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self.started_runs.append(config.identity)

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.epochs.append((config.identity, row.epoch))

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        assert folder.is_complete
        self.done.append(config.identity)


def parts(root: Path, *listeners: StudyListener) -> list[StudyPart]:
    studies = tiny_study(), other_study()
    told = listeners or (StudyListener(), StudyListener())
    return [
        StudyPart(study=study, path=root / study.name, listener=listener)
        for study, listener in zip(studies, told, strict=True)
    ]


@pytest.fixture(scope="module")
def other_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with one_thread():
        return run_study(other_study(), tmp_path_factory.mktemp("other") / "study").path


SMALL = ("--scale", "small", "--device", "cpu")
SHARED = {cell.run for cell in tiny_study().cells} & {cell.run for cell in other_study().cells}


def assert_same(root: Path, finished: Path, other_alone: Path) -> None:
    for name, expected in (("tiny", finished), ("other", other_alone)):
        pd.testing.assert_frame_equal(table(root / name), table(expected), check_exact=True)
        for run in (expected / "runs").iterdir():
            for file in ("model.safetensors", "heads.csv", "result.json", "config.json"):
                assert (root / name / "runs" / run.name / file).read_bytes() == (run / file).read_bytes()
        assert list((root / name / "locks").iterdir()) == []


def test_two_studies_wait_in_one_queue_and_what_they_share_is_trained_once(
    tmp_path: Path, finished: Path, other_alone: Path
) -> None:
    tiny, other = Recorder(), Recorder()
    folders = run_studies(parts(tmp_path, tiny, other), cells_per_stack=3)
    assert [folder.path.name for folder in folders] == ["tiny", "other"]
    assert_same(tmp_path, finished, other_alone)
    assert len(SHARED) == 2
    assert not SHARED & set(other.started_runs)
    assert len(tiny.started_runs) + len(other.started_runs) == 8 + 4 - 2
    assert sorted(tiny.done) == sorted(cell.run for cell in tiny_study().cells)
    assert sorted(other.done) == sorted(cell.run for cell in other_study().cells)
    assert tiny.most_at_once <= 3
    assert not tiny.now
    assert not other.now
    # The description, tables and plan of each are its own.
    assert json.loads((tmp_path / "other" / "study.json").read_text())["name"] == "other"
    assert len(pd.read_csv(tmp_path / "other" / "runs.csv")) == 4
    again = Recorder()
    run_studies(parts(tmp_path, again, again))
    assert not again.started_runs


def test_the_last_of_one_study_train_beside_the_first_of_the_next(tmp_path: Path) -> None:
    """Eight cells in slots of five leave two slots free, which the other study's cells take at once."""

    now, seen = set[str](), set[int]()

    class Together(StudyListener):
        def taken(self, cells: Sequence[Cell]) -> None:
            now.update(cell.run for cell in cells)

        def released(self, cells: Sequence[Cell]) -> None:
            now.difference_update(cell.run for cell in cells)

        def epoch(self, config: RunConfig, row: HistoryRow) -> None:
            seen.add(len(now))

    run_studies(parts(tmp_path, Together(), Together()), cells_per_stack=5)
    assert seen == {5}


def test_what_one_study_has_already_is_not_trained_for_the_other(
    tmp_path: Path, folder: Path, finished: Path, other_alone: Path
) -> None:
    shutil.move(folder, tmp_path / "tiny")
    other = Recorder()
    run_studies(parts(tmp_path, StudyListener(), other))
    assert len(other.started_runs) == 2
    assert_same(tmp_path, finished, other_alone)


class Asking(Recorder):
    """Requests a stop after so many epochs of cells."""

    def __init__(self, after: int, stop: Stop) -> None:
        super().__init__()
        self.after, self.stop = after, stop

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        super().epoch(config, row)
        if len(self.epochs) == self.after:
            self.stop.request("SIGTERM")


@pytest.mark.parametrize("after", [1, 5, 9, 13])
def test_a_stop_of_two_studies_and_the_same_call_continues(
    tmp_path: Path, finished: Path, other_alone: Path, after: int
) -> None:
    stop = Stop()
    first = Asking(after, stop)
    with pytest.raises(StoppedError, match="the same command continues"):
        run_studies(parts(tmp_path, first, first), stop=stop, cells_per_stack=3, checkpoint_every=10)
    for study in (tiny_study(), other_study()):
        locks = Locks(tmp_path / study.name / "locks")
        assert all(locks.holder(cell.run) is None for cell in study.cells)
    second = Recorder()
    run_studies(parts(tmp_path, second, second), cells_per_stack=2)
    assert not set(first.epochs) & set(second.epochs)
    assert len(first.epochs) + len(second.epochs) == 2 * 10
    assert_same(tmp_path, finished, other_alone)


def test_a_cell_that_fails_takes_no_other_down(tmp_path: Path, finished: Path) -> None:
    base = dataclasses.replace(tiny_base(), protocol=dataclasses.replace(tiny_base().protocol, warmup_epochs=0))
    wild = Study(base, factors={"lr": (1e-3, 1e30)}, seeds=1, name="wild")
    tame = StudyPart(study=tiny_study(), path=tmp_path / "tiny")
    with pytest.raises(TrainingError, match=r"^the loss of .*wild.* became nan in epoch 1"):
        run_studies([StudyPart(study=wild, path=tmp_path / "wild"), tame], cells_per_stack=3)
    pd.testing.assert_frame_equal(table(tmp_path / "tiny"), table(finished), check_exact=True)
    assert list(pd.read_csv(tmp_path / "wild" / "runs.csv")["lr"]) == [0.001]


def test_two_runners_at_one_queue(tmp_path: Path, finished: Path) -> None:
    """Each holds the locks of what it trains and no others, so the second one finds the rest."""
    both = threading.Barrier(2, timeout=60)

    class Beside(Recorder):
        def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
            super().started(config, epochs_done, steps_per_epoch)
            if len(self.started_runs) == 1:
                both.wait()  # the second one looks for cells while the first one trains

    here, beside = Beside(), Beside()
    path = tmp_path / "study"
    StudyFolder(path).claim(tiny_study())
    thread = threading.Thread(
        target=run_study, args=(tiny_study(), path), kwargs={"listener": beside, "cells_per_stack": 2}
    )
    thread.start()
    run_study(tiny_study(), path, listener=here, cells_per_stack=2)
    thread.join()
    assert here.done
    assert beside.done
    assert sorted(here.done + beside.done) == sorted(cell.run for cell in tiny_study().cells)
    assert max(here.most_at_once, beside.most_at_once) == 2
    told = events(path)
    assert all(told[cell.run, "finished"] == told[cell.run, "started"] == 1 for cell in tiny_study().cells)
    StudyFolder(path).write_runs()
    pd.testing.assert_frame_equal(table(path), table(finished), check_exact=True)


def test_what_was_begun_goes_on_first_and_then_the_longest(tmp_path: Path, folder: Path) -> None:
    """The finished runs of a condition say how long it takes; before there are any, the recipe does."""
    study = tiny_study()
    first_seed = study.cells[:4]
    for cell, epochs in zip(first_seed, (1, 2, 2, 1), strict=True):
        path = folder / "runs" / cell.run / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"epochs": epochs}))
        (path.parent / "checksums.json").unlink()
        history = path.parent / "history.csv"
        history.write_text("\n".join(history.read_text().splitlines()[: 1 + epochs]) + "\n")
    begun = study.cells[4]
    for cell in study.cells[4:]:
        shutil.rmtree(folder / "runs" / cell.run)
    shutil.copytree(folder / "runs" / first_seed[0].run, folder / "runs" / begun.run)
    for name in ("provenance.json", "config.json"):
        (folder / "runs" / begun.run / name).unlink()
    recorder = Recorder()
    run_study(tiny_study(seeds=3), folder, listener=recorder, cells_per_stack=1)
    conditions = [cell.condition for cell in first_seed]
    order = {cell.run: (cell.condition, cell.seed) for cell in tiny_study(seeds=3).cells}
    longest = [(conditions[place], seed) for seed in (1, 2) for place in (1, 2)]
    short = [(conditions[place], seed) for seed in (1, 2) for place in (0, 3)]
    expected = [(conditions[0], 1), *longest, *(each for each in short if each != (conditions[0], 1))]
    assert [order[run] for run in recorder.started_runs] == expected


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = StudyPart(study=tiny_study(), path=tmp_path / "x")
    with pytest.raises(InputError, match="two studies share a folder"):
        run_studies([part, StudyPart(study=other_study(), path=tmp_path / "y" / ".." / "x")])
    with pytest.raises(InputError, match="the queue of one process"):
        run_studies(parts(tmp_path), executor=ProcessesExecutor())
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "study.json").write_text("{}")
    for more, words in (
        (["--engine", "processes"], "leave out --engine processes"),
        (["--out", str(tmp_path / "z")], "of several --out is the parent of their folders"),
    ):
        assert main(["study", "run", "protocol-cifar10", "protocol-cifar100", *SMALL, *more]) == 2
        assert words in capsys.readouterr().err
    for name, words in (
        ("protocol-cifar10", "'protocol-cifar10' is named twice"),
        ("association", "'association' simulates its own data and has no queue; run it by itself"),
    ):
        assert main(["study", "run", "protocol-cifar10", name, *SMALL]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["z"]


def test_the_command_runs_two_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("protocol-cifar100", "ablation-fitted-cifar100")
    command = ["study", "run", *names, *SMALL, "--seeds", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out.count("Tables, figures, verdict and page: ") == 2
    assert captured.err.endswith("; 10 of 10 cells done\n")
    for name in names:
        assert (tmp_path / name / "verdict.md").exists()
        assert (tmp_path / name / "report.html").exists()
        (planned,) = json.loads((tmp_path / name / "plan.json").read_text())["plans"]
        assert planned["finished"] == 0
    monkeypatch.setattr(study_command, "_write_report", lambda folder, options: None)
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["studies"]
    assert [(each["folder"], each["left"]) for each in told] == [(str(tmp_path / name), []) for name in names]
