"""Progress of pretraining on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from nearsight.train.dino import DinoConfig, DinoListener, DinoRow


class DinoProgress(DinoListener):
    """Shows one run; use it as a context manager. A silent one is for all processes but the first."""

    def __init__(self, label: str, *, silent: bool = False) -> None:
        self._label, self._silent = label, silent
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._steps_per_epoch = self._steps_before = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._silent:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            shown = TextColumn("{task.fields[status]}")
            self._bar = Progress(*columns, TimeRemainingColumn(), shown, console=self._console).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, traceback)

    def started(self, config: DinoConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._steps_per_epoch, self._steps_before = steps_per_epoch, epochs_done * steps_per_epoch
        if self._bar is not None:
            total = config.protocol.epochs * steps_per_epoch
            self._task = self._bar.add_task(self._label, total=total, completed=self._steps_before, status="")
        elif epochs_done:
            self._say(f"continuing after epoch {epochs_done}")

    def step(self, step: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._steps_before + step)

    def epoch(self, config: DinoConfig, row: DinoRow) -> None:
        self._steps_before = row.epoch * self._steps_per_epoch
        status = f"loss {row.loss:.3f}, {row.prototypes_used:.0f} prototypes in use"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._steps_before, status=status)
        else:
            self._say(f"epoch {row.epoch}/{config.protocol.epochs}: {status}, {row.seconds:.1f} s")

    def collapsed(self, row: DinoRow) -> None:
        self._say(f"warning: in epoch {row.epoch} the teacher said the same of all images; the run has collapsed")

    def _say(self, text: str) -> None:
        if not self._silent:
            print(f"{self._label}: {text}", file=sys.stderr, flush=True)
