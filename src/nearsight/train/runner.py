"""Runs from start to finish: train, validate, checkpoint, stop, test once, measure, write. Killed at any moment, a run
continues from its last whole epoch and gives the numbers it would have given."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nearsight.augment import grey_levels, normalize
from nearsight.data import Dataset, DeviceImages, load_dataset, measuring_subset
from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.lens import HeadTable, measure
from nearsight.models import load_model, save_model
from nearsight.train.config import DataConfig, RunConfig
from nearsight.train.engine import EpochResult, Stack
from nearsight.train.folder import HistoryRow, Progress, RunFolder, write_heads
from nearsight.train.provenance import provenance


class TrainingError(RuntimeError):
    """Training cannot go on; the run folder keeps the last good checkpoint."""


class Listener:
    """Told what happens while runs train; the default listens to nothing."""

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None: ...

    def step(self, step: int) -> None: ...

    def epoch(self, config: RunConfig, row: HistoryRow) -> None: ...

    def finished(self, config: RunConfig, folder: RunFolder) -> None: ...


@dataclass
class _Cell:
    """One run of a stack and what it has to remember."""

    config: RunConfig
    folder: RunFolder
    progress: Progress = field(default_factory=Progress)
    best_weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        protocol = self.config.protocol
        return self.progress.is_over(protocol.max_epochs, protocol.patience)


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
) -> RunFolder:
    """Train one run in the folder `path`, or finish what is missing there."""
    folder = RunFolder(path)
    folder.check(config)
    if not folder.is_complete:
        dataset = load_data(config.data, data_dir)
        train_stack([config], [folder], dataset, torch.device(device), listener or Listener())
    return folder


def train_stack(
    configs: Sequence[RunConfig],
    folders: Sequence[RunFolder],
    dataset: Dataset,
    device: torch.device,
    listener: Listener,
) -> None:
    """Train runs of equal shapes as one stack, each until its own end. Nothing is written before the stack stands."""
    stack = Stack.start(configs, dataset, device)
    cells = [_Cell(config, folder) for config, folder in zip(configs, folders, strict=True)]
    for position, cell in enumerate(cells):
        cell.folder.claim(cell.config)
        _resume(stack, position, cell)
        listener.started(cell.config, cell.progress.epochs_done, stack.steps_per_epoch)
        cell.folder.log("started", epochs_done=cell.progress.epochs_done, device=str(device))
    while cells:
        going = [position for position, cell in enumerate(cells) if not cell.is_over]
        for cell in cells:
            if cell.is_over:
                _finish(cell, stack, dataset)
                listener.finished(cell.config, cell.folder)
        if len(going) < len(cells):
            cells = [cells[position] for position in going]
            stack = stack.select(going) if going else stack
            continue
        began = time.perf_counter()
        results = stack.run_epoch(listener.step)
        seconds = time.perf_counter() - began
        for position, (cell, result) in enumerate(zip(cells, results, strict=True)):
            _record(stack, position, cell, result, seconds)
            listener.epoch(cell.config, cell.progress.history[-1])


def _record(stack: Stack, position: int, cell: _Cell, result: EpochResult, seconds: float) -> None:
    epoch = cell.progress.epochs_done + 1
    if not (math.isfinite(result.train_loss) and math.isfinite(result.val_loss)):
        cell.folder.log("diverged", epoch=epoch, train_loss=str(result.train_loss))
        kept = f"the checkpoint of epoch {epoch - 1} is kept" if epoch > 1 else "no epoch was finished"
        raise TrainingError(
            f"the loss of {cell.folder.path} became {result.train_loss} in epoch {epoch}; {kept}. "
            "Try a lower --protocol.lr, or --precision fp32"
        )
    row = HistoryRow(
        epoch=epoch,
        train_loss=result.train_loss,
        val_loss=result.val_loss,
        val_acc=result.val_acc,
        lr=result.lr,
        seconds=seconds,
    )
    cell.progress = Progress(history=(*cell.progress.history, row))
    if cell.progress.best is row:
        cell.best_weights = {name: weight[position].detach().clone() for name, weight in stack.weights.items()}
    tensors = _tensors_of(stack, position)
    tensors |= {f"best/{name}": weight for name, weight in cell.best_weights.items()}
    cell.folder.write_checkpoint(cell.progress, tensors, cell.config)
    cell.folder.log("epoch", epoch=epoch, val_acc=result.val_acc)


def _groups(stack: Stack) -> dict[str, dict[str, Tensor]]:
    optimizer = stack.optimizer
    return {"weights": optimizer.weights, "first": optimizer.first, "second": optimizer.second}


def _tensors_of(stack: Stack, position: int) -> dict[str, Tensor]:
    """Everything that training one cell further depends on, apart from its epoch: randomness has no state."""
    tensors = {
        f"{group}/{name}": tensor[position] for group, held in _groups(stack).items() for name, tensor in held.items()
    }
    return {**tensors, "steps_done": stack.optimizer.steps_done_K[position]}


@torch.no_grad()
def _resume(stack: Stack, position: int, cell: _Cell) -> None:
    """Put a cell where its checkpoint says it was."""
    stored = cell.folder.read_checkpoint(cell.config)
    if stored is None:
        return
    cell.progress, tensors = stored
    try:
        for group, held in _groups(stack).items():
            for name, tensor in held.items():
                tensor[position] = tensors[f"{group}/{name}"]
        stack.optimizer.steps_done_K[position] = tensors["steps_done"]
        cell.best_weights = {name: tensors[f"best/{name}"].to(stack.device) for name in stack.weights}
    except (KeyError, RuntimeError) as error:
        raise InputError(f"{cell.folder.checkpoint} does not fit the run's model: {error}") from error
    stack.epochs_done[position] = cell.progress.epochs_done


def _finish(cell: _Cell, stack: Stack, dataset: Dataset) -> None:
    """The best weights become the model; the test set is touched once."""
    config, folder, best = cell.config, cell.folder, cell.progress.best
    assert best is not None
    device = stack.device
    began = time.perf_counter()
    save_model(folder.model, cell.best_weights, config.model, dataset.image_size, dataset.num_classes)
    best_stack = {name: weight.unsqueeze(0) for name, weight in cell.best_weights.items()}
    every_test_image = torch.arange(len(dataset.test), device=device)
    (test_loss,), (test_acc,) = stack.evaluate(DeviceImages(dataset.test, device), every_test_image, best_stack)
    table = measure_on_test(load_model(folder.model), dataset, config.num_measured, device)
    write_heads(folder.heads, table.to_frame(), best.epoch)
    write_json(
        folder.path / "result.json",
        {
            "identity": config.identity,
            "test_acc": test_acc,
            "test_loss": test_loss,
            "val_acc": best.val_acc,
            "best_epoch": best.epoch,
            "epochs": cell.progress.epochs_done,
            "min_mad": float(table.mad.min()),
            "max_mad": float(table.mad.max()),
            "min_entropy": float(table.entropy.min()),
            "max_entropy": float(table.entropy.max()),
            "num_measured": table.num_images,
        },
    )
    folder.log("finished", test_acc=test_acc)
    training_seconds = sum(row.seconds for row in cell.progress.history)
    images_seen = cell.progress.epochs_done * stack.steps_per_epoch * config.protocol.batch_size
    write_json(
        folder.path / "provenance.json",
        {
            **provenance(device),
            "seed": config.seed,
            "identity": config.identity,
            "data_fingerprint": dataset.fingerprint,
            "wall_seconds": training_seconds + time.perf_counter() - began,
            "images_per_second": images_seen / training_seconds,
        },
    )


def measure_on_test(model: torch.nn.Module, dataset: Dataset, num_images: int, device: torch.device) -> HeadTable:
    """The heads of a model on the measuring subset of the test set: the same images for every model."""
    chosen = measuring_subset(len(dataset.test), num_images)
    mean_C, std_C = grey_levels(dataset.mean, device), grey_levels(dataset.std, device)
    batches = (normalize(dataset.test.images_NCHW[index].to(device), mean_C, std_C) for index in chosen.split(256))
    return measure(model, batches, batch_size=256, device=device, precision="float64")
