"""Progress of measuring, and of several workers at a study: a bar on a terminal, plain lines elsewhere."""

from functools import partial

import pytest
import torch
from rich.console import Console

from nearsight.commands import progress, study_progress
from nearsight.commands.progress import MeasuringProgress
from nearsight.commands.study_progress import StudyProgress
from nearsight.papers import find_study
from nearsight.train import HistoryRow

BATCHES = [torch.full((3, 1), float(number)) for number in range(4)]


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with MeasuringProgress("a model", 12) as counting:
        assert list(counting.counted(BATCHES)) == BATCHES
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == ["a model: 3/12 images", "a model: 6/12 images", "a model: 9/12 images"]
    assert last.startswith("a model: 12 images measured in ")


def test_a_start_from_the_beginning_counts_from_the_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with MeasuringProgress("a model", 12) as counting:
        next(counting.counted(BATCHES))
        list(counting.counted(BATCHES))
    assert capsys.readouterr().err.startswith("a model: 12 images measured in ")


def test_a_failure_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), MeasuringProgress("a model", 12):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Console", partial(Console, force_terminal=True, width=100))
    with MeasuringProgress("a [model]", 12) as counting:
        list(counting.counted(BATCHES))
    shown = capsys.readouterr().err
    assert "a [model]" in shown
    assert "12/12" in shown
    assert "measured in" not in shown


STEPS, SECONDS = 10, 2.0


def row(epoch: int) -> HistoryRow:
    return HistoryRow(epoch=epoch, train_loss=1.0, val_loss=1.0, val_acc=0.5, lr=1e-3, seconds=SECONDS)


def test_workers_are_shown_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker that starts, or is lost, takes nothing away from what the others have done."""
    monkeypatch.setattr(study_progress, "SECONDS_BETWEEN_LINES", -1.0)  # every epoch says something
    clock = [0.0]
    monkeypatch.setattr(study_progress.time, "perf_counter", lambda: clock[0])
    cells = find_study("ablation-cifar100")(seeds=2).cells
    first, second = cells[:8], cells[8:]
    one_stack = 8 * STEPS * 128 / SECONDS
    progress = StudyProgress("ablation")
    progress.planned(cells, cells)
    for stack in (first, second):
        progress.taken(stack)
        for cell in stack:
            progress.started(cell.config, 0, STEPS)
        clock[0] += 60.0
        for cell in stack:
            progress.epoch(cell.config, row(1))

    def last() -> str:
        return capsys.readouterr().err.splitlines()[-1]

    epochs_left = sum(cell.config.protocol.max_epochs - 1 for cell in cells)
    told = f"ablation: 0 of 16 cells done, 16 at epoch 1, {2 * one_stack:,.0f} images/s, "
    assert last() == told + f"at most {epochs_left / 8:.0f} min left"  # sixteen epochs in two minutes
    progress.released(first)
    progress.worker_lost(first, "worker process 7 was killed by SIGKILL", 1.0)
    assert last() == (
        "ablation: a worker was lost (worker process 7 was killed by SIGKILL) at 8 cells; they are tried again in 1 s"
    )
    progress.epoch(second[0].config, row(2))
    assert last().startswith(f"ablation: 0 of 16 cells done, 8 at epochs 1 to 2, {one_stack:,.0f} images/s")
    progress.worker_lost(first[:1], "it ended in RuntimeError: CUDA error", None)
    assert last().endswith("at 1 cell; they are not tried again")
