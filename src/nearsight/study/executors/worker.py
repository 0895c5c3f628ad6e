"""What a worker does, wherever it is: some cells of a study, telling how that goes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nearsight.errors import InputError
from nearsight.study.design import Cell
from nearsight.study.executors.preparing import prepare_data
from nearsight.study.folder import StudyFolder
from nearsight.study.listening import StudyListener
from nearsight.study.location import StudyPublisher
from nearsight.study.lock import Locks
from nearsight.study.runner import Runner
from nearsight.train import HistoryRow, RunConfig, RunFolder, RunName, Stop, StoppedError, TrainingError, train_runs

Message = tuple[str, tuple[Any, ...]]
"""What a `StudyListener` is to be told: the method, and its arguments."""
Tell = Callable[[Message], None]

_SECONDS_TO_END = 30.0
"""A lost worker may need a moment to end where its machine lives on."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Some cells for a worker to do."""

    token: str
    """Names the assignment, and owns the locks that are taken for it."""
    gone: tuple[str, ...]
    """Tokens of earlier assignments of these cells whose workers were lost."""
    folder: Path
    cells: tuple[Cell, ...]
    cells_per_stack: int
    data_dir: Path | None
    checkpoint_every: int
    location: StudyPublisher | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an assignment ended."""

    failed: dict[RunName, Exception]
    """Run → what was wrong with it; an `InputError` or a `TrainingError`."""
    num_taken: int
    """Cells that nobody else was at."""
    stopped_by: str | None
    """Who wished for a stop, if there is something left because of that."""


class Forwarding(StudyListener):
    """Sends on what it is told."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def taken(self, cells: Sequence[Cell]) -> None:
        self._tell(("taken", (tuple(cells),)))

    def given_back(self, cells: Sequence[Cell]) -> None:
        self._tell(("given_back", (tuple(cells),)))

    def set_aside(self, path: Path, problem: str) -> None:
        self._tell(("set_aside", (path, problem)))

    def taken_over(self, config: RunConfig) -> None:
        self._tell(("taken_over", (config,)))

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._tell(("started", (config, epochs_done, steps_per_epoch)))

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self._tell(("epoch", (config, row)))

    def split(self, sizes: Sequence[int]) -> None:
        self._tell(("split", (tuple(sizes),)))

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        self._tell(("finished", (config, folder)))


def do(assignment: Assignment, device: torch.device | str, tell: Tell, stop: Stop) -> Outcome:
    """Do the cells of an assignment that nobody else is at."""
    folder = StudyFolder(assignment.folder)
    train = partial(
        train_runs,
        device=device,
        data_dir=assignment.data_dir,
        stop=stop,
        checkpoint_every=assignment.checkpoint_every,
    )
    stopped_by = None
    with folder.locks(token=assignment.token, gone=assignment.gone).kept_alive() as locks:
        # The table of all runs is for the one who hears of all of them.
        completed = assignment.location.publish if assignment.location is not None else lambda _: None
        runner = Runner(folder, locks, Forwarding(tell), train, completed)
        try:
            prepare_data([cell.config.data for cell in assignment.cells], assignment.data_dir, stop)
            _let_the_lost_end(locks, assignment.cells)
            runner.run([assignment.cells], assignment.cells_per_stack)
        except StoppedError as stopped:
            stopped_by = stopped.by
        except InputError as error:  # of the data
            runner.failed |= {cell.run: error for cell in assignment.cells}
    failed = {run: _plain(error) for run, error in runner.failed.items()}
    return Outcome(failed=failed, num_taken=runner.num_taken, stopped_by=stopped_by)


def _let_the_lost_end(locks: Locks, cells: Sequence[Cell]) -> None:
    """Wait for lost workers whose processes can be seen to be there still; two at a cell would do it twice."""
    deadline = time.monotonic() + _SECONDS_TO_END
    for cell in cells:
        while (
            (holder := locks.holder(cell.run)) is not None
            and locks.is_known_gone(holder)
            and holder.owner is not None
            and holder.owner.is_here
            and not holder.owner.is_gone()
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)


def _plain(error: Exception) -> Exception:
    """What it says, without what it holds: this is to be sent."""
    return InputError(str(error)) if isinstance(error, InputError) else TrainingError(str(error))
