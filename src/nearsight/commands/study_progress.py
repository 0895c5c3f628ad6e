"""Progress of a study or a simulation on standard error: a bar over all of it on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from rich.progress import BarColumn, TaskID, TimeRemainingColumn

from nearsight.commands.progress import SECONDS_BETWEEN_LINES, BarOrLines, most_local_head
from nearsight.commands.study_tables import counted_seeds
from nearsight.study import Cell, SimulationCell, SimulationListener, StudyListener
from nearsight.train import HistoryRow, RunConfig, RunFolder


@dataclass
class _Stack:
    """What one runner took, and the part of it that trains now."""

    runs: set[str]
    epochs: dict[str, int] = field(default_factory=dict)
    """Whole epochs of the cells that train now."""
    is_under_way: bool = False
    """Whether they have finished an epoch together."""
    steps_per_epoch: int = 0
    rate: float = 0.0
    """Images per second."""


class StudyBar(BarOrLines):
    """A bar over a whole study on a terminal, plain lines elsewhere, on standard error; use it as a context manager."""

    columns = (BarColumn, TimeRemainingColumn)

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._task: TaskID | None = None
        self._began = self._said = time.perf_counter()

    def _say(self, text: str) -> None:
        self._said = time.perf_counter()
        super()._say(text)


class StudyProgress(StudyBar, StudyListener):
    """Shows the cells that train now, of one runner or of several workers, and of one study or of several that are
    planned one after the other; use it as a context manager.

    What is left is counted in epochs of cells. Early stopping ends cells sooner, so the time left is at most that.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._conditions: dict[str, str] = {}
        self._num_cells = self._num_done = 0
        self._max_epochs: dict[str, int] = {}
        """Of the cells that this runner has not done; 0 once it has."""
        self._total = 0
        self._stacks: list[_Stack] = []
        """What each runner trains now."""
        self._epochs_done_here = 0

    def planned(self, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        self._num_cells += len(cells)
        self._num_done += len(cells) - len(missing)
        self._conditions |= {cell.run: f"{cell.condition}, seed {cell.seed}" for cell in missing}
        self._max_epochs |= {cell.run: cell.config.protocol.max_epochs for cell in missing}
        self._total = sum(self._max_epochs.values())
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._label, total=self._total, status="")
            self._bar.update(self._task, total=self._total, status=self._cells())
        else:
            self._say(self._cells())

    def taken(self, cells: Sequence[Cell]) -> None:
        self._stacks.append(_Stack({cell.run for cell in cells}))
        seeds = sorted({cell.seed for cell in cells})
        of_seeds = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
        self._say(f"{_counted(cells)} of {of_seeds}")

    def released(self, cells: Sequence[Cell]) -> None:
        for stack in self._stacks:
            for cell in cells:
                stack.runs.discard(cell.run)
                stack.epochs.pop(cell.run, None)
        self._stacks = [stack for stack in self._stacks if stack.runs]

    def worker_lost(self, cells: Sequence[Cell], problem: str, seconds: float | None) -> None:
        next_try = "they are not tried again" if seconds is None else f"they are tried again in {seconds:.0f} s"
        self._say(f"a worker was lost ({problem}) at {_counted(cells)}; {next_try}")

    def set_aside(self, path: Path, problem: str) -> None:
        self._say(f"set aside and done again: {path} ({problem})")

    def taken_over(self, config: RunConfig) -> None:
        self._say(f"{self._conditions[config.identity]}: another runner took it over, since this one was silent")

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        stack = self._stack_of(config.identity)
        if stack.is_under_way:  # so this is the first cell of the runner's next one
            stack.epochs, stack.is_under_way = {}, False
        stack.steps_per_epoch = steps_per_epoch
        stack.epochs[config.identity] = epochs_done

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        stack = self._stack_of(config.identity)
        stack.is_under_way = True
        stack.epochs[config.identity] = row.epoch
        self._epochs_done_here += 1
        stack.rate = len(stack.epochs) * stack.steps_per_epoch * config.protocol.batch_size / row.seconds
        self._move_bar()
        if self._bar is None and time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._say(f"{self._status()}, {self._time_left()}")

    def split(self, sizes: Sequence[int]) -> None:
        parts = " and ".join(map(str, sizes))
        self._say(f"{sum(sizes)} cells do not fit into memory at once; they continue as {parts}")
        for stack in self._stacks:
            stack.is_under_way |= len(stack.epochs) == sum(sizes)

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        run = config.identity
        self._stack_of(run).epochs.pop(run, None)
        self._num_done += 1
        self._max_epochs[run] = 0
        self._move_bar()
        result = folder.read_result()
        self._say(
            f"{self._conditions[run]}: {result['epochs']} epochs, test accuracy {result['test_acc']:.1%}, "
            f"{most_local_head(result)}; {self._cells()}"
        )

    def _stack_of(self, run: str) -> "_Stack":
        """The one of the runner that took this run last."""
        for stack in reversed(self._stacks):
            if run in stack.runs:
                return stack
        self._stacks.append(_Stack({run}))
        return self._stacks[-1]

    @property
    def _epochs(self) -> dict[str, int]:
        """Whole epochs of the cells that train now."""
        return {run: epochs for stack in self._stacks for run, epochs in stack.epochs.items()}

    def _cells(self) -> str:
        return f"{self._num_done} of {self._num_cells} cells done"

    def _move_bar(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._total - self._epochs_left(), status=self._status())

    def _status(self) -> str:
        epochs = self._epochs
        if not epochs:
            return self._cells()
        least, most = min(epochs.values()), max(epochs.values())
        reached = f"epoch {most}" if least == most else f"epochs {least} to {most}"
        rate = sum(stack.rate for stack in self._stacks if stack.epochs)
        return f"{self._cells()}, {len(epochs)} at {reached}, {rate:,.0f} images/s"

    def _epochs_left(self) -> int:
        epochs = self._epochs
        return sum(most - epochs.get(run, 0) for run, most in self._max_epochs.items())

    def _time_left(self) -> str:
        rate = self._epochs_done_here / (time.perf_counter() - self._began)
        return f"at most {self._epochs_left() / rate / 60:.0f} min left"


def _counted(cells: Sequence[Cell]) -> str:
    return "1 cell" if len(cells) == 1 else f"{len(cells)} cells"


class SimulationProgress(StudyBar, SimulationListener):
    """Shows how many conditions are done; use it as a context manager."""

    def __init__(self, label: str, responses: Mapping[str, str]) -> None:
        super().__init__(label)
        self._responses = responses
        self._num_conditions = self._num_done = 0

    def planned(self, cells: Sequence[SimulationCell], missing: Sequence[SimulationCell]) -> None:
        self._num_conditions = len({cell.condition for cell in missing})
        self._say(f"{len(cells) - len(missing)} of {len(cells)} cells done")
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=max(1, self._num_conditions), status="")

    def started(self, condition: str, cells: Sequence[SimulationCell]) -> None:
        self._began = self._said = time.perf_counter()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, status=f"{condition}, {len(cells)} seeds")

    def heard(self, condition: str, share: float) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._num_done + share)
        elif time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._say(f"{condition}: {share:.0%}")

    def finished(self, condition: str, runs: pd.DataFrame) -> None:
        self._num_done += 1
        means = ", ".join(f"{title} {runs[name].mean():.3f}" for name, title in self._responses.items())
        seconds = time.perf_counter() - self._began
        self._say(f"{condition}: {counted_seeds(len(runs))} in {seconds:.0f} s: {means}")
