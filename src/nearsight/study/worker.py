"""What a worker of a pool does with cells of a study, wherever it is."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nearsight.data.loading import dataset_spec
from nearsight.data.locations import user_cache_folder
from nearsight.errors import InputError
from nearsight.files import canonical_hash
from nearsight.study.design import Cell
from nearsight.study.folder import StudyFolder
from nearsight.study.location import StudyPublisher
from nearsight.study.lock import Locks
from nearsight.study.runner import Place, Runner, StudyListener, Task
from nearsight.train import (
    DataConfig,
    RunName,
    Stop,
    StoppedError,
    TrainingError,
    load_data,
    train_queue,
)
from nearsight.work import Attempt, Outcome, Tell

_SECONDS_TO_END = 30.0
"""A lost worker may need a moment to end if its machine still runs."""
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is missing of a study whose folder is claimed, and how it is to be done."""

    folder: Path
    cells: tuple[Cell, ...]
    """In the order in which they are to be begun."""
    cells_per_stack: int
    """The most cells to train at a time."""
    data_dir: Path | None
    checkpoint_every: int
    location: StudyPublisher | None = None
    """Where finished runs are published, if elsewhere than in the folder."""
    ranks: Mapping[RunName, float] = field(default_factory=dict)
    """By what the cells are in that order, the smallest first; so those of several studies can be put into one."""


def training(work: Work, device: torch.device | str, stop: Stop) -> Callable[..., None]:
    """A `Train` that still takes what else `train_queue` does."""
    return partial(
        train_queue, device=device, data_dir=work.data_dir, stop=stop, checkpoint_every=work.checkpoint_every
    )


@dataclass(frozen=True, kw_only=True)
class CellsDone:
    """What came of the cells of an attempt."""

    failed: dict[RunName, Exception]
    """Run → its error, an `InputError` or a `TrainingError`."""
    num_taken: int
    """Cells that no other runner had."""


class StudyWorker:
    """For a pool of workers: does the cells of an attempt that no other runner has."""

    def __init__(self, work: Work) -> None:
        self._work = replace(work, cells=(), ranks={})  # which are given part by part

    def __call__(self, device: str) -> Callable[[Attempt[Cell], Tell, Stop], Outcome[CellsDone]]:
        return partial(self._do, device)

    def _do(self, device: str, attempt: Attempt[Cell], tell: Tell, stop: Stop) -> Outcome[CellsDone]:
        work, cells, stopped_by = self._work, attempt.items, None
        folder = StudyFolder(work.folder)
        with folder.locks(token=attempt.token, lost_tokens=attempt.lost_tokens).kept_alive() as locks:
            # The table of all runs is written by the driver, which hears of all of them.
            completed = work.location.publish if work.location is not None else lambda _: None
            place = Place(folder=folder, locks=locks, listener=_forwarding(tell), completed=completed)
            runner = Runner(training(work, device, stop))
            try:
                prepare_data([cell.config.data for cell in cells], work.data_dir, stop)
                _wait_for_lost_workers(locks, cells)
                runner.run([Task(((place, cell),)) for cell in cells], work.cells_per_stack)
            except StoppedError as stopped:
                stopped_by = stopped.by
            except InputError as error:  # of the data
                runner.failed |= {cell.run: error for cell in cells}
        failed = {run: _plain(error) for run, error in runner.failed.items()}
        return Outcome(result=CellsDone(failed=failed, num_taken=runner.num_taken), stopped_by=stopped_by)


def _forwarding(tell: Tell) -> StudyListener:
    """Sends each call on: the name of the `StudyListener` method and its arguments; but no steps."""
    listener = StudyListener()
    for name in ("taken", "released", "set_aside", "taken_over", "started", "epoch", "split", "finished"):
        setattr(listener, name, partial(_forward, tell, name))
    return listener


def _forward(tell: Tell, name: str, *arguments: Any) -> None:
    tell((name, arguments), at_once=name in ("taken", "finished"))


def prepare_data(configs: Iterable[DataConfig], data_dir: Path | None, stop: Stop) -> None:
    """Make sure that each data set is in this machine's image cache; of several workers that need it at once, the
    first decodes, and the others wait."""
    for config in dict.fromkeys(configs):
        if dataset_spec(config.name).find is None:  # embedded: made, not read
            continue
        name = canonical_hash([config.name, config.image_size, str(data_dir)])
        with Locks(user_cache_folder() / "decoded" / "locks").kept_alive() as locks:
            while not locks.take(name):
                if stop.by is not None:
                    raise StoppedError(stop.by, [0])
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            load_data(config, data_dir)
            locks.clear(name)


def _wait_for_lost_workers(locks: Locks, cells: Sequence[Cell]) -> None:
    """Wait for lost workers whose processes still run here: two at one cell would do it twice."""
    deadline = time.monotonic() + _SECONDS_TO_END
    for cell in cells:
        while (
            (holder := locks.holder(cell.run)) is not None
            and locks.is_known_lost(holder)
            and holder.owner is not None
            and holder.owner.is_here
            and not holder.owner.is_gone()
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)


def _plain(error: Exception) -> Exception:
    """The same error with its message alone, so that it can be sent."""
    return InputError(str(error)) if isinstance(error, InputError) else TrainingError(str(error))
