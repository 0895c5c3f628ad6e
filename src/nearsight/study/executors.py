"""What trains the cells of a study: this process, several, or a cluster."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from nearsight.data.locations import ENVIRONMENT_VARIABLE
from nearsight.errors import InputError, check_at_least
from nearsight.study.design import Cell
from nearsight.study.driver import RunsTable, StudyDriver
from nearsight.study.folder import StudyFolder
from nearsight.study.lock import Locks
from nearsight.study.runner import Place, Runner, StudyListener, Task
from nearsight.study.worker import StudyWorker, Work, training
from nearsight.train import RunFolder, RunName, Stop, load_data
from nearsight.train.runner import Load
from nearsight.work import (
    Retries,
    check_device,
    connected,
    import_ray,
    num_cores,
    places,
    process_pool,
    ray_pool,
)

__all__ = ["Executor", "LocalExecutor", "ProcessesExecutor", "RayExecutor", "Retries", "Work"]


class Executor(Protocol):
    """Trains the cells of a study: in this process, in several, on several machines. It changes no number."""

    def check(self) -> None:
        """Refuse what cannot work, before anything is written."""
        ...

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        """Do all cells that no other runner holds; returns run → its error, for those that could not be done.

        If a cell cannot go on, the others are still finished. If a stop is requested, whole epochs are put
        on disk and `StoppedError` raised.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LocalExecutor:
    """One runner, here, its cells stacked."""

    device: torch.device | str = "cpu"
    load: Load = load_data
    """How it gets a data set."""

    def check(self) -> None:
        """This process needs no check."""

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        return self.run_together([work], [listener], stop)

    def run_together(
        self, works: Sequence[Work], listeners: Sequence[StudyListener], stop: Stop
    ) -> dict[RunName, Exception]:
        """Several studies, from one queue. They agree in all but their folders, cells and places of publication."""
        with contextlib.ExitStack() as kept:
            wanted: dict[RunName, list[tuple[Place, Cell]]] = {}
            ranks: dict[RunName, float] = {}
            for work, listener in zip(works, listeners, strict=True):
                locks = kept.enter_context(StudyFolder(work.folder).locks().kept_alive())
                place = _place(work, locks, listener)
                for cell in work.cells:
                    wanted.setdefault(cell.run, []).append((place, cell))
                ranks |= work.ranks
            runs = sorted(wanted, key=lambda run: ranks.get(run, 0.0))
            runner = Runner(partial(training(works[0], self.device, stop), load=self.load))
            runner.run([Task(tuple(wanted[run])) for run in runs], works[0].cells_per_stack)
        return runner.failed


def _place(work: Work, locks: Locks, listener: StudyListener) -> Place:
    folder = StudyFolder(work.folder)
    table = RunsTable(folder)

    def completed(run: RunFolder) -> None:
        table.refresh()
        if work.location is not None:
            work.location.publish(run)

    return Place(folder=folder, locks=locks, listener=listener, completed=completed)


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
        with process_pool(StudyWorker(work), workplaces, num_threads=num_threads) as pool:
            return StudyDriver(work, pool, self.retries, listener, stop).run()


@dataclass(frozen=True, kw_only=True)
class RayExecutor:
    """Stacks of cells as Ray tasks. All nodes have the same nearsight, and the study's folder under the same path."""

    address: str = "auto"
    """auto: the cluster that runs here; local: a new one of this machine alone; otherwise that at HOST:PORT."""
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
        data_dir = Path(named).expanduser().resolve() if named else None
        work = dataclasses.replace(work, folder=work.folder.resolve(), data_dir=data_dir)
        with ray_pool(StudyWorker(work), address=self.address, device=self.device, cpus=self.cpus) as pool:
            return StudyDriver(work, pool, self.retries, listener, stop).run()
