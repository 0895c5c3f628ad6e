"""The cells of a study as tasks of a Ray cluster, whose nodes may come and go while it runs.

Ray places the tasks; trying again is ours: Ray would do so at once, on and on or not at all, and could not tell a new
worker whose locks hold nothing any more. So its tasks have no retries of their own.
"""

import contextlib
import dataclasses
import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nearsight.data.locations import ENVIRONMENT_VARIABLE
from nearsight.errors import check_at_least
from nearsight.study.executors.backlog import Retries
from nearsight.study.executors.driver import Driver, Ended, Heard, Lost
from nearsight.study.executors.ray_cluster import check_device, connected, device_of_workers, import_ray
from nearsight.study.executors.work import Work
from nearsight.study.executors.worker import Assignment, Message, Outcome, do
from nearsight.study.listening import StudyListener
from nearsight.train import RunName, Stop, TrainingError

_SECONDS_BETWEEN_REPORTS = 0.5
_MOST_WAITING = 1000
"""Tasks that Ray is given at a time; so many nodes may join at once and find something to do."""


@dataclass(frozen=True, kw_only=True)
class RayExecutor:
    """Stacks of cells as Ray tasks. All nodes have the same nearsight, and the study's folder under the same path."""

    address: str = "auto"
    """auto: the cluster that runs here; local: a new one of this machine alone; else where its head is, HOST:PORT."""
    device: str = "auto"
    """Of the workers; auto: a GPU for each, if the cluster has any when the study starts."""
    cpus: int = 1
    """Cores for each task."""
    retries: Retries = field(default_factory=Retries)

    def __post_init__(self) -> None:
        check_at_least("cpus", self.cpus, 1)
        check_device(self.device)
        import_ray()

    def check(self) -> None:
        if self.address != "local":  # that one is made when it is needed
            with connected(self.address):
                pass

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        # Workers have another working directory, and another environment.
        named = work.data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
        work = dataclasses.replace(
            work,
            folder=work.folder.resolve(),
            data_dir=Path(named).expanduser().resolve() if named else None,
        )
        with connected(self.address) as ray:
            try:
                with _tasks(ray, device_of_workers(ray, self.device), self.cpus) as tasks:
                    return Driver(work, tasks, self.retries, listener, stop).run()
            except ray.exceptions.RayError as error:
                raise TrainingError(f"the Ray cluster was lost ({error}); the same command continues") from error


class _Board:
    """Where workers put what happens, and read whether to stop. An actor on the driver's node, so it ends with it."""

    def __init__(self) -> None:
        self._heard: list[tuple[str, Message]] = []
        self._begun: set[str] = set()
        self._stopped_by: str | None = None

    def put(self, token: str, messages: Sequence[Message]) -> str | None:
        """Who wishes for a stop, if somebody does."""
        self._begun.add(token)
        self._heard += [(token, message) for message in messages]
        return self._stopped_by

    def take(self) -> list[tuple[str, Message]]:
        heard, self._heard = self._heard, []
        return heard

    def stop(self, by: str) -> set[str]:
        """The tokens of those that have begun; all others will read the wish first."""
        self._stopped_by = by
        return self._begun


@contextlib.contextmanager
def _tasks(ray: Any, device: str, cpus: int) -> Iterator["_Tasks"]:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(_Board).remote()
    try:
        yield _Tasks(ray, board, device, cpus)
    finally:
        ray.kill(board)


class _Tasks:
    """The tasks of one study."""

    def __init__(self, ray: Any, board: Any, device: str, cpus: int) -> None:
        self._ray, self._board, self._device, self._cpus = ray, board, device, cpus
        gpus = 1 if device == "cuda" else 0
        self._do = ray.remote(
            num_cpus=cpus, num_gpus=gpus, max_retries=0, retry_exceptions=False, scheduling_strategy="SPREAD"
        )(do_as_task)
        found = ray.cluster_resources()
        self.num_wanted = max(1, int(found.get("GPU", 0) if gpus else found.get("CPU", 0) // cpus))
        self._running: dict[Any, str] = {}
        """What Ray will give → the token of what it is of."""

    @property
    def num_free(self) -> int:
        return _MOST_WAITING - len(self._running)

    def give(self, assignment: Assignment) -> None:
        self._running[self._do.remote(assignment, self._board, self._device, self._cpus)] = assignment.token

    def listen(self, seconds: float) -> list[Heard | Ended | Lost]:
        ended: list[Any] = []
        if self._running:
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        else:
            threading.Event().wait(seconds)
        # After that: whatever ended well has put all its messages there before.
        told = self._ray.get(self._board.take.remote())
        heard: list[Heard | Ended | Lost] = [Heard(token, message) for token, message in told]
        return heard + [self._end_of(ref) for ref in ended]

    def _end_of(self, ref: Any) -> Ended | Lost:
        token = self._running.pop(ref)
        try:
            outcome = self._ray.get(ref)
        except Exception as error:  # of Ray: the node or the worker died; or of the task
            cause = getattr(error, "cause", None) or error
            return Lost(token, f"it ended in {type(cause).__name__}: {' '.join(str(cause).split())[:200]}")
        assert isinstance(outcome, Outcome)
        return Ended(token, outcome)

    def stop(self, by: str) -> None:
        """Those that have begun read it from the board; the others need not begin."""
        begun = self._ray.get(self._board.stop.remote(by))
        for ref, token in self._running.items():
            if token not in begun:
                self._ray.cancel(ref)


def do_as_task(assignment: Assignment, board: Any, device: str, cpus: int) -> Outcome:
    """What a worker of Ray does with an assignment."""
    ray = import_ray()
    stop, over, unsent = Stop(), threading.Event(), list[Message]()
    changing = threading.Lock()

    def report() -> None:
        with changing:
            messages = unsent.copy()
            unsent.clear()
            try:
                by = ray.get(board.put.remote(assignment.token, messages))
            except ray.exceptions.RayError:
                by = "the end of the process that started it"
        if by is not None:
            stop.request(by)

    def report_now_and_then() -> None:
        while not over.wait(_SECONDS_BETWEEN_REPORTS):
            report()

    def tell(message: Message) -> None:
        with changing:
            unsent.append(message)
        if message[0] in ("taken", "finished"):  # which must not be lost with the worker
            report()

    report()
    if stop.by is not None:
        return Outcome(failed={}, num_taken=0, stopped_by=stop.by)
    torch.set_num_threads(cpus)
    thread = threading.Thread(target=report_now_and_then, name="reports", daemon=True)
    thread.start()
    try:
        return do(assignment, device, tell, stop)
    finally:
        over.set()
        thread.join()
        report()
