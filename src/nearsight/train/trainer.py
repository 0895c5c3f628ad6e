"""Trains some cells as one stack, from their last checkpoint to the end of each."""

import contextlib
import math
import time
from collections.abc import Sequence

import torch

from nearsight.data import Dataset
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


class DivergedError(TrainingError):
    """The loss of some cells of a stack is not finite."""

    def __init__(self, messages: Sequence[str], cells: Sequence[Cell]) -> None:
        super().__init__(f"{'; '.join(messages)}. {way_out_of_divergence(cells[0].config.precision)}")
        self.cells = cells


class Listener:
    """Its methods are called while runs train; by default they do nothing."""

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None: ...

    def step(self, step: int) -> None: ...

    def epoch(self, config: RunConfig, row: HistoryRow) -> None: ...

    def split(self, sizes: Sequence[int]) -> None:
        """A stack did not fit into memory; its runs go on in stacks of these sizes, one after the other."""

    def finished(self, config: RunConfig, folder: RunFolder) -> None: ...


class Trainer:
    """Trains some cells as one stack.

    Several processes each have one and go through the same epochs in step. The first one reads and writes, and
    sends its decisions to the others.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: torch.device,
        listener: Listener,
        stop: Stop,
        checkpoint_every: int,
        processes: Processes,
    ) -> None:
        self._dataset, self._device, self._listener, self._stop = dataset, device, listener, stop
        self._checkpoint_every, self._processes = checkpoint_every, processes
        self._cells: list[Cell] = []
        """Those whose folders are not complete yet."""

    def train(self, cells: list[Cell]) -> None:
        stack = Stack.start([cell.config for cell in cells], self._dataset, self._device, self._processes)
        self._cells = cells
        self._resume(stack)
        for cell in cells:
            self._listener.started(cell.config, cell.epochs_done, stack.steps_per_epoch)
            cell.folder.log(
                "started", epochs_done=cell.epochs_done, device=str(self._device), processes=self._processes.num
            )
        # Until everything is saved: a request that comes meanwhile must not cut that short.
        with self._stop.listening():
            try:
                self._run(stack)
            except Exception as error:
                self._save(error)
                raise

    def _resume(self, stack: Stack) -> None:
        """Put the cells where their checkpoints say they were, which only the first process has to see."""

        def claim() -> list[Progress]:
            for position, cell in enumerate(self._cells):
                cell.folder.claim(cell.config, self._dataset)
                cell.resume(stack, position)
            return [cell.progress for cell in self._cells]

        for position, progress in enumerate(self._processes.from_first(claim)):
            self._cells[position].progress = progress
            stack.epochs_done[position] = progress.epochs_done
        self._processes.spread(stack.state)

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
        course: TimeCourse | None = None
        if self._processes.is_first and any(cell.config.measure_every for cell in self._cells):
            course = TimeCourse(stack, self._dataset)
            untrained = {position: 0 for position, cell in enumerate(self._cells) if cell.epochs_done == 0}
            for position, heads in course.measure(stack, untrained).items():
                self._cells[position].begin(heads)
        while self._cells:
            going = [position for position, cell in enumerate(self._cells) if not cell.is_over]
            if len(going) == len(self._cells):
                self._run_epoch(stack, course)
                continue
            for cell in self._cells:
                if cell.is_over:
                    self._finish(cell, stack)
                    self._listener.finished(cell.config, cell.folder)
            self._cells = [self._cells[position] for position in going]
            stack = stack.select(going) if going else stack

    def _finish(self, cell: Cell, stack: Stack) -> None:
        """By the first process; the others check for a stop with it until it says that it is done."""
        if isinstance(cell.folder, FolderElsewhere):
            while (word := self._processes.heard(self._stop.by)) != _FINISHED:
                self._stop_for(word)
            cell.folder.is_finished = True
        else:
            finish(cell, stack, self._dataset, self._check_stop)
            self._processes.heard(_FINISHED)

    def _run_epoch(self, stack: Stack, course: TimeCourse | None) -> None:
        self._check_stop()
        began = time.perf_counter()
        own = stack.run_epoch(self._on_step)
        results, seconds = self._processes.from_first(lambda: (own, time.perf_counter() - began))
        # All before any is noted: if one loss is not finite, the epoch may have been left early.
        self._check_finite(results)
        epochs = {position: cell.epochs_done + 1 for position, cell in enumerate(self._cells)}
        heads = course.measure(stack, epochs) if course else {}
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
