"""The cells of a study in several processes of this machine: one per GPU, or as many as the CPU has cores for."""

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

import torch

from nearsight.errors import InputError, check_at_least
from nearsight.study.executors.backlog import Retries
from nearsight.study.executors.driver import Driver, Ended, Heard, Lost
from nearsight.study.executors.places import num_cores, places
from nearsight.study.executors.work import Work
from nearsight.study.executors.worker import Assignment, Message, Outcome, do
from nearsight.study.listening import StudyListener
from nearsight.train import RunName, Stop

_SPAWN = multiprocessing.get_context("spawn")  # a fork would share CUDA's state, and the locks of threads
_SECONDS_TO_END = 60.0
"""For the step that a worker is in, and its checkpoints."""


@dataclass(frozen=True, kw_only=True)
class ProcessesExecutor:
    """Workers that take stacks of cells. One that dies is replaced, and its cells go on from their checkpoints.

    A program that uses this must start its own work under `if __name__ == "__main__"`: workers import its main module.
    """

    device: torch.device | str = "cpu"
    """cuda: every GPU that is seen; one with a number: that one."""
    workers: int | None = None
    """How many processes; by default one per GPU, or on a CPU one per core."""
    retries: Retries = field(default_factory=Retries)

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_at_least("workers", self.workers, 1)

    def check(self) -> None:
        if str(self.device) == "cuda" and torch.cuda.device_count() == 0:
            raise InputError("there is no GPU for a worker process; use --device cpu")

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        workplaces = places(torch.device(self.device), self.workers)
        num_threads = max(1, min(torch.get_num_threads(), num_cores() // len(workplaces)))
        with _processes(workplaces, num_threads) as processes:
            return Driver(work, processes, self.retries, listener, stop).run()


@contextlib.contextmanager
def _processes(places: Sequence[str], num_threads: int) -> Iterator["_Processes"]:
    processes = _Processes(places, num_threads)
    try:
        yield processes
    finally:
        processes.close()


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    connection: Connection
    place: str
    token: str | None = None
    """Of what it is at."""


class _Processes:
    """The workers of one machine. Each has a pipe of its own: one that is killed while it writes blocks nobody."""

    def __init__(self, places: Sequence[str], num_threads: int) -> None:
        self._free_places, self._num_threads = list(places), num_threads
        self.num_wanted = len(places)
        self._workers: list[_Worker] = []

    @property
    def num_free(self) -> int:
        return len(self._free_places) + sum(worker.token is None for worker in self._workers)

    def give(self, assignment: Assignment) -> None:
        idle = next((worker for worker in self._workers if worker.token is None), None)
        worker = idle or self._start(self._free_places.pop(0))
        worker.token = assignment.token
        with contextlib.suppress(OSError):  # it has just died, which is heard next
            worker.connection.send(assignment)

    def _start(self, place: str) -> _Worker:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=work_through, args=(theirs, place, self._num_threads), daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the process
        worker = _Worker(process, ours, place)
        self._workers.append(worker)
        return worker

    def listen(self, seconds: float) -> list[Heard | Ended | Lost]:
        heard: list[Heard | Ended | Lost] = []
        ready = wait([worker.connection for worker in self._workers], seconds)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                told = worker.connection.recv()
            except (EOFError, OSError):
                heard += self._bury(worker)
                continue
            if worker.token is None:
                continue
            if isinstance(told, Outcome):
                heard.append(Ended(worker.token, told))
                worker.token = None
            elif isinstance(told, str):  # an error that nobody expected; it ends now
                heard.append(Lost(worker.token, told))
                worker.token = None
                self._remove(worker)
            else:
                heard.append(Heard(worker.token, told))
        return heard

    def _bury(self, worker: _Worker) -> list[Heard | Ended | Lost]:
        self._remove(worker)
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        return [] if worker.token is None else [Lost(worker.token, f"worker process {worker.process.pid} {how}")]

    def _remove(self, worker: _Worker) -> None:
        worker.connection.close()
        worker.process.join(_SECONDS_TO_END)
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
        """End all of them: those that still train, after their step."""
        for worker in self._workers:
            worker.connection.close()
        for worker in list(self._workers):
            self._remove(worker)


def work_through(connection: Connection, device: str, num_threads: int) -> None:
    """The life of a worker: assignments come through the pipe, and what happens goes back, until the other end closes.

    A string through the pipe is who wishes for a stop. SIGINT goes to all processes of a terminal, so it is left to the
    one who started this; SIGTERM may be meant for this one alone.
    """
    stop, assignments = Stop(), queue.SimpleQueue[Assignment | None]()

    def end(by: str) -> None:
        stop.request(stop.by or by)
        assignments.put(None)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        end(signal.Signals(number).name)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while isinstance(told := connection.recv(), Assignment):
                assignments.put(told)
            end(told)
            return
        end("the end of the process that started it")

    def tell(message: Message | Outcome | str) -> None:
        try:
            connection.send(message)
        except OSError:  # nobody is there any more; the reader knows too
            end("the end of the process that started it")

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_signal)
    torch.set_num_threads(num_threads)
    threading.Thread(target=read, name="assignments", daemon=True).start()
    while (assignment := assignments.get()) is not None:
        try:
            tell(do(assignment, device, tell, stop))
        except Exception as error:
            # Whatever state this process is in now, as after an error of CUDA, the next one starts without it.
            tell(f"it ended in {type(error).__name__}: {error}")
            return
