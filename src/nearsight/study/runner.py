"""A runner takes cells of studies through their locks, trains them, and releases them.

Cells wait in one queue. A runner holds the locks of those that train, and takes the next one when a slot is free, so
others at the same folders share the queue. Cells of several studies wait in one queue too; a run that more than one of
them has is trained once, and put into the folders of the others.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nearsight.errors import InputError
from nearsight.files import LostError
from nearsight.study.design import Cell
from nearsight.study.folder import StudyFolder
from nearsight.study.lock import Locks
from nearsight.study.reusing import WholeRun, put_run
from nearsight.study.run_tables import make_ready, result_problem
from nearsight.train import HistoryRow, Listener, Run, RunConfig, RunFolder, RunName, RunQueue, TrainingError


class StudyListener(Listener):
    """Its methods are called while a study runs; by default they do nothing.

    If workers do the study, they are called in the process that started the workers, except for steps: these are too
    many to send.
    """

    def planned(self, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        """These are the study's cells, and those of them that are not done yet."""

    def taken(self, cells: Sequence[Cell]) -> None:
        """A runner trains these next, beside what it trains already."""

    def released(self, cells: Sequence[Cell]) -> None:
        """The runner released these: they are done, cannot be done, or wait for another runner."""

    def set_aside(self, path: Path, problem: str) -> None:
        """Something in a run folder is damaged; it is kept beside, and done again."""

    def taken_over(self, config: RunConfig) -> None:
        """Another runner thought that this one had ended, and does this run now."""

    def worker_lost(self, cells: Sequence[Cell], problem: str, seconds: float | None) -> None:
        """The worker of these cells was lost. They are tried again after so many seconds; None: not again."""


class Train(Protocol):
    """`nearsight.train.train_queue` with all arguments set but what to train and how much of it at a time."""

    def __call__(self, queue: RunQueue, *, listener: Listener, most: int) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """A study's folder as a runner uses it."""

    folder: StudyFolder
    locks: Locks
    listener: StudyListener
    completed: Callable[[RunFolder], None]
    """Called with the folder of each run that is done, while its lock is still held. If it raises an `InputError`, that
    is noted, and the others go on."""


@dataclass(frozen=True, eq=False)
class Task:
    """A run, and every study in which it is a cell."""

    wanted: tuple[tuple[Place, Cell], ...]

    @property
    def run(self) -> RunName:
        return self.wanted[0][1].run

    @property
    def config(self) -> RunConfig:
        return self.wanted[0][1].config

    def folder(self, place: Place) -> RunFolder:
        return place.folder.run_folder(self.run)


class Runner(Listener):
    """Takes cells through their locks, trains them, and releases them. It is the queue that training takes from."""

    def __init__(self, train: Train) -> None:
        self._train = train
        self._waiting: dict[object, list[Task]] = {}
        """What is to be done, by what trains together."""
        self._held: dict[RunName, tuple[Task, Place, contextlib.ExitStack]] = {}
        """What trains, in the folder of which study, and what guards its folders."""
        self.failed: dict[RunName, Exception] = {}
        """Run → its error."""
        self.num_taken = 0
        self._done: set[RunName] = set()

    def run(self, tasks: Iterable[Task], most: int) -> None:
        """Train these in their order, so many at a time, until none can be taken any more: another runner may leave
        cells behind."""
        for task in tasks:
            self._waiting.setdefault(task.config.stack_key, []).append(task)
        taken_before = -1
        while taken_before < self.num_taken:
            taken_before = self.num_taken
            try:
                self._train(self, listener=self, most=most)
            except LostError:  # what is left to this runner is taken again
                for task, place, _ in self._held.values():
                    if any(task.run in each.locks.lost for each, _ in task.wanted):
                        place.listener.taken_over(task.config)
            except (TrainingError, InputError) as error:
                if not self._held:
                    raise
                unfinished = (run for run, (task, place, _) in self._held.items() if not task.folder(place).is_complete)
                self.failed |= dict.fromkeys(unfinished, error)
            finally:
                self._release(list(self._held))

    def kinds(self) -> list[object]:
        return list(self._waiting)

    def waiting(self, kind: object) -> list[RunConfig]:
        return [task.config for task in self._waiting[kind]]

    def take(self, kind: object, most: int) -> list[Run]:
        """Those that are free, in their order. What is done is looked for no more; what others hold may be left."""
        waiting, left, taken = self._waiting[kind], list[Task](), list[Task]()
        for number, task in enumerate(waiting):
            if len(taken) == most:
                left += waiting[number:]
                break
            if task.run in self.failed or self._is_done(task):
                continue
            (taken if self._take(task) else left).append(task)
        self._waiting[kind] = [task for task in left if task.run not in self.failed]
        for place in dict.fromkeys(self._held[task.run][1] for task in taken):
            place.listener.taken([_cell(task, place) for task in taken if self._held[task.run][1] is place])
        self.num_taken += len(taken)
        return [(task.config, task.folder(self._held[task.run][1])) for task in taken]

    def give_up(self, run: Run, error: Exception) -> None:
        name = run[0].identity
        self.failed[name] = error
        self._release([name])

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._listener_of(config).started(config, epochs_done, steps_per_epoch)

    def step(self, step: int) -> None:
        self._any_listener().step(step)

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self._listener_of(config).epoch(config, row)

    def split(self, sizes: Sequence[int]) -> None:
        self._any_listener().split(sizes)

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        run = config.identity
        task, place, _ = self._held[run]
        if problem := result_problem(folder):  # otherwise it would be done again and again
            self.failed[run] = InputError(problem)
        else:
            self._complete(task, place)
            for other, _ in task.wanted:
                if other is not place:
                    self._share(task, folder, other, self._put)
            self._done.add(run)
        self._release([run])

    def _put(self, task: Task, source: RunFolder, place: Place) -> None:
        """Into a folder that this runner holds."""
        with contextlib.suppress(LostError):  # another runner does it there
            WholeRun(source).put(task.folder(place))

    def _share(
        self, task: Task, source: RunFolder, place: Place, put: Callable[[Task, RunFolder, Place], None]
    ) -> None:
        """Give a study the run that another one has."""
        try:
            put(task, source, place)
        except InputError as error:
            self.failed[task.run] = error
        else:
            if place.folder.is_done(task.run):
                self._complete(task, place)

    def _complete(self, task: Task, place: Place) -> None:
        """A run of this runner's is in a study's folder."""
        try:
            place.completed(task.folder(place))
        except InputError as error:
            self.failed[task.run] = error
        place.locks.clear(task.run)
        place.listener.finished(task.config, task.folder(place))

    def _is_done(self, task: Task) -> bool:
        """Whether there is nothing left to do; what one study has is put into the others."""
        done = [place for place, _ in task.wanted if place.folder.is_done(task.run)]
        if not done or len(done) == len(task.wanted):
            return bool(done)
        for place, _ in task.wanted:
            if place not in done:
                self._share(task, task.folder(done[0]), place, _put_if_free)
        return all(place.folder.is_done(task.run) for place, _ in task.wanted)

    def _take(self, task: Task) -> bool:
        """Whether the run is this runner's now, in all its studies; it is released again if it cannot be trained."""
        run, locked = task.run, list[Place]()
        for place, _ in task.wanted:
            if not place.locks.take(run):
                break
            locked.append(place)
        complete = len(locked) == len(task.wanted)
        if not complete or any(place.folder.is_done(run) for place in locked):  # since the last look
            for place in locked:
                place.locks.release(run)
                if place.folder.is_done(run):
                    place.locks.clear(run)
            return False
        begun = [place for place in locked if task.folder(place).checkpoint.exists()]
        place = (begun or locked)[0]
        guards = contextlib.ExitStack()
        for each in locked:
            guards.enter_context(each.locks.guarding({run: task.folder(each).path}))
        self._held[run] = task, place, guards
        try:
            make_ready(task.folder(place), task.config, place.listener.set_aside)
        except InputError as error:
            self.failed[run] = error
            self._release([run], said=False)
            return False
        return True

    def _release(self, runs: Sequence[RunName], *, said: bool = True) -> None:
        """Let others take what is not done; it waits here again, unless it failed."""
        released: dict[Place, list[Cell]] = {}
        for run in runs:
            task, place, guards = self._held.pop(run)
            guards.close()
            for each, _ in task.wanted:
                each.locks.release(run)
            if run not in self.failed and run not in self._done:
                self._waiting[task.config.stack_key].append(task)
            released.setdefault(place, []).append(_cell(task, place))
        for place, cells in released.items() if said else ():
            place.listener.released(cells)

    def _listener_of(self, config: RunConfig) -> StudyListener:
        return self._held[config.identity][1].listener

    def _any_listener(self) -> StudyListener:
        return next((place.listener for _, place, _ in self._held.values()), StudyListener())


def _put_if_free(task: Task, source: RunFolder, place: Place) -> None:
    put_run(task.run, place.folder, place.locks, WholeRun(source).put)


def _cell(task: Task, place: Place) -> Cell:
    return next(cell for each, cell in task.wanted if each is place)
