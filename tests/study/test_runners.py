"""Several real processes at one study: they share its cells, and one that is killed is replaced."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import tiny_study as tiny

from nearsight.study import StudyFolder, run_study


def runner(path: Path, *, seeds: int, epochs: int) -> subprocess.Popen[str]:
    command = [sys.executable, tiny.__file__, str(path), str(seeds), str(epochs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_runners_share_the_cells(tmp_path: Path) -> None:
    path, study = tmp_path / "study", tiny.unmeasured(seeds=2, epochs=10)
    processes = [runner(path, seeds=2, epochs=10) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    path.mkdir()
    done = []
    for process in processes:
        printed, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        done.append(set(printed.split()))
    runs = [cell.run for cell in study.cells]
    assert done[0] | done[1] == set(runs)
    assert not done[0] & done[1]
    assert all(done)
    for run in runs:
        told = events(path / "runs" / run)
        assert (told.count("started"), told.count("epoch"), told.count("finished")) == (1, 10, 1)
    assert list(pd.read_csv(path / "runs.csv", dtype={"run": str})["run"]) == runs
    assert list((path / "locks").iterdir()) == []


def test_a_killed_runner_is_replaced_at_once(tmp_path: Path) -> None:
    path, study = tmp_path / "study", tiny.unmeasured(seeds=1, epochs=40)
    process = runner(path, seeds=1, epochs=40)
    path.mkdir()
    started = [path / "runs" / cell.run / "history.csv" for cell in study.cells[:2]]
    wait_until(process, lambda: all(file.exists() for file in started))
    assert [state.state for state in StudyFolder(path).states()] == ["running", "running", "missing", "missing"]
    holder = StudyFolder(path).locks().holder(study.cells[0].run)
    assert holder is not None
    assert holder.owner is not None
    assert holder.owner.pid == process.pid
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [state.state for state in StudyFolder(path).states()] == ["started", "started", "missing", "missing"]
    run_study(study, path, checkpoint_every=100)
    for cell in study.cells:
        history = pd.read_csv(path / "runs" / cell.run / "history.csv")
        assert list(history["epoch"]) == list(range(1, 41))
    assert {state.state for state in StudyFolder(path).states()} == {"done"}
