"""What a person sees while several workers are at a study."""

import pytest

from nearsight.commands import study_progress
from nearsight.commands.study_progress import StudyProgress
from nearsight.papers import find_study
from nearsight.train import HistoryRow

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
    progress.given_back(first)
    progress.worker_lost(first, "worker process 7 was killed by SIGKILL", 1.0)
    assert last() == (
        "ablation: a worker was lost (worker process 7 was killed by SIGKILL) at 8 cells; they are tried again in 1 s"
    )
    progress.epoch(second[0].config, row(2))
    assert last().startswith(f"ablation: 0 of 16 cells done, 8 at epochs 1 to 2, {one_stack:,.0f} images/s")
    progress.worker_lost(first[:1], "it ended in RuntimeError: CUDA error", None)
    assert last().endswith("at 1 cell; they are not tried again")
