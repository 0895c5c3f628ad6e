"""What a worker does with cells of a study, wherever it is: it takes them, trains them, and releases them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from nearsight.data.loading import dataset_spec
from nearsight.data.locations import user_cache_folder
from nearsight.errors import InputError
from nearsight.files import LostError, canonical_hash
from nearsight.study.design import Cell
from nearsight.study.folder import StudyFolder
from nearsight.study.location import StudyPublisher
from nearsight.study.lock import Locks
from nearsight.study.run_tables import make_ready, result_problem
from nearsight.train import (
    DataConfig,
    HistoryRow,
    Listener,
    RunConfig,
    RunFolder,
    RunName,
    Stop,
    StoppedError,
    TrainingError,
    load_data,
    train_runs,
)
from nearsight.work import Attempt, Outcome, Tell

_SECONDS_TO_END = 30.0
"""A lost worker may need a moment to end if its machine still runs."""
_SECONDS_BETWEEN_LOOKS = 0.5


class StudyListener(Listener):
    """Its methods are called while a study runs; by default they do nothing.

    If workers do the study, they are called in the process that started the workers, except for steps: these are too
    many to send.
    """

    def planned(self, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        """These are the study's cells, and those of them that are not done yet."""

    def taken(self, cells: Sequence[Cell]) -> None:
        """A runner does these next, together as far as memory allows."""

    def released(self, cells: Sequence[Cell]) -> None:
        """The runner released these: they are done, cannot be done, or wait for another runner."""

    def set_aside(self, path: Path, problem: str) -> None:
        """Something in a run folder is damaged; it is kept beside, and done again."""

    def taken_over(self, config: RunConfig) -> None:
        """Another runner thought that this one had ended, and does this run now."""

    def worker_lost(self, cells: Sequence[Cell], problem: str, seconds: float | None) -> None:
        """The worker of these cells was lost. They are tried again after so many seconds; None: not again."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is missing of a study whose folder is claimed, and how it is to be done."""

    folder: Path
    groups: tuple[tuple[Cell, ...], ...]
    """In the order in which they are to be done; the cells of one train together as far as memory allows."""
    cells_per_stack: int
    """The most cells to take at a time."""
    data_dir: Path | None
    checkpoint_every: int
    location: StudyPublisher | None = None
    """Where finished runs are published, if elsewhere than in the folder."""


class Train(Protocol):
    """`nearsight.train.train_runs` with all arguments set but what to train and where."""

    def __call__(self, configs: Sequence[RunConfig], folders: Sequence[RunFolder], *, listener: Listener) -> None: ...


class Runner(Listener):
    """Takes cells through their locks, trains them, and releases them."""

    def __init__(
        self,
        folder: StudyFolder,
        locks: Locks,
        listener: StudyListener,
        train: Train,
        completed: Callable[[RunFolder], None],
    ) -> None:
        """`completed` is called with the folder of each run that is done, while its lock is still held. If it
        raises an `InputError`, that is noted, and the others go on."""
        self._folder, self._locks, self._listener, self._train = folder, locks, listener, train
        self._completed = completed
        self.failed: dict[RunName, Exception] = {}
        """Run → its error."""
        self.num_taken = 0

    def run(self, groups: Sequence[Sequence[Cell]], most: int) -> None:
        """Repeat over the groups until nothing can be taken any more: another runner may leave cells behind."""
        found = True
        while found:
            found = False
            for group in groups:
                found |= self._run_group(group, most)

    def _run_group(self, cells: Sequence[Cell], most: int) -> bool:
        """Whether any of these cells could be taken."""
        found = False
        while taken := self._take(cells, most):
            found = True
            self.num_taken += len(taken)
            self._listener.taken(taken)
            folders = {cell.run: self._folder.run_folder(cell.run) for cell in taken}
            try:
                with self._locks.guarding({run: folder.path for run, folder in folders.items()}):
                    self._train([cell.config for cell in taken], list(folders.values()), listener=self)
                for run, folder in folders.items():  # otherwise they would be done again and again
                    if problem := result_problem(folder):
                        self.failed[run] = InputError(problem)
            except LostError:  # what is left to this runner is taken again
                for cell in taken:
                    if cell.run in self._locks.lost:
                        self._listener.taken_over(cell.config)
            except (TrainingError, InputError) as error:
                unfinished = (cell for cell in taken if not self._folder.run_folder(cell.run).is_complete)
                self.failed |= {cell.run: error for cell in unfinished}
            finally:
                for cell in taken:
                    self._locks.release(cell.run)
                self._listener.released(taken)
        return found

    def _take(self, cells: Iterable[Cell], most: int) -> list[Cell]:
        taken: list[Cell] = []
        for cell in cells:
            run = cell.run
            if len(taken) == most:
                break
            if run in self.failed or self._folder.is_done(run) or not self._locks.take(run):
                continue
            if self._folder.is_done(run):  # since the last look
                self._locks.clear(run)
                continue
            try:
                make_ready(self._folder.run_folder(run), cell.config, self._listener.set_aside)
            except InputError as error:
                self.failed[run] = error
                self._locks.release(run)
                continue
            taken.append(cell)
        return taken

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._listener.started(config, epochs_done, steps_per_epoch)

    def step(self, step: int) -> None:
        self._listener.step(step)

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self._listener.epoch(config, row)

    def split(self, sizes: Sequence[int]) -> None:
        self._listener.split(sizes)

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        try:
            self._completed(folder)
        except InputError as error:
            self.failed[config.identity] = error
        self._locks.clear(config.identity)
        self._listener.finished(config, folder)


def training(work: Work, device: torch.device | str, stop: Stop) -> Train:
    return partial(train_runs, device=device, data_dir=work.data_dir, stop=stop, checkpoint_every=work.checkpoint_every)


@dataclass(frozen=True, kw_only=True)
class CellsDone:
    """What came of the cells of an attempt."""

    failed: dict[RunName, Exception]
    """Run → its error, an `InputError` or a `TrainingError`."""
    num_taken: int
    """Cells that no other runner had."""


class StudyWorker:
    """For a pool of workers: does the cells of an attempt that no other runner has."""

    def __init__(self, work: Work) -> None:
        self._work = replace(work, groups=())  # which are given part by part

    def __call__(self, device: str) -> Callable[[Attempt[Cell], Tell, Stop], Outcome[CellsDone]]:
        return partial(self._do, device)

    def _do(self, device: str, attempt: Attempt[Cell], tell: Tell, stop: Stop) -> Outcome[CellsDone]:
        work, cells, stopped_by = self._work, attempt.items, None
        folder = StudyFolder(work.folder)
        with folder.locks(token=attempt.token, lost_tokens=attempt.lost_tokens).kept_alive() as locks:
            # The table of all runs is written by the driver, which hears of all of them.
            completed = work.location.publish if work.location is not None else lambda _: None
            runner = Runner(folder, locks, _forwarding(tell), training(work, device, stop), completed)
            try:
                prepare_data([cell.config.data for cell in cells], work.data_dir, stop)
                _wait_for_lost_workers(locks, cells)
                runner.run([cells], work.cells_per_stack)
            except StoppedError as stopped:
                stopped_by = stopped.by
            except InputError as error:  # of the data
                runner.failed |= {cell.run: error for cell in cells}
        failed = {run: _plain(error) for run, error in runner.failed.items()}
        return Outcome(result=CellsDone(failed=failed, num_taken=runner.num_taken), stopped_by=stopped_by)


def _forwarding(tell: Tell) -> StudyListener:
    """Sends each call on: the name of the `StudyListener` method and its arguments; but no steps."""
    listener = StudyListener()
    for name in ("taken", "released", "set_aside", "taken_over", "started", "epoch", "split", "finished"):
        setattr(listener, name, partial(_forward, tell, name))
    return listener


def _forward(tell: Tell, name: str, *arguments: Any) -> None:
    tell((name, arguments), at_once=name in ("taken", "finished"))


def prepare_data(configs: Iterable[DataConfig], data_dir: Path | None, stop: Stop) -> None:
    """Make sure that each data set is in this machine's image cache; of several workers that need it at once, the
    first decodes, and the others wait."""
    for config in dict.fromkeys(configs):
        if dataset_spec(config.name).find is None:  # embedded: made, not read
            continue
        name = canonical_hash([config.name, config.image_size, str(data_dir)])
        with Locks(user_cache_folder() / "decoded" / "locks").kept_alive() as locks:
            while not locks.take(name):
                if stop.by is not None:
                    raise StoppedError(stop.by, [0])
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            load_data(config, data_dir)
            locks.clear(name)


def _wait_for_lost_workers(locks: Locks, cells: Sequence[Cell]) -> None:
    """Wait for lost workers whose processes still run here: two at one cell would do it twice."""
    deadline = time.monotonic() + _SECONDS_TO_END
    for cell in cells:
        while (
            (holder := locks.holder(cell.run)) is not None
            and locks.is_known_lost(holder)
            and holder.owner is not None
            and holder.owner.is_here
            and not holder.owner.is_gone()
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)


def _plain(error: Exception) -> Exception:
    """The same error with its message alone, so that it can be sent."""
    return InputError(str(error)) if isinstance(error, InputError) else TrainingError(str(error))
