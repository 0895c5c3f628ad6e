"""Jobs in processes: real ones, that are killed, fail, and refuse. They are forked here, which is quick."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nearsight.commands.job_processes import run_in_processes
from nearsight.commands.jobs import LostJobError
from nearsight.errors import InputError
from nearsight.study.executors.places import places


def do(folder: Path, deadly: dict[int, int], kind: str, job: int) -> None:
    """Put down that it was tried; a job that is deadly ends its process so many times."""
    tries = len(list(folder.glob(f"{job}-*")))
    (folder / f"{job}-{os.getpid()}-{tries}").touch()
    if tries < deadly.get(job, 0):
        if kind == "refuse":
            raise InputError(f"job {job} is wrong")
        if kind == "fail":
            raise RuntimeError("CUDA error")
        os.kill(os.getpid(), signal.SIGKILL)


def make(folder: Path, deadly: dict[int, int], kind: str, place: str) -> Callable[[int], None]:
    return partial(do, folder, deadly, kind)


def run(
    folder: Path, deadly: dict[int, int], kind: str = "kill", jobs: Iterable[int] = range(8), **settings: Any
) -> tuple[list[int], list[tuple[int, str]]]:
    """The jobs that were done, and those that were lost, with how."""
    lost: list[tuple[int, str]] = []
    tell: Callable[[int, str], None] = lambda job, problem: lost.append((job, problem))  # noqa: E731
    processes = run_in_processes(
        partial(make, folder, deadly, kind), jobs, ["cpu"] * 3, lost=tell, start_method="fork", **settings
    )
    return list(processes), lost


@pytest.mark.parametrize(("kind", "said"), [("kill", "was killed by SIGKILL"), ("fail", "RuntimeError: CUDA error")])
def test_what_loses_its_process_is_done_again_and_all_else_once(kind: str, said: str, tmp_path: Path) -> None:
    done, lost = run(tmp_path, {2: 1, 5: 2}, kind)
    assert sorted(done) == list(range(8))
    assert Counter(job for job, _ in lost) == {2: 1, 5: 2}
    assert all(said in problem for _, problem in lost)
    tries = Counter(int(path.name.split("-")[0]) for path in tmp_path.iterdir())
    assert tries == {job: {2: 2, 5: 3}.get(job, 1) for job in range(8)}


def test_a_job_that_costs_every_process_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(LostJobError, match=r"1 was given up after it had lost 2 processes.*killed by SIGKILL"):
        run(tmp_path, {1: 99}, most_losses=2)


def test_what_is_wrong_with_a_job_is_said_at_once_and_nobody_is_left(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="job 0 is wrong"):
        run(tmp_path, {0: 1}, "refuse")
    assert len(list(tmp_path.glob("0-*"))) == 1
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.split("-")[1]), 0)


def test_no_jobs_need_no_processes(tmp_path: Path) -> None:
    assert run(tmp_path, {}, jobs=()) == ([], [])
    assert not list(tmp_path.iterdir())


def test_one_process_per_gpu_or_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    assert places(torch.device("cuda"), None) == ["cuda:0", "cuda:1"]
    assert places(torch.device("cuda"), 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert places(torch.device("cuda:1"), None) == ["cuda:1"]
    assert places(torch.device("cpu"), None) == ["cpu"] * 3
    assert places(torch.device("cpu"), 1) == ["cpu"]
