"""A pool of real processes, that are killed, fail, and refuse. They are forked here, which is quick."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nearsight.errors import InputError
from nearsight.train import Stop
from nearsight.work import Attempt, Driver, Outcome, Retries, Tell, places, process_pool


def do(folder: Path, deadly: dict[int, int], kind: str, attempt: Attempt[int], tell: Tell, stop: Stop) -> Outcome[str]:
    """Put down that it was tried; a job that is deadly ends its process so many times."""
    for job in attempt.items:
        tries = len(list(folder.glob(f"{job}-*")))
        (folder / f"{job}-{os.getpid()}-{tries}").touch()
        tell(f"at {job}")
        if tries < deadly.get(job, 0):
            if kind == "refuse":
                return Outcome(result=f"job {job} is wrong")
            if kind == "fail":
                raise RuntimeError("CUDA error")
            if kind == "linger":
                while stop.by is None:
                    time.sleep(0.01)
                return Outcome(stopped_by=stop.by)
            os.kill(os.getpid(), signal.SIGTERM if kind == "end" else signal.SIGKILL)
            if stop.by is not None:
                return Outcome(stopped_by=stop.by)
    return Outcome()


def make(folder: Path, deadly: dict[int, int], kind: str, place: str) -> Callable[..., Outcome[str]]:
    return partial(do, folder, deadly, kind)


class Recording(Driver[int, str]):
    """Notes what happens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.done: list[int] = []
        self.again: list[tuple[int, str]] = []
        self.given_up: list[tuple[int, str]] = []
        self.told: list[str] = []

    def ended(self, attempt: Attempt[int], outcome: Outcome[str]) -> None:
        if outcome.result is not None:
            raise InputError(outcome.result)
        if outcome.stopped_by is None:
            self.done += attempt.items

    def lost(self, attempt: Attempt[int], left: Sequence[int], problem: str, seconds: float | None) -> None:
        (self.again if seconds is not None else self.given_up).extend((job, problem) for job in left)

    def heard(self, attempt: Attempt[int], message: str) -> bool:
        self.told.append(message)
        if self._stop.by is None and message == "at 3" and self.is_to_be_stopped:
            self._stop.request("SIGTERM")
        return False

    is_to_be_stopped = False


def run(folder: Path, deadly: dict[int, int], kind: str = "kill", jobs: Iterable[int] = range(8)) -> Recording:
    retries = Retries(most=2, first_wait=0.0)
    with process_pool(partial(make, folder, deadly, kind), ["cpu"] * 3, start_method="fork") as pool:
        driver = Recording(pool, retries, Stop())
        assert driver.drive([job] for job in jobs) == 0
    return driver


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("kill", "was killed by SIGKILL"),
        ("fail", "RuntimeError: CUDA error"),
        ("end", "the worker was stopped by SIGTERM"),
    ],
)
def test_what_loses_its_process_is_done_again_and_all_else_once(kind: str, said: str, tmp_path: Path) -> None:
    driver = run(tmp_path, {2: 1, 5: 2}, kind)
    assert sorted(driver.done) == list(range(8))
    assert Counter(job for job, _ in driver.again) == {2: 1, 5: 2}
    assert all(said in problem for _, problem in driver.again)
    tries = Counter(int(path.name.split("-")[0]) for path in tmp_path.iterdir())
    assert tries == {job: {2: 2, 5: 3}.get(job, 1) for job in range(8)}
    assert Counter(driver.told) == {f"at {job}": number for job, number in tries.items()}


def test_a_job_that_costs_every_process_is_given_up_and_all_else_done(tmp_path: Path) -> None:
    driver = run(tmp_path, {1: 99})
    assert sorted(driver.done) == [0, *range(2, 8)]
    assert [job for job, _ in driver.again + driver.given_up] == [1, 1, 1]
    assert len(driver.given_up) == 1
    assert "was killed by SIGKILL" in driver.given_up[0][1]


def nobody_is_left(folder: Path) -> bool:
    for path in folder.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.split("-")[1]), 0)
    return True


def test_what_is_wrong_with_a_job_is_said_at_once_and_nobody_is_left(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="job 0 is wrong"):
        run(tmp_path, {0: 1}, "refuse")
    assert len(list(tmp_path.glob("0-*"))) == 1
    assert nobody_is_left(tmp_path)


def test_a_stop_reaches_all_workers(tmp_path: Path) -> None:
    """Also those that are lost meanwhile; what was not begun is counted."""
    deadly = dict.fromkeys(range(1, 8), 1)
    with process_pool(partial(make, tmp_path, deadly, "linger"), ["cpu"] * 3, start_method="fork") as pool:
        driver = Recording(pool, Retries(), Stop())
        driver.is_to_be_stopped = True
        assert driver.drive([job] for job in range(8)) == 4
    assert driver.done == [0]
    assert not driver.again
    assert nobody_is_left(tmp_path)


def test_no_jobs_need_no_processes(tmp_path: Path) -> None:
    assert run(tmp_path, {}, jobs=()).done == []
    assert not list(tmp_path.iterdir())


def test_one_process_per_gpu_or_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    assert places(torch.device("cuda"), None) == ["cuda:0", "cuda:1"]
    assert places(torch.device("cuda"), 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert places(torch.device("cuda:1"), None) == ["cuda:1"]
    assert places(torch.device("cpu"), None) == ["cpu"] * 3
    assert places(torch.device("cpu"), 1) == ["cpu"]
