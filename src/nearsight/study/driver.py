"""Gives the cells of a study to workers, follows their progress, and retries what was lost."""

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from nearsight.errors import InputError
from nearsight.study.design import Cell
from nearsight.study.folder import StudyFolder
from nearsight.study.runner import StudyListener
from nearsight.study.worker import CellsDone, Work
from nearsight.train import RunName, Stop, StoppedError, TrainingError
from nearsight.train.planning import MOST_CELLS
from nearsight.work import Attempt, Driver, Outcome, Pool, Retries

_SHARE_OF_TIME = 0.05
"""The largest share of the time that may go into rewriting runs.csv while cells train."""


class StudyDriver(Driver[Cell, CellsDone]):
    """One study on some workers."""

    def __init__(
        self, work: Work, pool: Pool[Cell, CellsDone], retries: Retries, listener: StudyListener, stop: Stop
    ) -> None:
        super().__init__(pool, retries, stop)
        self._work, self._listener = work, listener
        self._folder = StudyFolder(work.folder)
        self._locks = self._folder.locks()
        self._epochs: dict[RunName, int] = {}
        """Whole epochs of the cells that were begun and are not done."""
        self._done: set[RunName] = set()
        self._failed: dict[RunName, Exception] = {}
        self._num_taken = 0
        self._table = RunsTable(self._folder)
        self._is_table_old = False

    def run(self) -> dict[RunName, Exception]:
        """Repeat until nothing can be taken any more; returns run → its error."""
        cells: Sequence[Cell] = self._work.cells
        most = min(self._work.cells_per_stack, MOST_CELLS)
        with self._stop.listening():
            while cells:
                taken_before = self._num_taken
                num_waiting = self.drive(divide(cells, most=most, least_parts=self._pool.num_wanted))
                if self._stop.by is not None and (num_waiting or self._epochs):
                    raise StoppedError(self._stop.by, [*self._epochs.values()] or [0])
                if self._num_taken == taken_before:  # the rest is with other runners
                    break
                cells = [cell for cell in cells if self._is_free(cell)]
        return self._failed

    def heard(self, attempt: Attempt[Cell], message: Any) -> bool:
        """A whole epoch is progress."""
        name, arguments = message
        if name == "started":
            config, epochs_done, _ = arguments
            self._epochs[config.identity] = epochs_done
        elif name == "epoch":
            config, row = arguments
            self._epochs[config.identity] = row.epoch
        elif name == "finished":
            config, _ = arguments
            self._epochs.pop(config.identity, None)
            if not self._is_done(config.identity):  # it is elsewhere, and could not be published from there
                return True
            self._done.add(config.identity)
            self._is_table_old = True
            arguments = (config, self._folder.run_folder(config.identity))
        getattr(self._listener, name)(*arguments)
        return name in ("epoch", "finished")

    def ended(self, attempt: Attempt[Cell], outcome: Outcome[CellsDone]) -> None:
        if outcome.result is not None:
            self._failed |= outcome.result.failed
            self._num_taken += outcome.result.num_taken
        if outcome.stopped_by is not None:
            self._epochs |= {cell.run: self._epochs.get(cell.run, 0) for cell in self._missing(attempt.items)}
        else:
            self._forget(attempt.items)

    def left(self, attempt: Attempt[Cell]) -> list[Cell]:
        self._listener.released(attempt.items)
        self._num_taken += 1  # so that there is another round
        left = self._missing(attempt.items)
        self._forget(attempt.items)
        if self._stop.by is not None:
            self._epochs |= dict.fromkeys((cell.run for cell in left), 0)
        return left

    def lost(self, attempt: Attempt[Cell], left: Sequence[Cell], problem: str, seconds: float | None) -> None:
        self._listener.worker_lost(left, problem, seconds)
        if seconds is None:
            names = "; ".join(f"{cell.condition}, seed {cell.seed}" for cell in left)
            words = f"{attempt.losses + 1} workers were lost at {names}, the last one because {problem}"
            self._failed |= {cell.run: TrainingError(f"{words}; the same command tries again") for cell in left}

    def looked(self) -> None:
        if self._is_table_old:
            self._is_table_old = not self._table.refresh()

    def _forget(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            self._epochs.pop(cell.run, None)

    def _missing(self, cells: Iterable[Cell]) -> list[Cell]:
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
        """Whether the cell is still to be done, and no runner holds it."""
        if cell.run in self._failed or not self._missing([cell]):
            return False
        try:
            holder = self._locks.holder(cell.run)
        except InputError:  # cannot be read now
            return False
        return holder is None or holder.is_stale


class RunsTable:
    """runs.csv, rewritten when runs are done; in a large study not after each of them, since it takes time."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder
        self._not_before = 0.0

    def refresh(self) -> bool:
        """Whether it was written; False: the last time was only a moment ago, so it waits for another call."""
        began = time.monotonic()
        if began < self._not_before:
            return False
        self._folder.write_runs()
        ended = time.monotonic()
        self._not_before = ended + (ended - began) / _SHARE_OF_TIME
        return True


def divide(cells: Sequence[Cell], *, most: int, least_parts: int) -> list[tuple[Cell, ...]]:
    """The cells in parts that can train as one stack: none larger than `most`, and so many that no worker is idle.

    No stack is cut to make parts of equal size: half a stack takes more than half the time, and what is finished early
    is not lost if the rest is stopped.
    """
    most = max(1, min(most, math.ceil(len(cells) / max(1, least_parts))))
    parts: list[tuple[Cell, ...]] = []
    for stack in _stacks(cells):
        num_parts = math.ceil(len(stack) / most)
        ends = [round(number * len(stack) / num_parts) for number in range(num_parts + 1)]
        parts += [tuple(stack[begin:end]) for begin, end in itertools.pairwise(ends)]
    return parts


def _stacks(cells: Sequence[Cell]) -> Iterable[list[Cell]]:
    """Cells that can train together, in the order in which their kinds first come."""
    by_key: dict[object, list[Cell]] = {}
    for cell in cells:
        by_key.setdefault(cell.config.stack_key, []).append(cell)
    return by_key.values()
