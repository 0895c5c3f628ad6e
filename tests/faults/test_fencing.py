"""Runners that are stopped (SIGSTOP) for longer than a lock lasts, taken for dead, and continued: whatever they are in
the middle of, every cell is finished by one runner, its files are those of one runner, and the one that came back says
what it lost and goes on with the rest."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from stopped_runner import STALE, Pause, outcome, start
from study_records import table
from tiny_study import unmeasured

from nearsight.study import Study, StudyFolder, run_study

SHORT, LONG = unmeasured(seeds=1, epochs=4), unmeasured(seeds=2, epochs=40)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Study], Path]:
    """Gives the folder of a study that nothing came between."""
    made: dict[int, Path] = {}

    def folder_of(study: Study) -> Path:
        key = len(study.cells)
        if key not in made:
            made[key] = run_study(study, tmp_path_factory.mktemp("calm") / "study", cells_per_stack=2).path
        return made[key]

    return folder_of


def assert_as_undisturbed(folder: Path, calm: Path) -> None:
    study = StudyFolder(folder)
    study.write_runs()
    pd.testing.assert_frame_equal(table(folder), table(calm), check_exact=True)
    assert all(study.is_done(state.run) for state in study.states())
    assert list((folder / "locks").iterdir()) == []
    assert list(folder.rglob(".*.tmp*")) == []


MOMENTS = [
    Pause(name="checkpoint.safetensors", moment="written"),
    Pause(name="checkpoint.safetensors", moment="flushed", which=3),
    Pause(name="model.safetensors", moment="written"),
    Pause(name="result.json", moment="flushed", which=2),
    Pause(name="checksums.json", moment="written"),
    Pause(name="provenance.json", moment="written"),
    Pause(name="provenance.json", moment="flushed", which=2),
]


@pytest.mark.parametrize(
    "pause",
    [
        pytest.param(each, id=f"{each.name} {each.moment}", marks=[pytest.mark.faults] if number else [])
        for number, each in enumerate(reversed(MOMENTS))
    ],
)
def test_a_runner_that_comes_back_inside_a_write(tmp_path: Path, calm: Callable[[Study], Path], pause: Pause) -> None:
    folder = tmp_path / "study"
    stopped, told = start(folder, SHORT, pause)
    assert told.poll(60)
    assert told.recv() == "stopping"
    time.sleep(STALE + 0.1)
    done, lost = outcome(start(folder, SHORT)[1])
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGCONT)
    done_later, lost_later = outcome(told)
    assert sorted(done + done_later) == sorted(cell.run for cell in SHORT.cells)
    assert lost == []
    assert lost_later
    assert set(lost_later) <= set(done)
    assert_as_undisturbed(folder, calm(SHORT))


@pytest.mark.faults
@pytest.mark.parametrize("number", range(4))
def test_of_three_runners_one_is_killed_and_one_is_stopped(
    tmp_path: Path, calm: Callable[[Study], Path], number: int
) -> None:
    draw, folder = random.Random(number), tmp_path / "study"
    runners = [start(folder, LONG) for _ in range(3)]
    deadline = time.monotonic() + 60
    while not list(folder.glob("runs/*/history.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.5))
    (killed, _), (stopped, of_stopped), (_, of_other) = runners
    assert killed.pid is not None
    assert stopped.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(STALE + draw.uniform(0.1, 1))
    os.kill(stopped.pid, signal.SIGCONT)
    finished = [run for receiver in (of_stopped, of_other) for run in outcome(receiver)[0]]
    assert len(finished) == len(set(finished)), "two runners finished the same cell"
    done, _ = outcome(start(folder, LONG)[1])  # what the others left to each other
    assert not set(done) & set(finished)
    assert_as_undisturbed(folder, calm(LONG))
