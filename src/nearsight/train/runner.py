"""Runs from start to finish: train, validate, checkpoint, stop, test once, measure, write. Killed at any moment, a run
continues from its last checkpoint and gives the numbers it would have given."""

import gc
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError, check_at_least
from nearsight.train.cell import Cell
from nearsight.train.config import DataConfig, RunConfig
from nearsight.train.engine import EpochResult, Stack
from nearsight.train.finishing import finish
from nearsight.train.folder import HistoryRow, RunFolder
from nearsight.train.heads import TimeCourse
from nearsight.train.planning import is_out_of_memory, plan_stacks
from nearsight.train.stopping import Stop, StoppedError


class TrainingError(RuntimeError):
    """Training cannot go on; the run folder keeps the last good checkpoint."""


class DivergedError(TrainingError):
    """The loss of some cells of a stack is not finite."""

    def __init__(self, message: str, cells: Sequence[Cell]) -> None:
        super().__init__(message)
        self.cells = cells


class Listener:
    """Told what happens while runs train; the default listens to nothing."""

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None: ...

    def step(self, step: int) -> None: ...

    def epoch(self, config: RunConfig, row: HistoryRow) -> None: ...

    def split(self, sizes: Sequence[int]) -> None:
        """A stack did not fit into memory; its runs go on in stacks of these sizes, one after the other."""

    def finished(self, config: RunConfig, folder: RunFolder) -> None: ...


def load_data(config: DataConfig, data_dir: Path | None = None) -> Dataset:
    """The data set a run asks for."""
    return load_dataset(
        config.name,
        data_dir=data_dir,
        image_size=config.image_size,
        num_train=config.num_train,
        num_test=config.num_test,
    )


def train_run(
    config: RunConfig,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
) -> RunFolder:
    """Train one run in the folder `path`, or finish what is missing there."""
    folder = RunFolder(path)
    train_runs(
        [config],
        [folder],
        device=device,
        data_dir=data_dir,
        listener=listener,
        stop=stop,
        checkpoint_every=checkpoint_every,
    )
    return folder


def train_runs(
    configs: Sequence[RunConfig],
    folders: Sequence[RunFolder],
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
) -> None:
    """Train any runs, each in its folder, or finish what is missing there.

    Those of equal shapes train together, as many at a time as memory takes. A run that cannot go on does not keep the
    others from their end; what was wrong with it is raised then.
    """
    device = torch.device(device)
    check_at_least("checkpoint_every", checkpoint_every, 1)
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise InputError("two runs share a folder; give each its own")
    for config, folder in zip(configs, folders, strict=True):
        folder.check(config)
    missing = [run for run in zip(configs, folders, strict=True) if not run[1].is_complete]
    failed: list[TrainingError] = []
    loaded: tuple[DataConfig, Dataset] | None = None
    for positions in plan_stacks([config for config, _ in missing], device):
        chosen, into = zip(*(missing[position] for position in positions), strict=True)
        if loaded is None or loaded[0] != chosen[0].data:
            loaded = chosen[0].data, load_data(chosen[0].data, data_dir)
        try:
            train_stack(chosen, into, loaded[1], device, listener, stop=stop, checkpoint_every=checkpoint_every)
        except TrainingError as error:
            failed.append(error)
    _raise_together(failed)


def train_stack(
    configs: Sequence[RunConfig],
    folders: Sequence[RunFolder],
    dataset: Dataset,
    device: torch.device,
    listener: Listener | None = None,
    *,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
) -> None:
    """Train runs of equal shapes as one stack, each until its own end. Nothing is written before the stack stands.

    A stack that does not fit into memory goes on as two halves, and one with a cell whose loss is not finite without
    that cell, from the last whole epoch: a cell's numbers do not depend on what it was stacked with.

    Args:
        stop: asked after every step. If a stop is wished for, the last whole epoch is put on disk and `StoppedError`
            raised.
        checkpoint_every: epochs between checkpoints. A kill costs the epochs since the last one; an end that can be
            seen coming (a stop, an error) costs none.
    """
    check_at_least("checkpoint_every", checkpoint_every, 1)
    waiting = [list(zip(configs, folders, strict=True))]
    failed: list[TrainingError] = []
    while waiting:
        runs = waiting.pop(0)
        trainer = _Trainer(dataset, device, listener or Listener(), stop or Stop(), checkpoint_every)
        try:
            trainer.train([Cell(config, folder) for config, folder in runs])
            continue
        except DivergedError as error:
            failed.append(error)
            gone = {cell.folder.path for cell in error.cells}
            parts = [[run for run in runs if not run[1].is_complete and run[1].path not in gone]]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            left = [run for run in runs if not run[1].is_complete]
            if len(left) == 1:
                failed.append(_too_large(left[0][0], device))
                continue
            parts = [left[: (len(left) + 1) // 2], left[(len(left) + 1) // 2 :]]
            _tell_of_split(parts, listener or Listener())
        # After the handler: the error keeps the failed step, and so its memory, alive.
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        waiting = [part for part in parts if part] + waiting
    _raise_together(failed)


def _tell_of_split(parts: Sequence[Sequence[tuple[RunConfig, RunFolder]]], listener: Listener) -> None:
    sizes = [len(part) for part in parts]
    for part in parts:
        for _, folder in part:
            if folder.path.is_dir():  # the stack may not even have stood
                folder.log("out of memory", cells=sum(sizes), continuing_with=len(part))
    listener.split(sizes)


def _too_large(config: RunConfig, device: torch.device) -> TrainingError:
    return TrainingError(
        f"a step of {config.protocol.batch_size} images does not fit into the memory of {device}, even of one run "
        "alone; the last whole epoch is kept. Free some memory and give the same command again, or start a run with "
        "a smaller --protocol.batch-size"
    )


def _raise_together(failed: Sequence[TrainingError]) -> None:
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise TrainingError(f"{len(failed)} runs could not go on: " + "; ".join(map(str, failed)))


class _Trainer:
    """Trains some cells as one stack."""

    def __init__(
        self, dataset: Dataset, device: torch.device, listener: Listener, stop: Stop, checkpoint_every: int
    ) -> None:
        self._dataset, self._device, self._listener, self._stop = dataset, device, listener, stop
        self._checkpoint_every = checkpoint_every
        self._cells: list[Cell] = []
        """Those whose folders are not complete yet."""

    def train(self, cells: list[Cell]) -> None:
        stack = Stack.start([cell.config for cell in cells], self._dataset, self._device)
        for position, cell in enumerate(cells):
            cell.folder.claim(cell.config)
            cell.resume(stack, position)
            self._listener.started(cell.config, cell.epochs_done, stack.steps_per_epoch)
            cell.folder.log("started", epochs_done=cell.epochs_done, device=str(self._device))
        self._cells = cells
        try:
            with self._stop.heeded():
                self._run(stack)
        except Exception as error:
            # Whole epochs that no checkpoint has yet must not be lost to what happened in the next one.
            for cell in self._cells:
                cell.save()
                if isinstance(error, StoppedError) and not cell.folder.is_complete:
                    cell.folder.log("stopped", by=error.by, epochs_done=cell.epochs_done)
            raise

    def _run(self, stack: Stack) -> None:
        course: TimeCourse | None = None
        if any(cell.config.measure_every for cell in self._cells):
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
                    finish(cell, stack, self._dataset, self._heed)
                    self._listener.finished(cell.config, cell.folder)
            self._cells = [self._cells[position] for position in going]
            stack = stack.select(going) if going else stack

    def _run_epoch(self, stack: Stack, course: TimeCourse | None) -> None:
        self._heed()
        began = time.perf_counter()
        results = stack.run_epoch(self._on_step)
        seconds = time.perf_counter() - began
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
        self._heed()

    def _heed(self) -> None:
        if self._stop.by is not None:
            unfinished = [cell.epochs_done for cell in self._cells if not cell.folder.is_complete]
            raise StoppedError(self._stop.by, unfinished)

    def _check_finite(self, results: Sequence[EpochResult]) -> None:
        diverged, messages = [], []
        for cell, result in zip(self._cells, results, strict=True):
            if math.isfinite(result.train_loss) and math.isfinite(result.val_loss):
                continue
            epoch = cell.epochs_done + 1
            cell.folder.log("diverged", epoch=epoch, train_loss=str(result.train_loss))
            kept = f"the checkpoint of epoch {epoch - 1} is kept" if epoch > 1 else "no epoch was finished"
            diverged.append(cell)
            messages.append(f"the loss of {cell.folder.path} became {result.train_loss} in epoch {epoch}; {kept}")
        if diverged:
            raise DivergedError(f"{'; '.join(messages)}. Try a lower --protocol.lr, or --precision fp32", diverged)
