"""One of perhaps several processes at a study: takes cells, trains them, gives them back."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from nearsight.errors import InputError
from nearsight.files import LostError
from nearsight.study.design import Cell
from nearsight.study.folder import StudyFolder
from nearsight.study.listening import StudyListener
from nearsight.study.lock import Locks
from nearsight.study.repair import make_ready, result_problem
from nearsight.train import HistoryRow, Listener, RunConfig, RunFolder, RunName, TrainingError


class Train(Protocol):
    """`nearsight.train.train_runs`, with all settled but what to train and where."""

    def __call__(self, configs: Sequence[RunConfig], folders: Sequence[RunFolder], *, listener: Listener) -> None: ...


class Runner(Listener):
    """Takes cells through their locks, hears how they go, gives them back."""

    def __init__(
        self,
        folder: StudyFolder,
        locks: Locks,
        listener: StudyListener,
        train: Train,
        completed: Callable[[RunFolder], None],
    ) -> None:
        """`completed` is called with the folder of each run that is done, while its lock is still held. What it finds
        wrong with the run (an `InputError`) is noted, and the others go on."""
        self._folder, self._locks, self._listener, self._train = folder, locks, listener, train
        self._completed = completed
        self.failed: dict[RunName, Exception] = {}
        """Run → what was wrong with it."""
        self.num_taken = 0

    def run(self, groups: Sequence[Sequence[Cell]], most: int) -> None:
        """Go round the groups until nothing can be taken any more: another runner may leave cells behind."""
        found = True
        while found:
            found = False
            for group in groups:
                found |= self._run_group(group, most)

    def _run_group(self, cells: Sequence[Cell], most: int) -> bool:
        """Whether any of these cells was there to be taken."""
        found = False
        while taken := self._take(cells, most):
            found = True
            self.num_taken += len(taken)
            self._listener.taken(taken)
            folders = {cell.run: self._folder.run_folder(cell.run) for cell in taken}
            try:
                with self._locks.guarding({run: folder.path for run, folder in folders.items()}):
                    self._train([cell.config for cell in taken], list(folders.values()), listener=self)
                for run, folder in folders.items():  # else they would be done again and again
                    if problem := result_problem(folder):
                        self.failed[run] = InputError(problem)
            except LostError:  # what is left to this runner is taken again
                for cell in taken:
                    if cell.run in self._locks.lost:
                        self._listener.taken_over(cell.config)
            except (TrainingError, InputError) as error:
                unfinished = (cell for cell in taken if not self._folder.run_folder(cell.run).is_complete)
                self.failed |= {cell.run: error for cell in unfinished}
            finally:
                for cell in taken:
                    self._locks.release(cell.run)
                self._listener.given_back(taken)
        return found

    def _take(self, cells: Iterable[Cell], most: int) -> list[Cell]:
        taken: list[Cell] = []
        for cell in cells:
            run = cell.run
            if len(taken) == most:
                break
            if run in self.failed or self._folder.is_done(run) or not self._locks.take(run):
                continue
            if self._folder.is_done(run):  # since the last look
                self._locks.clear(run)
                continue
            try:
                make_ready(self._folder.run_folder(run), cell.config, self._listener.set_aside)
            except InputError as error:
                self.failed[run] = error
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
            raise LostError(f"run {config.identity} was taken over by another runner")

    def split(self, sizes: Sequence[int]) -> None:
        self._listener.split(sizes)

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        try:
            self._completed(folder)
        except InputError as error:
            self.failed[config.identity] = error
        self._locks.clear(config.identity)
        self._listener.finished(config, folder)
