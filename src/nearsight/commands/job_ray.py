"""Jobs that depend on nothing but themselves, as tasks of a Ray cluster; a job that loses its worker or its node is
done again by another one."""

import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

import torch

from nearsight.commands.jobs import Job, work_off
from nearsight.data.locations import ENVIRONMENT_VARIABLE
from nearsight.errors import InputError
from nearsight.study.executors.ray_cluster import connected, device_of_workers
from nearsight.train import TrainingError

_MOST_WAITING = 1000
"""Tasks that Ray is given at a time; so many nodes may join at once and find something to do."""
_made: dict[str, Callable[[Any], None]] = {}
"""Of a worker: what it has to do jobs with, by whom they are of; it keeps the last."""


def run_on_ray(
    make: Callable[[str], Callable[[Job], None]],
    jobs: Iterable[Job],
    *,
    address: str,
    device: str,
    lost: Callable[[Job, str], None],
) -> Iterator[Job]:
    """Yield each job once it is done.

    All nodes have the same nearsight, and the working directory under the same path.

    Args:
        make: called in each worker with its device; what it returns does one job after the other.
        device: auto, cpu or cuda: a GPU for each task.
        lost: told when a job has lost its worker, and how, before it is given to another.
    """
    with connected(address) as ray:
        try:
            yield from work_off(_Tasks[Job](ray, make, device_of_workers(ray, device)), jobs, lost=lost)
        except ray.exceptions.RayError as error:
            raise TrainingError(f"the Ray cluster was lost ({error}); the same command continues") from error


class _Tasks(Generic[Job]):
    def __init__(self, ray: Any, make: Callable[[str], Callable[[Job], None]], place: str) -> None:
        gpus = 1 if place == "cuda" else 0
        # Trying again is ours: Ray would do so at once, and on and on.
        self._do = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy="SPREAD")(do_as_task)
        self._ray, self._place, self._token = ray, place, uuid.uuid4().hex
        self._make = ray.put(make)
        self._here = os.getcwd(), os.environ.get(ENVIRONMENT_VARIABLE)
        self._running: dict[Any, Job] = {}
        """What Ray will give → the job it is of."""

    @property
    def num_busy(self) -> int:
        return len(self._running)

    @property
    def num_free(self) -> int:
        return _MOST_WAITING - len(self._running)

    def give(self, job: Job) -> None:
        self._running[self._do.remote(self._token, self._make, self._place, self._here, job)] = job

    def ended(self) -> Iterator[tuple[Job, str | None]]:
        for ref in self._ray.wait(list(self._running), num_returns=1)[0]:
            job = self._running.pop(ref)
            try:
                refused = self._ray.get(ref)
            except Exception as error:  # of Ray: the node or the worker died; or of the task
                cause = getattr(error, "cause", None) or error
                yield job, f"its task ended in {type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
                continue
            if refused is not None:
                raise InputError(refused)
            yield job, None


def do_as_task(
    token: str, make: Callable[[str], Callable[[Any], None]], place: str, here: tuple[str, str | None], job: Any
) -> str | None:
    """What a worker of Ray does with a job; what the user has to be told, if the job is refused."""
    if token not in _made:
        # Paths are meant as they are where the command was given.
        folder, data = here
        os.chdir(folder)
        if data is not None:
            os.environ[ENVIRONMENT_VARIABLE] = data
        torch.set_num_threads(1)
        try:
            do = make(place)
        except InputError as error:
            return str(error)
        _made.clear()
        _made[token] = do
    try:
        _made[token](job)
    except InputError as error:
        return str(error)
    return None
