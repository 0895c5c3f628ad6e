"""Real processes at a study: a stop reaches them, and runners of different engines share what is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from study_records import Recorder, events, table
from tiny_study import unmeasured

from nearsight.study import StudyFolder, run_study
from nearsight.study.executors import ProcessesExecutor
from nearsight.study.location import StudyPublisher
from nearsight.train import HistoryRow, RunConfig, Stop, StoppedError

pytestmark = pytest.mark.faults


class StoppingAtFirst(Recorder):
    """Wishes for a stop in the first epoch that it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = Stop()

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        super().epoch(config, row)
        self.stop.request("SIGTERM")


@pytest.fixture(autouse=True)
def same_bits_in_any_stack() -> Iterator[None]:
    """How sums are divided among threads depends on how many cells train together; with one thread, nothing does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_stop_reaches_the_workers_and_two_engines_share_the_rest(tmp_path: Path) -> None:
    """Workers put down what they have; then a runner here and one worker finish it, each cell once, as one would."""
    path, study = tmp_path / "study", unmeasured(seeds=2, epochs=12)
    stopping, beside, here = StoppingAtFirst(), Recorder(), Recorder()
    with pytest.raises(StoppedError, match=r"stopped by SIGTERM .*; the same command continues"):
        run_study(
            study,
            path,
            listener=stopping,
            stop=stopping.stop,
            checkpoint_every=1000,
            executor=ProcessesExecutor(workers=2),
        )
    stopped = events(path)
    assert stopped.total() > 0
    for run in (path / "runs").iterdir():
        on_disk = len(pd.read_csv(run / "history.csv")) if (run / "history.csv").exists() else 0
        assert stopped[run.name, "stopped"] == 1
        assert stopped[run.name, "epoch"] == on_disk < 12
    locks = StudyFolder(path).locks()
    assert all(locks.holder(cell.run) is None for cell in study.cells)

    engine = ProcessesExecutor(workers=1)
    other = threading.Thread(
        target=run_study, args=(study, path), kwargs={"listener": beside, "executor": engine, "cells_per_stack": 1}
    )
    other.start()
    run_study(study, path, listener=here, cells_per_stack=1)
    other.join()
    runs = [cell.run for cell in study.cells]
    assert sorted(here.done + beside.done) == sorted(runs)
    told = events(path)
    for run in runs:
        assert (told[run, "epoch"], told[run, "finished"]) == (12, 1)
    alone = run_study(study, tmp_path / "alone").path
    pd.testing.assert_frame_equal(table(path), table(alone), check_exact=True)


def test_workers_publish_what_they_finish(tmp_path: Path) -> None:
    """And nobody does again what is published."""
    location, study = StudyPublisher(f"file://{tmp_path}/there"), unmeasured(seeds=1, epochs=2)
    run_study(study, tmp_path / "here", executor=ProcessesExecutor(workers=1), location=location)
    assert location.published() == {cell.run for cell in study.cells}
    again = Recorder()
    run_study(study, tmp_path / "elsewhere", listener=again, location=location)
    assert again.done == []
    pd.testing.assert_frame_equal(table(tmp_path / "elsewhere"), table(tmp_path / "here"), check_exact=True)


def is_anybody_in(group: int) -> bool:
    """Whether a process group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_ends_its_workers_well(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """SIGINT as a terminal sends it, to all processes at once."""
    path = tmp_path / "study"
    study = ("study", "run", "ablation-cifar100", "--scale", "small", "--seeds", "1", "--out", str(path))
    engine = ("--engine", "processes", "--workers", "1", "--device", "cpu")
    command = [sys.executable, "-m", "nearsight", *study, *engine]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while process.poll() is None and not list(path.glob("runs/*/history.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == code, told
    assert told.splitlines()[-1].startswith(f"nearsight: stopped by {number.name} after epoch")
    deadline = time.monotonic() + 30
    while is_anybody_in(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sum(count for (_, event), count in events(path).items() if event == "stopped") == 8
