"""Progress of a segmentation probe on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from nearsight.commands.progress import SECONDS_BETWEEN_LINES
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.probing import SegmentListener
from nearsight.probe.segmentation.training import LossRow


class SegmentProgress(SegmentListener):
    """Shows one probe; use it as a context manager."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said = time.perf_counter()
        self._iterations = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            status = TextColumn("{task.fields[status]}", markup=False)
            self._bar = Progress(*columns, TimeRemainingColumn(), status, console=self._console).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, traceback)

    def started(self, steps_done: int, config: SegmentConfig) -> None:
        self._iterations = config.iterations
        if steps_done:
            self._say(f"continuing after iteration {steps_done}")

    def step(self, steps_done: int, last: LossRow | None) -> None:
        self._show("training", steps_done, self._iterations, "" if last is None else f"loss {last.loss:.3f}")

    def tested(self, num_done: int, num_images: int) -> None:
        self._show("testing", num_done, num_images, "")

    def _show(self, what: str, done: int, total: int, status: str) -> None:
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(f"{self._label}, {what}", total=total, status="")
            self._bar.update(self._tasks[what], completed=done, status=status)
        elif done == total or time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._say(f"{what} {done}/{total}{', ' if status else ''}{status}")

    def _say(self, text: str) -> None:
        self._said = time.perf_counter()
        if self._bar is not None:
            self._bar.console.print(f"{self._label}: {text}", markup=False, highlight=False)
        else:
            print(f"{self._label}: {text}", file=sys.stderr, flush=True)
