"""One run of a stack: its state, how it is saved to a checkpoint and restored from it, and how it is finished.

When it is finished, the best weights become the model, the test set is used once, and the heads are measured.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor, nn

from nearsight.data import Dataset, DeviceImages
from nearsight.errors import InputError
from nearsight.files import write_json, write_text
from nearsight.lens.positions import position_gram
from nearsight.lens.running import NoSpatialAttentionError
from nearsight.models import load_model, save_model
from nearsight.train.config import RunConfig
from nearsight.train.engine import Stack
from nearsight.train.folder import HEADS_COLUMNS, LAYERS_COLUMNS, HistoryRow, Progress, RunFolder, write_heads
from nearsight.train.heads import measure_on_test
from nearsight.train.integrity import provenance

Tensors = dict[str, Tensor]

_EXTREMES = ("min_mad", "max_mad", "min_entropy", "max_entropy", "max_share_self", "max_share_near")
"""Over all heads. Shares of attention are those on a patch itself, and on it and its 8 neighbours: a head that looks at
the nearest edge of the image has a small distance too, and does not look near."""


@dataclass
class Cell:
    """A run, its progress, and the part of it that is not on disk yet."""

    config: RunConfig
    folder: RunFolder
    progress: Progress = field(default_factory=Progress)
    best_weights: Tensors = field(default_factory=dict)
    unsaved: Tensors | None = None
    """Its state after the last whole epoch, if the checkpoint is of an earlier one: the stack itself goes on."""
    num_heads_written: int = 0
    """Rows of heads.csv that this process wrote."""

    @property
    def is_over(self) -> bool:
        protocol = self.config.protocol
        return self.progress.is_over(protocol.max_epochs, protocol.patience)

    @property
    def epochs_done(self) -> int:
        return self.progress.epochs_done

    def begin(self, heads: pd.DataFrame) -> None:
        """Note the heads of the initial weights; they reach the disk with the first epoch."""
        self.progress = replace(self.progress, heads=heads[list(HEADS_COLUMNS)])

    def record(
        self, stack: Stack, position: int, row: HistoryRow, heads: pd.DataFrame | None, *, checkpoint_every: int
    ) -> None:
        """Note an epoch that is over and what was measured after it; every so many, and at the end, on disk."""
        self.unsaved = None  # first: it belongs to the progress so far
        measured = [part for part in (self.progress.heads, heads) if part is not None]
        self.progress = Progress(
            history=(*self.progress.history, row),
            heads=pd.concat(measured, ignore_index=True)[list(HEADS_COLUMNS)] if measured else None,
        )
        if self.progress.best is row:
            self.best_weights = {name: part[position].clone() for name, part in stack.weights.items()}
        if self.is_over or row.epoch % checkpoint_every == 0:
            self._write(_state(stack, position))
        else:
            self.unsaved = _state(stack, position, copied=True)
        self.folder.log("epoch", epoch=row.epoch, val_acc=row.val_acc)

    def save(self) -> None:
        """Write the last whole epoch, if it is not written yet."""
        if self.unsaved is not None:
            self._write(self.unsaved)

    def _write(self, state: Tensors) -> None:
        best = {f"best/{name}": weight for name, weight in self.best_weights.items()}
        self.folder.write_checkpoint(self.progress, state | best, self.config)
        self.unsaved = None
        heads = self.progress.heads
        if heads is not None and len(heads) > self.num_heads_written:
            self.folder.write_heads_so_far(heads)
            self.num_heads_written = len(heads)

    @torch.no_grad()
    def resume(self, stack: Stack, position: int) -> None:
        """Put the cell where its checkpoint says it was."""
        stored = self.folder.read_checkpoint(self.config)
        if stored is None:
            return
        self.progress, tensors = stored
        try:
            for group, flat_KP in _groups(stack).items():
                for name, part in stack.optimizer.arrangement.parts(flat_KP[position]).items():
                    part.copy_(tensors[f"{group}/{name}"])
            for name, statistic in _statistics(stack, position).items():
                statistic.copy_(tensors[name])
            stack.optimizer.steps_done_K[position] = tensors["steps_done"]
            if stack.scale is not None:
                stack.scale.scale_K[position] = tensors["loss_scale"]
                stack.scale.finite_steps_K[position] = tensors["finite_steps"]
            self.best_weights = {name: tensors[f"best/{name}"].to(stack.device) for name in stack.weights}
        except (KeyError, RuntimeError) as error:
            raise InputError(f"{self.folder.checkpoint} does not fit the run's model: {error}") from error
        stack.epochs_done[position] = self.epochs_done


def _groups(stack: Stack) -> Tensors:
    """The parts of a stack's state that have a number for each parameter, [K, P]."""
    optimizer = stack.optimizer
    groups = {"weights": optimizer.weights_KP, "first": optimizer.first_KP, "second": optimizer.second_KP}
    return groups if stack.average is None else {**groups, "average": stack.average.weights_KP}


def _statistics(stack: Stack, position: int) -> Tensors:
    """The running statistics of one cell and their averages, as a checkpoint calls them, sharing memory with the
    stack's."""
    groups = {"statistics": stack.statistics, "average": {} if stack.average is None else stack.average.statistics}
    return {
        f"{group}/{name}": statistic[position] for group, held in groups.items() for name, statistic in held.items()
    }


def _state(stack: Stack, position: int, *, copied: bool = False) -> Tensors:
    """Everything that training one cell further depends on, apart from its epoch: randomness has no state."""
    state: Tensors = {"steps_done": stack.optimizer.steps_done_K[position].clone()}
    if stack.scale is not None:
        state["loss_scale"] = stack.scale.scale_K[position].clone()
        state["finite_steps"] = stack.scale.finite_steps_K[position].clone()
    for group, flat_KP in _groups(stack).items():
        flat_P = flat_KP[position]
        parts = stack.optimizer.arrangement.parts(flat_P.clone() if copied else flat_P)
        state |= {f"{group}/{name}": part for name, part in parts.items()}
    for name, part in _statistics(stack, position).items():
        state[name] = part.clone() if copied else part
    return state


def finish(cell: Cell, stack: Stack, dataset: Dataset, check_stop: Callable[[], None]) -> None:
    """Write all files of a complete folder but its history.

    `check_stop` is called now and then and may raise; after an interruption all of this is done again.
    """
    check_stop()
    config, folder, best = cell.config, cell.folder, cell.progress.best
    assert best is not None
    device = stack.device
    began = time.perf_counter()
    folder.write_history(cell.progress.history)  # again, in case it was damaged
    save_model(folder.model, cell.best_weights, config.model, dataset.image_size, dataset.num_classes)
    best_stack = {name: weight.unsqueeze(0) for name, weight in cell.best_weights.items()}
    every_test_image = torch.arange(len(dataset.test), device=device)
    (test_loss,), (test_acc,) = stack.evaluate(DeviceImages(dataset.test, device), every_test_image, best_stack)
    model = load_model(folder.model)
    measured = _measure(model, cell, dataset, device, check_stop)
    write_json(
        folder.path / "result.json",
        {
            "identity": config.identity,
            "test_acc": test_acc,
            "test_loss": test_loss,
            "val_acc": best.val_acc,
            "best_epoch": best.epoch,
            "epochs": cell.epochs_done,
            **measured,
            "position_association": _position_association(model),
        },
    )
    training_seconds = sum(row.seconds for row in cell.progress.history)
    images_seen = cell.epochs_done * stack.steps_per_epoch * config.protocol.batch_size
    folder.finish(
        {
            **provenance(device),
            "processes": stack.processes.num,
            "seed": config.seed,
            "identity": config.identity,
            "data_fingerprint": dataset.fingerprint,
            "wall_seconds": training_seconds + time.perf_counter() - began,
            "images_per_second": images_seen / training_seconds,
        }
    )
    folder.log("finished", test_acc=test_acc)


def _position_association(model: nn.Module) -> float | None:
    """Share of a patch's neighbours whose learned positions are most like its own; None without such positions."""
    try:
        return float(position_gram(model).neighbours.fraction)
    except InputError:
        return None


def _measure(
    model: nn.Module, cell: Cell, dataset: Dataset, device: torch.device, check_stop: Callable[[], None]
) -> dict[str, float | None]:
    """Write the tables of the model's heads and layers; the extremes, which are None in a model without such heads."""
    folder, best = cell.folder, cell.progress.best
    assert best is not None
    try:
        table = measure_on_test(model, dataset, cell.config.num_measured, device, check_stop)
    except NoSpatialAttentionError as reason:
        folder.log("heads not measured", reason=str(reason))
        heads, layers = pd.DataFrame(columns=list(HEADS_COLUMNS)), pd.DataFrame(columns=list(LAYERS_COLUMNS))
        extremes: dict[str, float | None] = dict.fromkeys(_EXTREMES)
        num_images = 0
    else:
        table.save(folder.heads_per_image)
        heads, layers, num_images = table.to_frame(), table.extra_frame("layer"), table.num_images
        shares = table.extra_frame("head")
        near = shares["share_self"] + shares["share_neighbours"]
        found = (heads["mad"].min(), heads["mad"].max(), heads["entropy"].min(), heads["entropy"].max())
        extremes = dict(zip(_EXTREMES, map(float, (*found, shares["share_self"].max(), near.max())), strict=True))
    write_heads(folder.heads, heads, best.epoch, others=cell.progress.heads)
    write_text(folder.layers, layers[list(LAYERS_COLUMNS)].to_csv(index=False))
    return {**extremes, "num_measured": num_images}
