"""Progress of training and measuring on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from nearsight.train import HistoryRow, Listener, RunConfig, RunFolder

SECONDS_BETWEEN_LINES = 10.0


def most_local_head(result: Mapping[str, Any]) -> str:
    """How far it looks, in the words for people, from what result.json says."""
    return "no heads to measure" if result["min_mad"] is None else f"most local head {result['min_mad']:.3f}"


class BarOrLines:
    """What all progress has in common; use it as a context manager. A silent one shows nothing."""

    columns: Sequence[type[ProgressColumn]] = (BarColumn, MofNCompleteColumn, TimeRemainingColumn)
    """Of the bar, between its label and its status."""

    def __init__(self, label: str, *, silent: bool = False) -> None:
        self._label, self._silent = label, silent
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._silent:
            label, status = (TextColumn(f"{{task.{what}}}", markup=False) for what in ("description", "fields[status]"))
            columns = (column() for column in self.columns)
            self._bar = Progress(label, *columns, status, console=self._console).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, traceback)

    def _say(self, text: str) -> None:
        if self._bar is not None:  # above the bar
            self._bar.console.print(f"{self._label}: {text}", markup=False, highlight=False, soft_wrap=True)
        elif not self._silent:
            print(f"{self._label}: {text}", file=sys.stderr, flush=True)


class MeasuringProgress(BarOrLines):
    """Counts the images a model has been measured on."""

    def __init__(self, label: str, num_images: int) -> None:
        super().__init__(label)
        self._num_images = num_images
        self._task: TaskID | None = None
        self._done = 0
        self._began = self._said = time.perf_counter()

    def __enter__(self) -> Self:
        super().__enter__()
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=self._num_images, status="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._bar is None and kind is None:
            images = "image" if self._done == 1 else "images"
            self._say(f"{self._done} {images} measured in {time.perf_counter() - self._began:.1f} s")

    def counted(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The same batches; one counts as done when the next is asked for."""
        self._show(0)  # measuring may start again
        for batch in batches:
            yield batch
            self._show(self._done + len(batch))

    def _show(self, done: int) -> None:
        self._done = done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)
        elif 0 < done < self._num_images and time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.perf_counter()
            self._say(f"{done}/{self._num_images} images")


class EpochProgress(BarOrLines):
    """Counts the steps and epochs of one run at a time."""

    def __init__(self, label: str, *, silent: bool = False) -> None:
        super().__init__(label, silent=silent)
        self._task: TaskID | None = None
        self._steps_per_epoch = self._steps_before = self._num_epochs = 0

    def step(self, step: int) -> None:
        """So many steps of this epoch are done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._steps_before + step)

    def _begin(self, num_epochs: int, epochs_done: int, steps_per_epoch: int) -> None:
        self._steps_per_epoch, self._num_epochs = steps_per_epoch, num_epochs
        self._steps_before = epochs_done * steps_per_epoch
        if self._bar is not None:
            total = num_epochs * steps_per_epoch
            self._task = self._bar.add_task(self._label, total=total, completed=self._steps_before, status="")
        elif epochs_done:
            self._say(f"continuing after epoch {epochs_done}")

    def _end_epoch(self, epoch: int, status: str, seconds: float) -> None:
        self._steps_before = epoch * self._steps_per_epoch
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._steps_before, status=status)
        else:
            left = (self._num_epochs - epoch) * seconds / 60
            remaining = f", at most {left:.1f} min to go at this pace" if left else ""
            self._say(f"epoch {epoch}/{self._num_epochs}: {status}, {seconds:.1f} s{remaining}")


class TrainingProgress(EpochProgress, Listener):
    """Shows training with labels."""

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._begin(config.protocol.max_epochs, epochs_done, steps_per_epoch)

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        status = f"train loss {row.train_loss:.3f}, validation accuracy {row.val_acc:.1%}"
        self._end_epoch(row.epoch, status, row.seconds)

    def split(self, sizes: Sequence[int]) -> None:
        parts = " and ".join(map(str, sizes))
        self._say(f"{sum(sizes)} runs do not fit into memory at once; they continue as {parts}")

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        if self._bar is None:
            self._say(f"finished, test accuracy {folder.read_result()['test_acc']:.1%}")
