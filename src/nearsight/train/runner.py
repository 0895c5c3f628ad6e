"""Runs from start to finish: train, validate, checkpoint, stop, test once, measure, write. Killed at any moment, a run
continues from its last checkpoint and gives the numbers it would have given.

Runs wait in a queue. Those of one kind (equal shapes: `RunConfig.stack_key`) train in the slots of a stack, as many at
a time as memory takes; when one ends, the next of its kind takes its slot. Kinds follow one another.
"""

import functools
import gc
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError, check_at_least
from nearsight.train.config import DataConfig, RunConfig
from nearsight.train.folder import FolderElsewhere, RunFolder
from nearsight.train.integrity import check_finished
from nearsight.train.planning import MOST_CELLS, check_stackable, is_out_of_memory, num_slots
from nearsight.train.processes import Processes
from nearsight.train.stopping import Stop, TrainingError
from nearsight.train.trainer import DivergedError, Listener, Run, Trainer

__all__ = [
    "Listener",
    "Run",
    "RunQueue",
    "TrainingError",
    "check_images_of_finished",
    "load_data",
    "train_queue",
    "train_run",
    "train_runs",
    "train_stack",
]


def load_data(config: DataConfig, data_dir: Path | None = None) -> Dataset:
    """The data set a run asks for."""
    return load_dataset(
        config.name,
        data_dir=data_dir,
        image_size=config.image_size,
        num_train=config.num_train,
        num_test=config.num_test,
        stream=config.stream,
        crop_pct=config.crop_pct,
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


Load = Callable[[DataConfig, Path | None], Dataset]


class RunQueue(Protocol):
    """Runs that wait to be trained. What is taken is held by who took it, until it is finished or given up."""

    def kinds(self) -> Sequence[object]:
        """The stack keys of what waits, in the order in which they are to be trained."""

    def waiting(self, kind: object) -> Sequence[RunConfig]:
        """The runs of a kind that may still be given."""

    def take(self, kind: object, most: int) -> list[Run]:
        """The next runs of a kind, at most so many; none: there is none that can be taken now."""

    def give_up(self, run: Run, error: Exception) -> None:
        """A run that was taken cannot go on."""


class _Listed:
    """A queue of runs that are all there from the beginning."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs: dict[object, list[Run]] = {}
        for run in runs:
            self._runs.setdefault(run[0].stack_key, []).append(run)
        self.errors: list[Exception] = []

    def kinds(self) -> list[object]:
        return list(self._runs)

    def waiting(self, kind: object) -> list[RunConfig]:
        return [config for config, _ in self._runs[kind]]

    def take(self, kind: object, most: int) -> list[Run]:
        taken, self._runs[kind] = self._runs[kind][:most], self._runs[kind][most:]
        return taken

    def give_up(self, run: Run, error: Exception) -> None:
        self.errors.append(error)


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
    """Train any runs, each in its folder, or finish what is missing there. If a run cannot go on, the others are
    finished first; then its error is raised.

    Of several processes (torchrun) each calls this with the same runs, and they train every stack together; the first
    one reads and writes the folders.
    """
    processes = Processes.joined()
    check_at_least("checkpoint_every", checkpoint_every, 1)
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise InputError("two runs share a folder; give each its own")
    missing = processes.from_first(lambda: _missing(configs, folders, data_dir))
    queue = _Listed([(configs[position], _own(folders[position], processes)) for position in missing])
    train_queue(
        queue, device=device, data_dir=data_dir, listener=listener, stop=stop, checkpoint_every=checkpoint_every
    )
    _raise_together(queue.errors)


def _missing(configs: Sequence[RunConfig], folders: Sequence[RunFolder], data_dir: Path | None) -> list[int]:
    """Positions of the runs that are not complete."""
    for config, folder in zip(configs, folders, strict=True):
        folder.check(config)
    check_images_of_finished(configs, folders, data_dir)
    return [position for position, folder in enumerate(folders) if not folder.is_complete]


def _own(folder: RunFolder, processes: Processes) -> RunFolder:
    return folder if processes.is_first else FolderElsewhere(folder.path)


def check_images_of_finished(configs: Sequence[RunConfig], folders: Sequence[RunFolder], data_dir: Path | None) -> None:
    """Refuse runs, of these folders those that are complete, that are on other images than there are now."""
    load = functools.cache(lambda data: load_data(data, data_dir))  # many runs may be on the same images
    for config, folder in zip(configs, folders, strict=True):
        if folder.is_complete:
            check_finished(folder.path, config.data.name, functools.partial(load, config.data))


def train_queue(
    queue: RunQueue,
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
    most: int = MOST_CELLS,
    load: Load = load_data,
) -> None:
    """Train what a queue gives, kind by kind.

    Args:
        stop: checked after every step. If a stop is requested, the last whole epoch is put on disk and `StoppedError`
            raised.
        checkpoint_every: epochs between checkpoints. A kill costs the epochs since the last one; an end that can be
            seen coming (a stop, an error) costs none.
        most: slots of a stack at most; fewer where memory does not take so many.
        load: how a data set is got.
    """
    check_at_least("checkpoint_every", checkpoint_every, 1)
    device, processes = torch.device(device), Processes.joined()
    loaded: tuple[DataConfig, Dataset] | None = None
    for kind in queue.kinds():
        configs = queue.waiting(kind)
        if not configs:
            continue
        slots = processes.from_first(functools.partial(num_slots, configs[0], device, most))
        line = _Line(queue, kind, slots)
        while runs := line.take(line.slots):
            data = runs[0][0].data
            if loaded is None or loaded[0] != data:
                loaded = data, load(data, data_dir)
            _train_some(runs, line, loaded[1], device, listener or Listener(), stop or Stop(), checkpoint_every)


def train_stack(
    configs: Sequence[RunConfig],
    folders: Sequence[RunFolder],
    dataset: Dataset,
    device: torch.device,
    listener: Listener | None = None,
    *,
    slots: int | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
) -> None:
    """Train runs of equal shapes, each until its own end, on images that are there: in so many slots, by default all at
    once. Nothing is written before the stack is built."""
    check_at_least("checkpoint_every", checkpoint_every, 1)
    if len({config.stack_key for config in configs}) > 1:
        check_stackable(configs, dataset)
    processes = Processes.joined()
    queue = _Listed([(config, _own(folder, processes)) for config, folder in zip(configs, folders, strict=True)])
    line = _Line(queue, configs[0].stack_key, slots or len(configs))
    while runs := line.take(line.slots):
        _train_some(runs, line, dataset, device, listener or Listener(), stop or Stop(), checkpoint_every)
    _raise_together(queue.errors)


class _Line:
    """The runs of one kind: first those that a stack had to leave, then those of the queue."""

    def __init__(self, queue: RunQueue, kind: object, slots: int) -> None:
        self._queue, self._kind = queue, kind
        self.slots = slots
        self.back: list[Run] = []

    def waiting(self) -> list[RunConfig]:
        return [*(config for config, _ in self.back), *self._queue.waiting(self._kind)]

    def take(self, most: int) -> list[Run]:
        runs, self.back = self.back[:most], self.back[most:]
        return runs if len(runs) == most else [*runs, *self._queue.take(self._kind, most - len(runs))]

    def give_up(self, run: Run, error: Exception) -> None:
        self._queue.give_up(run, error)


def _train_some(
    runs: list[Run],
    line: _Line,
    dataset: Dataset,
    device: torch.device,
    listener: Listener,
    stop: Stop,
    checkpoint_every: int,
) -> None:
    """Train these runs as one stack, and those of the line that take their slots.

    A stack that does not fit into memory goes on with half as many slots, and one with a cell whose loss is not finite
    without that cell, from the last whole epoch: a cell's numbers do not depend on what it was stacked with.
    """
    processes = Processes.joined()
    if not processes.is_first:
        listener = Listener()
    trainer = Trainer(runs, line, dataset, device, listener, stop, checkpoint_every, processes)
    try:
        trainer.train()
        return
    except DivergedError as error:
        gone = dict(error.apart())
        for run, own in gone.items():
            line.give_up(run, own)
        left = [run for run in trainer.left if run not in gone]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        left = trainer.left
        if processes.num > 1:  # the others may have enough memory, and cannot be asked: they wait for a gradient
            raise _too_large_a_share(left[0][0], device, processes) from error
        if len(left) == 1:
            line.give_up(left[0], _too_large(left[0][0], device))
            left = []
        else:
            line.slots = math.ceil(len(left) / 2)
            _report_split([left[: line.slots], left[line.slots :]], listener)
    line.back = [*left, *line.back]
    # After the handler: the error keeps the failed step, and so its memory, alive.
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _report_split(parts: Sequence[Sequence[Run]], listener: Listener) -> None:
    sizes = [len(part) for part in parts]
    for part in parts:
        for _, folder in part:
            if folder.path.is_dir():  # the stack may not even have been built
                folder.log("out of memory", cells=sum(sizes), continuing_with=len(part))
    listener.split(sizes)


def _too_large(config: RunConfig, device: torch.device) -> TrainingError:
    return TrainingError(
        f"a step of {config.protocol.batch_size} images does not fit into the memory of {device}, even of one run "
        "alone; whole epochs are kept. Free some memory and give the same command again, or start a run with "
        "a smaller --protocol.batch-size"
    )


def _too_large_a_share(config: RunConfig, device: torch.device, processes: Processes) -> TrainingError:
    return TrainingError(
        f"one of {processes.num} shares of {config.protocol.batch_size} images does not fit into the memory of "
        f"{device}; whole epochs are kept. Give the same command to more processes, or start a run with a "
        "smaller --protocol.batch-size"
    )


def _raise_together(errors: Sequence[Exception]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        kind = InputError if all(isinstance(error, InputError) for error in errors) else TrainingError
        raise kind(f"{len(errors)} runs could not go on: " + "; ".join(map(str, errors)))
