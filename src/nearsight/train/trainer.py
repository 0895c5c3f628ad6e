"""Trains cells as one stack, from their last checkpoint to the end of each; where one ends, the next one begins."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import pandas as pd
import torch

from nearsight.data import Dataset
from nearsight.errors import InputError
from nearsight.files import LostError
from nearsight.train.cell import Cell, finish
from nearsight.train.config import RunConfig
from nearsight.train.engine import EpochResult, Stack
from nearsight.train.folder import FolderElsewhere, HistoryRow, Progress, RunFolder
from nearsight.train.heads import TimeCourse
from nearsight.train.processes import Processes
from nearsight.train.stopping import Stop, StoppedError, TrainingError, divergence, way_out_of_divergence

_FINISHED = "finished"
"""What the first process says to those that wait while it finishes a run."""


Run = tuple[RunConfig, RunFolder]


class DivergedError(TrainingError):
    """The loss of some cells of a stack is not finite."""

    def __init__(self, messages: Sequence[str], cells: Sequence[Cell]) -> None:
        super().__init__(f"{'; '.join(messages)}. {way_out_of_divergence(cells[0].config.precision)}")
        self.cells, self._messages = cells, messages

    def apart(self) -> "Iterator[tuple[Run, DivergedError]]":
        """The error of each run."""
        for cell, message in zip(self.cells, self._messages, strict=True):
            yield (cell.config, cell.folder), DivergedError([message], [cell])


class Listener:
    """Its methods are called while runs train; by default they do nothing."""

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None: ...

    def step(self, step: int) -> None: ...

    def epoch(self, config: RunConfig, row: HistoryRow) -> None: ...

    def split(self, sizes: Sequence[int]) -> None:
        """A stack did not fit into memory; its runs go on in stacks of these sizes, one after the other."""

    def finished(self, config: RunConfig, folder: RunFolder) -> None: ...


class Line(Protocol):
    """Runs of one kind that wait for a slot. With several processes, all have the same line."""

    def waiting(self) -> Sequence[RunConfig]:
        """Those that may still come."""

    def take(self, most: int) -> list[Run]:
        """The next ones, at most so many."""

    def give_up(self, run: Run, error: Exception) -> None:
        """A run that was taken cannot go on."""


class Trainer:
    """Trains cells as one stack. It keeps as many slots as it began with: the next run of the line takes that of one
    that has ended, before the next epoch. When no run waits, the stack shrinks.

    Several processes each have one and go through the same epochs in step. The first one reads and writes, and
    sends its decisions to the others.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        line: Line,
        dataset: Dataset,
        device: torch.device,
        listener: Listener,
        stop: Stop,
        checkpoint_every: int,
        processes: Processes,
    ) -> None:
        self._line, self._dataset, self._device, self._listener, self._stop = line, dataset, device, listener, stop
        self._checkpoint_every, self._processes = checkpoint_every, processes
        self._cells = [Cell(*run) for run in runs]
        """Slot by slot; among them some that have just ended."""
        self._given_up: list[Cell] = []
        self._course: TimeCourse | None = None

    @property
    def left(self) -> list[Run]:
        """What was taken, and is neither complete nor given up."""
        going = [cell for cell in self._cells if not (cell.folder.is_complete or cell in self._given_up)]
        return [(cell.config, cell.folder) for cell in going]

    def train(self) -> None:
        configs = [cell.config for cell in self._cells]
        stack = Stack.start(configs, self._dataset, self._device, self._processes, waiting=self._line.waiting())
        # Until everything is saved: a request that comes meanwhile must not cut that short.
        with self._stop.listening():
            try:
                self._run(stack)
            except Exception as error:
                self._save(error)
                raise

    def _begin(self, stack: Stack, positions: Sequence[int]) -> list[int]:
        """Put cells where their checkpoints say they were, which only the first process has to see. The positions of
        those that cannot begin."""

        def claim() -> list[Progress | InputError]:
            return [self._claimed(stack, position) for position in positions]

        failed, untrained = [], {}
        for position, outcome in zip(positions, self._processes.from_first(claim), strict=True):
            cell = self._cells[position]
            if isinstance(outcome, InputError):
                failed.append(position)
                self._given_up.append(cell)
                self._line.give_up((cell.config, cell.folder), outcome)
                continue
            cell.progress = outcome
            stack.epochs_done[position] = cell.epochs_done
            if cell.epochs_done == 0:
                untrained[position] = 0
            self._listener.started(cell.config, cell.epochs_done, stack.steps_per_epoch)
            cell.folder.log(
                "started", epochs_done=cell.epochs_done, device=str(self._device), processes=self._processes.num
            )
        self._processes.spread(stack.state)
        for position, heads in self._measured(stack, untrained).items():
            self._cells[position].begin(heads)
        return failed

    def _claimed(self, stack: Stack, position: int) -> Progress | InputError:
        cell = self._cells[position]
        try:
            cell.folder.claim(cell.config, self._dataset)
            cell.resume(stack, position)
        except InputError as error:
            return error
        return cell.progress

    def _measured(self, stack: Stack, epochs: Mapping[int, int]) -> dict[int, pd.DataFrame]:
        """The heads of those cells whose turn it is after so many epochs, by position; the first process has them."""
        if not (self._processes.is_first and any(self._cells[position].config.measure_every for position in epochs)):
            return {}
        self._course = self._course or TimeCourse(stack, self._dataset)
        return self._course.measure(stack, epochs)

    def _save(self, error: Exception) -> None:
        """Whole epochs that no checkpoint has yet must not be lost to what happened in the next one."""
        for cell in self._cells:
            with contextlib.suppress(LostError):  # another runner goes on with it
                cell.save()
                if isinstance(error, StoppedError) and not cell.folder.is_complete:
                    cell.folder.log("stopped", by=error.by, epochs_done=cell.epochs_done)
        if isinstance(error, StoppedError):
            # The end of one process may be taken for a failure, and end the first while it writes.
            self._processes.heard(None)

    def _run(self, stack: Stack) -> None:
        stack = self._refilled(stack, self._begin(stack, range(len(self._cells))))
        while self._cells:
            over = [position for position, cell in enumerate(self._cells) if cell.is_over]
            for position in over:
                cell = self._cells[position]
                self._finish(cell, stack)
                self._listener.finished(cell.config, cell.folder)
            if over:
                stack = self._refilled(stack, over)
            else:
                self._run_epoch(stack)

    def _refilled(self, stack: Stack, free: list[int]) -> Stack:
        """The stack with the next runs in its free slots; without those for which there is none."""
        while free and (runs := self._line.take(len(free))):
            joining, free = free[: len(runs)], free[len(runs) :]
            for position, (config, folder) in zip(joining, runs, strict=True):
                self._cells[position] = Cell(config, folder)
                stack.put(position, config, self._dataset)
            free = [*self._begin(stack, joining), *free]
        if not free:
            return stack
        kept = [position for position in range(len(self._cells)) if position not in free]
        self._cells = [self._cells[position] for position in kept]
        return stack.select(kept) if kept else stack

    def _finish(self, cell: Cell, stack: Stack) -> None:
        """By the first process; the others check for a stop with it until it says that it is done."""
        if isinstance(cell.folder, FolderElsewhere):
            while (word := self._processes.heard(self._stop.by)) != _FINISHED:
                self._stop_for(word)
            cell.folder.is_finished = True
        else:
            finish(cell, stack, self._dataset, self._check_stop)
            self._processes.heard(_FINISHED)

    def _run_epoch(self, stack: Stack) -> None:
        self._check_stop()
        began = time.perf_counter()
        own = stack.run_epoch(self._on_step)
        results, seconds = self._processes.from_first(lambda: (own, time.perf_counter() - began))
        # All before any is noted: if one loss is not finite, the epoch may have been left early.
        self._check_finite(results)
        epochs = {position: cell.epochs_done + 1 for position, cell in enumerate(self._cells)}
        heads = self._measured(stack, epochs)
        for position, (cell, result) in enumerate(zip(self._cells, results, strict=True)):
            row = HistoryRow(
                epoch=epochs[position],
                train_loss=result.train_loss,
                val_loss=result.val_loss,
                val_acc=result.val_acc,
                lr=result.lr,
                seconds=seconds,
            )
            cell.record(stack, position, row, heads.get(position), checkpoint_every=self._checkpoint_every)
            self._listener.epoch(cell.config, row)

    def _on_step(self, step: int) -> None:
        self._listener.step(step)
        self._check_stop()

    def _check_stop(self) -> None:
        self._stop_for(self._processes.heard(self._stop.by))

    def _stop_for(self, by: str | None) -> None:
        if by is not None:
            unfinished = [cell.epochs_done for cell in self._cells if not cell.folder.is_complete]
            raise StoppedError(by, unfinished)

    def _check_finite(self, results: Sequence[EpochResult]) -> None:
        diverged, messages = [], []
        for cell, result in zip(self._cells, results, strict=True):
            if math.isfinite(result.train_loss) and math.isfinite(result.val_loss):
                continue
            epoch = cell.epochs_done + 1
            cell.folder.log("diverged", epoch=epoch, train_loss=str(result.train_loss))
            loss = result.val_loss if math.isfinite(result.train_loss) else result.train_loss
            diverged.append(cell)
            messages.append(divergence(cell.folder.path, loss, epoch))
        if diverged:
            raise DivergedError(messages, diverged)
