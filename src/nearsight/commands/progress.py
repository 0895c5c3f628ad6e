"""Progress of training and measuring on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from nearsight.train import HistoryRow, Listener, RunConfig, RunFolder

SECONDS_BETWEEN_LINES = 10.0


def most_local_head(result: Mapping[str, Any]) -> str:
    """How far it looks, in the words for people, from what result.json says."""
    return "no heads to measure" if result["min_mad"] is None else f"most local head {result['min_mad']:.3f}"


class MeasuringProgress:
    """Counts the images a model has been measured on; use it as a context manager."""

    def __init__(self, label: str, num_images: int) -> None:
        self._label, self._num_images = label, num_images
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._done = 0
        self._began = self._said = time.perf_counter()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console).__enter__()
            self._task = self._bar.add_task(self._label, total=self._num_images)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, traceback)
        elif kind is None:
            self._say(f"{self._done} images measured in {time.perf_counter() - self._began:.1f} s")

    def counted(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The same batches; one counts as done when the next is asked for."""
        self._show(0)  # measuring may start anew
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

    def _say(self, text: str) -> None:
        print(f"{self._label}: {text}", file=sys.stderr, flush=True)


class TrainingProgress(Listener):
    """Shows one run at a time; use it as a context manager."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._steps_per_epoch = 0
        self._steps_before = 0
        self._max_epochs = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._console,
            ).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, traceback)

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._steps_per_epoch, self._max_epochs = steps_per_epoch, config.protocol.max_epochs
        self._steps_before = epochs_done * steps_per_epoch
        if self._bar is not None:
            total = self._max_epochs * steps_per_epoch
            self._task = self._bar.add_task(self._label, total=total, completed=self._steps_before, status="")
        elif epochs_done:
            self._say(f"continuing after epoch {epochs_done}")

    def step(self, step: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._steps_before + step)

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self._steps_before = row.epoch * self._steps_per_epoch
        status = f"train loss {row.train_loss:.3f}, validation accuracy {row.val_acc:.1%}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._steps_before, status=status)
        else:
            self._say(f"epoch {row.epoch}/{self._max_epochs}: {status}, {row.seconds:.1f} s")

    def split(self, sizes: Sequence[int]) -> None:
        parts = " and ".join(map(str, sizes))
        self._say(f"{sum(sizes)} runs do not fit into memory at once; they continue as {parts}")

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        if self._bar is None:
            self._say(f"finished, test accuracy {folder.read_result()['test_acc']:.1%}")

    def _say(self, text: str) -> None:
        print(f"{self._label}: {text}", file=sys.stderr, flush=True)
