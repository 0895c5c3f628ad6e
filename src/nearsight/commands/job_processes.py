"""Jobs that depend on nothing but themselves, in several processes of this machine; a job that loses its process is
done again by another one."""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic

import torch

from nearsight.commands.jobs import MOST_LOSSES, Job, work_off
from nearsight.errors import InputError

_SECONDS_TO_END = 10.0
"""For a process whose pipe has closed."""
_REFUSED, _FAILED = "refused", "failed"


def run_in_processes(
    make: Callable[[str], Callable[[Job], None]],
    jobs: Iterable[Job],
    places: Sequence[str],
    *,
    lost: Callable[[Job, str], None],
    most_losses: int = MOST_LOSSES,
    start_method: str = "spawn",
) -> Iterator[Job]:
    """Yield each job once it is done; on leaving, all processes have ended.

    Args:
        make: called once in each process with its place; what it returns does one job after the other. It is sent
            there, so it must be something that can be pickled.
        places: one process each; none is started for which there is no job.
        lost: told when a process ended at a job, and how, before the job is given to another.
        most_losses: after so many, a job is a `LostJobError`.
        start_method: of the processes; a fork would share the state of CUDA and the locks of threads.

    An `InputError` in a process is one here. Any other error ends the process, which is lost: whatever state it is in
    then, as after an error of CUDA, the next one starts without it.
    """
    with _Processes[Job](make, places, start_method) as processes:
        yield from work_off(processes, jobs, lost=lost, most_losses=most_losses)


@dataclass(eq=False)
class _Worker(Generic[Job]):
    process: BaseProcess
    connection: Connection
    place: str
    job: Job | None = None
    """What it is at."""


class _Processes(Generic[Job]):
    """Each has a pipe of its own: one that is killed while it writes blocks nobody."""

    def __init__(self, make: Callable[[str], Callable[[Job], None]], places: Sequence[str], start_method: str) -> None:
        self._make, self._free_places = make, list(places)
        self._context: Any = multiprocessing.get_context(start_method)
        self._workers: list[_Worker[Job]] = []

    def __enter__(self) -> "_Processes[Job]":
        return self

    def __exit__(self, *_: object) -> None:
        """What they are at is lost, but not what they have done."""
        for worker in list(self._workers):
            self._end(worker)

    @property
    def num_busy(self) -> int:
        return sum(worker.job is not None for worker in self._workers)

    @property
    def num_free(self) -> int:
        return len(self._free_places) + len(self._workers) - self.num_busy

    def give(self, job: Job) -> None:
        idle = next((worker for worker in self._workers if worker.job is None), None)
        worker = idle or self._start(self._free_places.pop(0))
        worker.job = job
        with contextlib.suppress(OSError):  # it has just died, which is heard next
            worker.connection.send(job)

    def _start(self, place: str) -> _Worker[Job]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work_through, args=(theirs, self._make, place), daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the process
        self._workers.append(_Worker(process, ours, place))
        return self._workers[-1]

    def ended(self) -> Iterator[tuple[Job, str | None]]:
        """Jobs that are done, or have lost their process and how; waits for the first."""
        ready = wait([worker.connection for worker in self._workers])
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                told = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join(_SECONDS_TO_END)
                told = _FAILED, _ending(worker.process.exitcode)
            kind, said = told or ("", "")
            if kind == _REFUSED:
                raise InputError(said)
            if kind == _FAILED:
                self._end(worker)
            job, worker.job = worker.job, None
            if job is not None:
                yield job, f"process {worker.process.pid} {said}" if said else None

    def _end(self, worker: _Worker[Job]) -> None:
        self._workers.remove(worker)
        self._free_places.append(worker.place)
        worker.connection.close()
        worker.process.kill()
        worker.process.join()


def _ending(code: int | None) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"


def work_through(connection: Connection, make: Callable[[str], Callable[[Any], None]], place: str) -> None:
    """The life of a process: jobs come through the pipe until the other end closes, and for each an answer goes back.

    SIGINT goes to all processes of a terminal, so it is left to the one who started this.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if place == "cpu":
        torch.set_num_threads(1)  # one process per core
    elif place.startswith("cuda"):
        torch.cuda.set_device(place)
    do: Callable[[Any], None] | None = None
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        while True:
            job = connection.recv()
            try:
                do = do or make(place)
                do(job)
            except InputError as error:
                connection.send((_REFUSED, str(error)))
            except Exception as error:
                connection.send((_FAILED, f"ended in {type(error).__name__}: {error}"))
                return
            else:
                connection.send(None)
