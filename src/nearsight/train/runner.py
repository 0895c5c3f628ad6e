"""Runs from start to finish: train, validate, checkpoint, stop, test once, measure, write. Killed at any moment, a run
continues from its last checkpoint and gives the numbers it would have given."""

import functools
import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError, check_at_least
from nearsight.train.cell import Cell
from nearsight.train.config import DataConfig, RunConfig
from nearsight.train.folder import FolderElsewhere, RunFolder
from nearsight.train.integrity import check_finished
from nearsight.train.planning import is_out_of_memory, plan_stacks
from nearsight.train.processes import Processes
from nearsight.train.stopping import Stop, TrainingError
from nearsight.train.trainer import DivergedError, Listener, Trainer

__all__ = [
    "Listener",
    "TrainingError",
    "check_images_of_finished",
    "load_data",
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

    Those of equal shapes train together, as many at a time as memory takes. If a run cannot go on,
    the others are finished first; then its error is raised.

    Of several processes (torchrun) each calls this with the same runs, and they train every stack together; the first
    one reads and writes the folders.
    """
    device, processes = torch.device(device), Processes.joined()
    check_at_least("checkpoint_every", checkpoint_every, 1)
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise InputError("two runs share a folder; give each its own")
    failed: list[TrainingError] = []
    loaded: tuple[DataConfig, Dataset] | None = None
    for positions in processes.from_first(lambda: _plan(configs, folders, device, data_dir)):
        chosen, into = zip(*((configs[position], folders[position]) for position in positions), strict=True)
        if loaded is None or loaded[0] != chosen[0].data:
            loaded = chosen[0].data, load_data(chosen[0].data, data_dir)
        try:
            train_stack(chosen, into, loaded[1], device, listener, stop=stop, checkpoint_every=checkpoint_every)
        except TrainingError as error:
            failed.append(error)
    _raise_together(failed)


def _plan(
    configs: Sequence[RunConfig], folders: Sequence[RunFolder], device: torch.device, data_dir: Path | None
) -> list[list[int]]:
    """Positions of the runs that are not complete, stack by stack."""
    for config, folder in zip(configs, folders, strict=True):
        folder.check(config)
    check_images_of_finished(configs, folders, data_dir)
    missing = [position for position, folder in enumerate(folders) if not folder.is_complete]
    stacks = plan_stacks([configs[position] for position in missing], device)
    return [[missing[place] for place in stack] for stack in stacks]


def check_images_of_finished(configs: Sequence[RunConfig], folders: Sequence[RunFolder], data_dir: Path | None) -> None:
    """Refuse runs, of these folders those that are complete, that are on other images than there are now."""
    load = functools.cache(lambda data: load_data(data, data_dir))  # many runs may be on the same images
    for config, folder in zip(configs, folders, strict=True):
        if folder.is_complete:
            check_finished(folder.path, config.data.name, functools.partial(load, config.data))


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
    """Train runs of equal shapes as one stack, each until its own end. Nothing is written before the stack is built.

    A stack that does not fit into memory goes on as two halves, and one with a cell whose loss is not finite without
    that cell, from the last whole epoch: a cell's numbers do not depend on what it was stacked with.

    Args:
        stop: checked after every step. If a stop is requested, the last whole epoch is put on disk and `StoppedError`
            raised.
        checkpoint_every: epochs between checkpoints. A kill costs the epochs since the last one; an end that can be
            seen coming (a stop, an error) costs none.
    """
    check_at_least("checkpoint_every", checkpoint_every, 1)
    processes = Processes.joined()
    if not processes.is_first:
        folders, listener = [FolderElsewhere(folder.path) for folder in folders], None
    waiting = [list(zip(configs, folders, strict=True))]
    failed: list[TrainingError] = []
    while waiting:
        runs = waiting.pop(0)
        trainer = Trainer(dataset, device, listener or Listener(), stop or Stop(), checkpoint_every, processes)
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
            if processes.num > 1:  # the others may have enough memory, and cannot be asked: they wait for a gradient
                raise _too_large_a_share(left[0][0], device, processes) from error
            if len(left) == 1:
                failed.append(_too_large(left[0][0], device))
                continue
            parts = [left[: (len(left) + 1) // 2], left[(len(left) + 1) // 2 :]]
            _report_split(parts, listener or Listener())
        # After the handler: the error keeps the failed step, and so its memory, alive.
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        waiting = [part for part in parts if part] + waiting
    _raise_together(failed)


def _report_split(parts: Sequence[Sequence[tuple[RunConfig, RunFolder]]], listener: Listener) -> None:
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


def _raise_together(failed: Sequence[TrainingError]) -> None:
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise TrainingError(f"{len(failed)} runs could not go on: " + "; ".join(map(str, failed)))
