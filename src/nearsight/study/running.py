"""A study from start to finish: what is missing is done, alone or beside other runners on the same folder."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from nearsight.data import data_folder
from nearsight.data.loading import dataset_spec, find_source
from nearsight.errors import InputError, check_at_least
from nearsight.study.design import Cell, Study
from nearsight.study.folder import StudyFolder
from nearsight.study.lock import Locks
from nearsight.study.repair import make_ready, result_problem
from nearsight.train import HistoryRow, Listener, RunConfig, RunFolder, Stop, TrainingError, train_runs

StackBy = Literal["seed", "all"]


class StudyListener(Listener):
    """Told what happens while a study runs; the default listens to nothing."""

    def planned(self, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        """These are the study's cells, and those of them that are not done yet."""

    def taken(self, cells: Sequence[Cell]) -> None:
        """This runner does these next, together as far as memory allows."""

    def set_aside(self, path: Path, problem: str) -> None:
        """Something in a run folder is damaged; it is kept beside, and done again."""

    def taken_over(self, config: RunConfig) -> None:
        """Another runner thought that this one had ended, and does this run now."""


class _TakenOverError(Exception):
    """The cells that train are no longer all this runner's."""


def run_study(
    study: Study,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    listener: StudyListener | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
    cells_per_stack: int | None = None,
    stack_by: StackBy = "seed",
) -> StudyFolder:
    """Run what is missing of a study in the folder `path`, except for what other runners are at.

    A cell that cannot go on does not keep the others from their end; what was wrong with it is raised then.

    Args:
        cells_per_stack: the most cells to take at a time; by default all that `stack_by` says.
        stack_by: seed: one seed after the other, so that whole seeds are finished first and runners share them out;
            all: whatever is missing. Either way, as many train at once as memory takes.
    """
    check_at_least("checkpoint_every", checkpoint_every, 1)
    if cells_per_stack is not None:
        check_at_least("cells_per_stack", cells_per_stack, 1)
    folder, listener = StudyFolder(path), listener or StudyListener()
    folder.check(study)
    missing = [cell for cell in study.cells if not folder.is_done(cell.run)]
    _check_data([cell.config for cell in missing], data_dir)
    folder.claim(study)
    listener.planned(study.cells, missing)
    train = partial(train_runs, device=device, data_dir=data_dir, stop=stop, checkpoint_every=checkpoint_every)
    with folder.locks().kept_alive() as locks:
        runner = _Runner(folder, locks, listener, train)
        runner.run(_groups(missing, stack_by), cells_per_stack or len(study.cells))
    folder.write_runs()
    runner.raise_failures()
    return folder


class _Train(Protocol):
    def __call__(self, configs: Sequence[RunConfig], folders: Sequence[RunFolder], *, listener: Listener) -> None: ...


class _Runner(Listener):
    """One of perhaps several processes at a study: takes cells, hears how they go, gives them back."""

    def __init__(self, folder: StudyFolder, locks: Locks, listener: StudyListener, train: _Train) -> None:
        self._folder, self._locks, self._listener, self._train = folder, locks, listener, train
        self._failed: dict[str, Exception] = {}
        """Run → what was wrong with it."""

    def run(self, groups: Sequence[Sequence[Cell]], most: int) -> None:
        """Go round the groups until nothing can be taken any more: another runner may leave cells behind."""
        found = True
        while found:
            found = False
            for group in groups:
                found |= self._run_group(group, most)

    def raise_failures(self) -> None:
        errors = list({str(error): error for error in self._failed.values()}.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            kind = InputError if all(isinstance(error, InputError) for error in errors) else TrainingError
            raise kind(f"{len(self._failed)} cells could not be done: " + "; ".join(map(str, errors)))

    def _run_group(self, cells: Sequence[Cell], most: int) -> bool:
        """Whether any of these cells was there to be taken."""
        found = False
        while taken := self._take(cells, most):
            found = True
            self._listener.taken(taken)
            folders = [self._folder.run_folder(cell.run) for cell in taken]
            try:
                self._train([cell.config for cell in taken], folders, listener=self)
                for folder in folders:  # else they would be done again and again
                    if problem := result_problem(folder):
                        self._failed[folder.path.name] = InputError(problem)
            except _TakenOverError:
                pass  # what is left to this runner is taken again
            except (TrainingError, InputError) as error:
                unfinished = (cell for cell in taken if not self._folder.run_folder(cell.run).is_complete)
                self._failed |= {cell.run: error for cell in unfinished}
            finally:
                for cell in taken:
                    self._locks.release(cell.run)
        return found

    def _take(self, cells: Iterable[Cell], most: int) -> list[Cell]:
        taken: list[Cell] = []
        for cell in cells:
            run = cell.run
            if len(taken) == most:
                break
            if run in self._failed or self._folder.is_done(run) or not self._locks.take(run):
                continue
            if self._folder.is_done(run):  # since the last look
                self._locks.clear(run)
                continue
            try:
                make_ready(self._folder.run_folder(run), cell.config, self._listener.set_aside)
            except InputError as error:
                self._failed[run] = error
                self._locks.release(run)
                continue
            taken.append(cell)
        return taken

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._listener.started(config, epochs_done, steps_per_epoch)

    def step(self, step: int) -> None:
        self._listener.step(step)

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self._listener.epoch(config, row)
        if config.identity in self._locks.lost:
            self._listener.taken_over(config)
            raise _TakenOverError

    def split(self, sizes: Sequence[int]) -> None:
        self._listener.split(sizes)

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        self._folder.write_runs()
        self._locks.clear(config.identity)
        self._listener.finished(config, folder)


def _groups(cells: Iterable[Cell], stack_by: StackBy) -> list[list[Cell]]:
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.seed if stack_by == "seed" else None, []).append(cell)
    return list(groups.values())


def _check_data(configs: Iterable[RunConfig], data_dir: Path | None) -> None:
    """Say that a data set is not there before anything is written."""
    for config in dict.fromkeys(config.data for config in configs):
        spec = dataset_spec(config.name)
        if spec.find is not None:
            find_source(config.name, spec, data_folder(data_dir), config.image_size or spec.image_size)
