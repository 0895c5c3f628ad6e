"""One run of a stack: what it has to remember, how it comes out of its checkpoint and goes into it."""

from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.train.config import RunConfig
from nearsight.train.engine import Stack
from nearsight.train.folder import HEADS_COLUMNS, HistoryRow, Progress, RunFolder

Tensors = dict[str, Tensor]


@dataclass
class Cell:
    """A run, where it is, and what of that is not on disk yet."""

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
            optimizer = stack.optimizer
            self.best_weights = optimizer.arrangement.parts(optimizer.weights_KP[position].clone())
            self.best_weights |= {name: part.clone() for name, part in _statistics(stack, position).items()}
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
                statistic.copy_(tensors[f"statistics/{name}"])
            stack.optimizer.steps_done_K[position] = tensors["steps_done"]
            self.best_weights = {name: tensors[f"best/{name}"].to(stack.device) for name in stack.weights}
        except (KeyError, RuntimeError) as error:
            raise InputError(f"{self.folder.checkpoint} does not fit the run's model: {error}") from error
        stack.epochs_done[position] = self.epochs_done


def _groups(stack: Stack) -> Tensors:
    """The parts of a stack's state that have a number for each parameter, [K, P]."""
    optimizer = stack.optimizer
    return {"weights": optimizer.weights_KP, "first": optimizer.first_KP, "second": optimizer.second_KP}


def _statistics(stack: Stack, position: int) -> Tensors:
    """The running statistics of one cell, sharing memory with the stack's."""
    return {name: statistic[position] for name, statistic in stack.statistics.items()}


def _state(stack: Stack, position: int, *, copied: bool = False) -> Tensors:
    """Everything that training one cell further depends on, apart from its epoch: randomness has no state."""
    state: Tensors = {"steps_done": stack.optimizer.steps_done_K[position].clone()}
    for group, flat_KP in _groups(stack).items():
        flat_P = flat_KP[position]
        parts = stack.optimizer.arrangement.parts(flat_P.clone() if copied else flat_P)
        state |= {f"{group}/{name}": part for name, part in parts.items()}
    for name, part in _statistics(stack, position).items():
        state[f"statistics/{name}"] = part.clone() if copied else part
    return state
