"""What a person sees while a study runs."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from nearsight.commands import study_progress
from nearsight.commands.study_progress import StudyProgress
from nearsight.papers import find_study
from nearsight.study import Cell
from nearsight.train import HistoryRow, RunFolder

STEPS, SECONDS = 10, 2.0


class Finished(RunFolder):
    """A folder of a run that needs no disk."""

    def read_result(self) -> dict[str, object]:
        return {"epochs": 7, "test_acc": 0.625, "min_mad": 0.0421}


def row(epoch: int) -> HistoryRow:
    return HistoryRow(epoch=epoch, train_loss=1.0, val_loss=1.0, val_acc=0.5, lr=1e-3, seconds=SECONDS)


def play(progress: StudyProgress, cells: tuple[Cell, ...]) -> None:
    """A seed that was done before, a stack that loses a cell to early stopping, and the next one."""
    missing = cells[8:]
    progress.planned(cells, missing)
    progress.taken(missing[:8])
    for cell in missing[:8]:
        progress.started(cell.config, 3 if cell is missing[0] else 4, STEPS)
    for cell in missing[:8]:
        progress.epoch(cell.config, row(4 if cell is missing[0] else 5))
    progress.finished(missing[0].config, Finished(Path()))
    for cell in missing[1:8]:
        progress.epoch(cell.config, row(6))
    progress.split([2, 5])
    progress.started(missing[1].config, 6, STEPS)
    progress.epoch(missing[1].config, row(7))
    progress.taken_over(missing[2].config)
    progress.set_aside(Path("runs/x"), "config.json is damaged")


def test_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(study_progress, "SECONDS_BETWEEN_LINES", -1.0)  # every epoch says something
    cells = find_study("ablation-cifar100")(seeds=3).cells
    with StudyProgress("ablation") as progress:
        play(progress, cells)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert all(line.startswith("ablation: ") for line in lines)
    told = [line.removeprefix("ablation: ") for line in lines]
    assert told[:2] == ["8 of 24 cells done", "8 cells of seed 1"]
    # Eight cells of ten steps of 128 images in two seconds; all but one are an epoch further.
    assert told[9].startswith("8 of 24 cells done, 8 at epochs 4 to 5, 5,120 images/s, at most ")
    assert told[10] == "Baseline, seed 1: 7 epochs, test accuracy 62.5%, most local head 0.042; 9 of 24 cells done"
    assert told[17].startswith("9 of 24 cells done, 7 at epoch 6, 4,480 images/s, at most ")
    assert told[18] == "7 cells do not fit into memory at once; they continue as 2 and 5"
    assert told[19].startswith("9 of 24 cells done, 1 at epoch 7, 640 images/s")
    assert told[20] == "+AutoAugment, seed 1: another runner took it over, since this one was silent"
    assert told[21] == "set aside and done again: runs/x (config.json is damaged)"


def test_the_time_left_is_that_of_all_epochs_that_may_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell of two has done 30 of 600 epochs in a minute: 570 and 600 are left, at 30 a minute."""
    clock = [0.0]
    monkeypatch.setattr(study_progress.time, "perf_counter", lambda: clock[0])
    cells = find_study("protocol-cifar10")(seeds=1).cells
    progress = StudyProgress("x")
    progress.planned(cells, cells)
    progress.started(cells[0].config, 0, STEPS)
    for epoch in range(1, 31):
        clock[0] = 2.0 * epoch
        progress.epoch(cells[0].config, row(epoch))
    assert capsys.readouterr().err.splitlines()[-1].endswith("at most 39 min left")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=160)
    monkeypatch.setattr("nearsight.commands.progress.Console", lambda **_: terminal)
    cells = find_study("ablation-cifar100")(seeds=3).cells
    with StudyProgress("ablation") as progress:
        play(progress, cells)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "9 of 24 cells done, 1 at epoch 7, 640 images/s" in shown
    assert "Baseline, seed 1: 7 epochs, test accuracy 62.5%" in shown
    assert "━" in shown


def test_the_seeds_of_cells_that_train_together_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    cells = find_study("protocol-cifar10")(seeds=3).cells
    progress = StudyProgress("x")
    progress.taken(cells)
    assert capsys.readouterr().err == "x: 6 cells of seeds 0, 1, 2\n"
