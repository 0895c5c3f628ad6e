"""A pool of tasks of a Ray cluster, whose nodes may come and go. Ray is imported when it is asked for.

Ray places the tasks, but retries are ours: Ray would retry at once, without end or not at all, and could not let a new
worker know which locks are void. So its tasks have no retries of their own.
"""

import contextlib
import importlib
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Generic

import torch

from nearsight.data.locations import ENVIRONMENT_VARIABLE
from nearsight.errors import InputError
from nearsight.train import Stop, TrainingError
from nearsight.work.pool import Attempt, Do, Ended, Event, Heard, Item, Lost, Make, Outcome, Result

_SECONDS_BETWEEN_REPORTS = 0.5
_MOST_WAITING = 1000
"""Tasks that Ray is given at a time; so many nodes may join at once and find something to do."""


def import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(f"Ray cannot be imported ({error}); install it with `pip install nearsight[ray]`") from error


def check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"{device!r} is no device of Ray's workers; use auto, cpu or cuda")


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster; one that the caller is connected to already stays so."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    with _own_signals():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise InputError(
                f"no Ray cluster at {address!r}; start one with `ray start --head`, or use --address local"
            ) from error
        except RuntimeError as error:  # another version of Ray, say
            raise InputError(
                f"the Ray cluster at {address!r} cannot be used: {' '.join(str(error).split())}"
            ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray sets handlers that end the process at once, but a study has better ones."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it is not Python's
                signal.signal(number, handler)


@contextlib.contextmanager
def ray_pool(make: Make[Item, Result], *, address: str, device: str, cpus: int = 1) -> Iterator["_Tasks[Item, Result]"]:
    """Tasks on a cluster whose nodes all have the same nearsight, and files under the same paths.

    Args:
        address: auto: the cluster that runs here; local: a new one of this machine alone; else where its head is.
        device: of the workers; auto: a GPU for each, if the cluster has any now.
        cpus: cores for each task.
    """
    with connected(address) as ray:
        try:
            if device == "auto":
                device = "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            board = ray.remote(num_cpus=0, scheduling_strategy=here)(_Board).remote()
            try:
                yield _Tasks(ray, board, make, device, cpus)
            finally:
                ray.kill(board)
        except ray.exceptions.RayError as error:
            raise TrainingError(f"the Ray cluster was lost ({error}); the same command continues") from error


class _Board:
    """Where workers put what happens, and read whether to stop. An actor on the driver's node, so it ends with it."""

    def __init__(self) -> None:
        self._heard: list[Heard] = []
        self._begun: set[str] = set()
        self._stopped_by: str | None = None

    def put(self, token: str, messages: Sequence[Any]) -> str | None:
        """Who requested a stop, if there was a request."""
        self._begun.add(token)
        self._heard += [Heard(token, message) for message in messages]
        return self._stopped_by

    def take(self) -> list[Heard]:
        heard, self._heard = self._heard, []
        return heard

    def stop(self, by: str) -> set[str]:
        """The tokens of those that have begun; all others will see the request first."""
        self._stopped_by = by
        return self._begun


class _Tasks(Generic[Item, Result]):
    """The tasks of one piece of work."""

    def __init__(self, ray: Any, board: Any, make: Make[Item, Result], device: str, cpus: int) -> None:
        self._ray, self._board = ray, board
        self._setting = (
            uuid.uuid4().hex,
            ray.put(make),
            device,
            cpus,
            os.getcwd(),
            os.environ.get(ENVIRONMENT_VARIABLE),
        )
        gpus = 1 if device == "cuda" else 0
        self._do = ray.remote(
            num_cpus=cpus, num_gpus=gpus, max_retries=0, retry_exceptions=False, scheduling_strategy="SPREAD"
        )(do_as_task)
        found = ray.cluster_resources()
        self.num_wanted = max(1, int(found.get("GPU", 0) if gpus else found.get("CPU", 0) // cpus))
        self._running: dict[Any, str] = {}
        """What Ray will give → the token of the attempt."""

    @property
    def num_free(self) -> int:
        return _MOST_WAITING - len(self._running)

    def give(self, attempt: Attempt[Item]) -> None:
        self._running[self._do.remote(attempt, self._board, *self._setting)] = attempt.token

    def listen(self, seconds: float) -> list[Event[Result]]:
        ended: list[Any] = []
        if self._running:
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        else:
            threading.Event().wait(seconds)
        # After that: whatever ended well has put all its messages there before.
        heard: list[Event[Result]] = self._ray.get(self._board.take.remote())
        return heard + [self._end_of(ref) for ref in ended]

    def _end_of(self, ref: Any) -> Event[Result]:
        token = self._running.pop(ref)
        try:
            return Ended(token, self._ray.get(ref))
        except Exception as error:  # of Ray: the node or the worker died; or of the task
            cause = getattr(error, "cause", None) or error
            return Lost(token, f"it ended in {type(cause).__name__}: {' '.join(str(cause).split())[:200]}")

    def stop(self, by: str) -> None:
        """Those that have begun read it from the board; the others need not begin."""
        begun = self._ray.get(self._board.stop.remote(by))
        for ref, token in self._running.items():
            if token not in begun:
                self._ray.cancel(ref)


_made: dict[str, Do[Any, Any]] = {}
"""Of a worker of Ray: the last work it did, and what it does that with."""


def do_as_task(
    attempt: Attempt[Any],
    board: Any,
    name: str,
    make: Make[Any, Any],
    device: str,
    cpus: int,
    folder: str,
    data: str | None,
) -> Outcome[Any]:
    """What a worker of Ray does with an attempt. `name` is that of the work, `folder` and `data` are its driver's."""
    ray = import_ray()
    stop, over, unsent = Stop(), threading.Event(), list[Any]()
    changing = threading.Lock()

    def report() -> None:
        with changing:
            messages = unsent.copy()
            unsent.clear()
            try:
                by = ray.get(board.put.remote(attempt.token, messages))
            except ray.exceptions.RayError:
                by = "the end of the process that started it"
        if by is not None:
            stop.request(by)

    def report_now_and_then() -> None:
        while not over.wait(_SECONDS_BETWEEN_REPORTS):
            report()

    def tell(message: Any, *, at_once: bool = False) -> None:
        with changing:
            unsent.append(message)
        if at_once:
            report()

    report()
    if stop.by is not None:
        return Outcome(result=None, stopped_by=stop.by)
    torch.set_num_threads(cpus)
    thread = threading.Thread(target=report_now_and_then, name="reports", daemon=True)
    thread.start()
    try:
        if name not in _made:
            with contextlib.suppress(OSError):  # paths are meant as they are where the command was given
                os.chdir(folder)
            if data is not None:
                os.environ[ENVIRONMENT_VARIABLE] = data
            do = make(device)
            _made.clear()
            _made[name] = do
        return _made[name](attempt, tell, stop)
    finally:
        over.set()
        thread.join()
        report()
