"""Gives the cells of a study to workers, hears how they go, and tries again what was lost."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nearsight.errors import InputError
from nearsight.study.design import Cell
from nearsight.study.executors.backlog import Attempt, Backlog, Retries, divide
from nearsight.study.executors.refreshing import RunsTable
from nearsight.study.executors.work import Work
from nearsight.study.executors.worker import Assignment, Message, Outcome
from nearsight.study.folder import StudyFolder
from nearsight.study.listening import StudyListener
from nearsight.train import RunName, Stop, StoppedError, TrainingError
from nearsight.train.planning import MOST_CELLS

_SECONDS_BETWEEN_LOOKS = 0.25


@dataclass(frozen=True)
class Heard:
    """A worker says something."""

    token: str
    message: Message


@dataclass(frozen=True)
class Ended:
    """A worker is through with its assignment."""

    token: str
    outcome: Outcome


@dataclass(frozen=True)
class Lost:
    """A worker ended unasked, or in an error that is not the cells'."""

    token: str
    problem: str


class Workers(Protocol):
    """Processes, here or elsewhere, that do assignments."""

    @property
    def num_wanted(self) -> int:
        """How many assignments it takes to keep all of them busy."""
        ...

    @property
    def num_free(self) -> int:
        """How many more assignments can be given now."""
        ...

    def give(self, assignment: Assignment) -> None: ...

    def listen(self, seconds: float) -> Sequence[Heard | Ended | Lost]:
        """What happened, in its order; if nothing has, what happens in the next so many seconds."""
        ...

    def stop(self, by: str) -> None:
        """Ask all of them to end. Every assignment still gets an `Ended` or a `Lost`."""
        ...


class Driver:
    """One study on some workers."""

    def __init__(self, work: Work, workers: Workers, retries: Retries, listener: StudyListener, stop: Stop) -> None:
        self._work, self._workers, self._retries = work, workers, retries
        self._listener, self._stop = listener, stop
        self._folder = StudyFolder(work.folder)
        self._locks = self._folder.locks()
        self._running: dict[str, Attempt] = {}
        self._progressed: set[str] = set()
        """Tokens of attempts in which an epoch was finished."""
        self._epochs: dict[RunName, int] = {}
        """Whole epochs of the cells that were begun and are not done."""
        self._done: set[RunName] = set()
        self._failed: dict[RunName, Exception] = {}
        self._num_taken = 0
        self._table = RunsTable(self._folder)
        self._is_table_old = False

    def run(self) -> dict[RunName, Exception]:
        """Go round until nothing can be taken any more; run → what was wrong with it."""
        groups: Sequence[Sequence[Cell]] = self._work.groups
        with self._stop.heeded():
            while any(groups):
                taken_before = self._num_taken
                self._run_round(groups)
                if self._num_taken == taken_before:  # the rest is with other runners
                    break
                groups = [[cell for cell in group if self._is_free(cell)] for group in groups]
        return self._failed

    def _run_round(self, groups: Sequence[Sequence[Cell]]) -> None:
        most = min(self._work.cells_per_stack, MOST_CELLS)
        backlog = Backlog(divide(groups, most=most, least_parts=self._workers.num_wanted), self._retries)
        asked = False
        while self._running or (len(backlog) and not asked):
            if self._stop.by is not None and not asked:
                self._workers.stop(self._stop.by)
                asked = True
            while not asked and self._workers.num_free > 0 and (attempt := backlog.take(time.monotonic())):
                self._running[attempt.token] = attempt
                self._workers.give(self._assignment(attempt))
            for event in self._workers.listen(_SECONDS_BETWEEN_LOOKS):
                self._handle(event, backlog)
            self._refresh_table()
        if asked and (len(backlog) or self._epochs):
            assert self._stop.by is not None
            raise StoppedError(self._stop.by, [*self._epochs.values()] or [0])

    def _assignment(self, attempt: Attempt) -> Assignment:
        return Assignment(
            token=attempt.token,
            gone=attempt.gone,
            folder=self._work.folder,
            cells=attempt.cells,
            cells_per_stack=self._work.cells_per_stack,
            data_dir=self._work.data_dir,
            checkpoint_every=self._work.checkpoint_every,
            location=self._work.location,
        )

    def _handle(self, event: Heard | Ended | Lost, backlog: Backlog) -> None:
        if event.token not in self._running:  # somebody who was given up has one more word
            return
        if isinstance(event, Heard):
            self._hear(event.token, event.message)
        elif isinstance(event, Lost):
            self._lose(self._running.pop(event.token), event.problem, backlog)
        elif event.outcome.stopped_by is not None and self._stop.by is None:
            problem = f"the worker was stopped by {event.outcome.stopped_by}"
            self._lose(self._running.pop(event.token), problem, backlog)
        else:
            attempt = self._running.pop(event.token)
            self._failed |= event.outcome.failed
            self._num_taken += event.outcome.num_taken
            if event.outcome.stopped_by is not None:
                self._epochs |= {cell.run: self._epochs.get(cell.run, 0) for cell in self._left(attempt.cells)}
            else:
                self._forget(attempt)

    def _hear(self, token: str, message: Message) -> None:
        name, arguments = message
        if name == "started":
            config, epochs_done, _ = arguments
            self._epochs[config.identity] = epochs_done
        elif name == "epoch":
            config, row = arguments
            self._epochs[config.identity] = row.epoch
            self._progressed.add(token)
        elif name == "finished":
            config, _ = arguments
            self._epochs.pop(config.identity, None)
            self._progressed.add(token)
            if not self._is_done(config.identity):  # it is elsewhere, and could not be published from there
                return
            self._done.add(config.identity)
            self._is_table_old = True
            arguments = (config, self._folder.run_folder(config.identity))
        getattr(self._listener, name)(*arguments)

    def _lose(self, attempt: Attempt, problem: str, backlog: Backlog) -> None:
        self._listener.given_back(attempt.cells)
        self._num_taken += 1  # so that there is another round
        left = self._left(attempt.cells)
        self._forget(attempt)
        if self._stop.by is not None:
            self._epochs |= dict.fromkeys((cell.run for cell in left), 0)
            return
        if not left:
            return
        progressed = attempt.token in self._progressed
        seconds = backlog.lost(attempt, left, progressed=progressed, now=time.monotonic())
        self._listener.worker_lost(left, problem, seconds)
        if seconds is None:
            names = "; ".join(f"{cell.condition}, seed {cell.seed}" for cell in left)
            words = f"{attempt.losses + 1} workers were lost at {names}, the last one because {problem}"
            self._failed |= {cell.run: TrainingError(f"{words}; the same command tries again") for cell in left}

    def _forget(self, attempt: Attempt) -> None:
        for cell in attempt.cells:
            self._epochs.pop(cell.run, None)

    def _left(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if cell.run not in self._done and not self._is_done(cell.run)]

    def _is_done(self, run: RunName) -> bool:
        """Whether the run is here; one that a worker on another machine has published is brought here."""
        location = self._work.location
        if location is None or self._folder.is_done(run):
            return self._folder.is_done(run)
        with contextlib.suppress(InputError):  # it is not there, or not as a whole
            location.fetch(self._folder.run_folder(run))
        return self._folder.is_done(run)

    def _is_free(self, cell: Cell) -> bool:
        """Whether the cell is still to be done, and nobody is at it."""
        if cell.run in self._failed or not self._left([cell]):
            return False
        try:
            holder = self._locks.holder(cell.run)
        except InputError:  # cannot be read now
            return False
        return holder is None or holder.is_stale

    def _refresh_table(self) -> None:
        if self._is_table_old:
            self._is_table_old = not self._table.refresh()
