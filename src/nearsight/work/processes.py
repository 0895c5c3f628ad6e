"""A pool of processes of this machine: one per GPU, or as many as the CPU has cores for."""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Generic

import torch

from nearsight.train import Stop
from nearsight.work.pool import Attempt, Ended, Event, Heard, Item, Lost, Make, Result

_SECONDS_TO_END = 60.0
"""For the step that a worker is in, and its checkpoints."""
_STARTER_ENDED = "the end of the process that started it"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def places(device: torch.device, workers: int | None) -> list[str]:
    """The device of each process: by default every GPU, or a CPU once per core."""
    if str(device) == "cuda":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return [gpus[number % len(gpus)] for number in range(workers or len(gpus))]
    return [str(device)] * (workers or (num_cores() if device.type == "cpu" else 1))


@contextlib.contextmanager
def process_pool(
    make: Make[Item, Result],
    places: Sequence[str],
    *,
    num_threads: int | None = None,
    patience: float = _SECONDS_TO_END,
    start_method: str = "spawn",
) -> Iterator["_Processes[Item, Result]"]:
    """At most one process for each place, started when there is something to do; on leaving, all have ended.

    Args:
        num_threads: of each; by default as many as torch takes.
        patience: seconds that a busy worker has to end when the pool is left.
        start_method: a fork would share the state of CUDA, and the locks of threads.
    """
    processes = _Processes(make, places, num_threads, patience, start_method)
    try:
        yield processes
    finally:
        processes.close()


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    place: str
    token: str | None = None
    """Of its attempt, if it has one."""


class _Processes(Generic[Item, Result]):
    """Each has a pipe of its own: one that is killed while it writes blocks no other."""

    def __init__(
        self,
        make: Make[Item, Result],
        places: Sequence[str],
        num_threads: int | None,
        patience: float,
        start_method: str,
    ) -> None:
        self._make, self._free_places, self._num_threads = make, list(places), num_threads
        self._patience = patience
        self._context: Any = multiprocessing.get_context(start_method)
        self._workers: list[_Worker] = []
        self.num_wanted = len(places)

    @property
    def num_free(self) -> int:
        return len(self._free_places) + sum(worker.token is None for worker in self._workers)

    def give(self, attempt: Attempt[Item]) -> None:
        idle = next((worker for worker in self._workers if worker.token is None), None)
        worker = idle or self._start(self._free_places.pop(0))
        worker.token = attempt.token
        with contextlib.suppress(OSError):  # it has just died, which is heard next
            worker.connection.send(attempt)

    def _start(self, place: str) -> _Worker:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._make, place, self._num_threads)
        process = self._context.Process(target=work_through, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the process
        self._workers.append(_Worker(process, ours, place))
        return self._workers[-1]

    def listen(self, seconds: float) -> list[Event[Result]]:
        heard: list[Event[Result]] = []
        ready = wait([worker.connection for worker in self._workers], seconds)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                event: Event[Result] = worker.connection.recv()
            except (EOFError, OSError):
                self._remove(worker)
                if worker.token is not None:
                    how = _ending(worker.process.exitcode)
                    heard.append(Lost(worker.token, f"worker process {worker.process.pid} {how}"))
                continue
            heard.append(event)
            if isinstance(event, Heard):
                continue
            worker.token = None
            if isinstance(event, Lost) or event.outcome.stopped_by is not None:  # it ends now
                self._remove(worker)
        return heard

    def _remove(self, worker: _Worker, patience: float = _SECONDS_TO_END) -> None:
        worker.connection.close()
        worker.process.join(patience)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        self._workers.remove(worker)
        self._free_places.append(worker.place)

    def stop(self, by: str) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send(by)

    def close(self) -> None:
        """End all of them; busy ones after their step."""
        self.stop(_STARTER_ENDED)
        for worker in list(self._workers):
            self._remove(worker, self._patience)


def _ending(code: int | None) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"


def work_through(connection: Connection, make: Make[Any, Any], place: str, num_threads: int | None) -> None:
    """The loop of a worker: attempts come through the pipe, and events go back, until the other end closes.

    A string through the pipe is who requests a stop. SIGINT goes to all processes of a terminal, so it is left to the
    one who started this; SIGTERM may be meant for this one alone.
    """
    stop, attempts = Stop(), queue.SimpleQueue[Attempt[Any] | None]()

    def end(by: str) -> None:
        stop.request(stop.by or by)
        attempts.put(None)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        end(signal.Signals(number).name)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while isinstance(received := connection.recv(), Attempt):
                attempts.put(received)
            end(received)
            return
        end(_STARTER_ENDED)

    def send(event: Event[Any]) -> None:
        try:
            connection.send(event)
        except OSError:  # the other end is closed; the reader notices, too
            end(_STARTER_ENDED)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_signal)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    threading.Thread(target=read, name="attempts", daemon=True).start()
    do = None
    while (attempt := attempts.get()) is not None:
        token = attempt.token

        def tell(message: Any, *, at_once: bool = False, token: str = token) -> None:
            send(Heard(token, message))

        try:
            if do is None:
                if place.startswith("cuda:"):
                    torch.cuda.set_device(place)
                do = make(place)
            send(Ended(token, do(attempt, tell, stop)))
        except Exception as error:
            send(Lost(token, f"it ended in {type(error).__name__}: {error}"))
            return
