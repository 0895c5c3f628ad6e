"""Jobs that depend on nothing but themselves, given to whoever does them; one that is lost on the way is done again."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Protocol, TypeVar

from nearsight.train import TrainingError

Job = TypeVar("Job", bound=Hashable)
MOST_LOSSES = 3
"""Processes that may be lost at one job before it is given up."""


class LostJobError(TrainingError):
    """A job has cost too many processes."""


class Pool(Protocol[Job]):
    """Those who do jobs."""

    @property
    def num_busy(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def give(self, job: Job) -> None: ...

    def ended(self) -> Iterator[tuple[Job, str | None]]:
        """Jobs that are done, or were lost and how; waits for the first. An `InputError` there is one here."""
        ...


def work_off(
    pool: Pool[Job], jobs: Iterable[Job], *, lost: Callable[[Job, str], None], most_losses: int = MOST_LOSSES
) -> Iterator[Job]:
    """Yield each job once it is done.

    `lost` is told when a job was lost, and how, before it is given out again; after `most_losses`, it is a
    `LostJobError`.
    """
    waiting, losses = deque(jobs), Counter[Job]()
    while waiting or pool.num_busy:
        while waiting and pool.num_free:
            pool.give(waiting.popleft())
        for job, problem in pool.ended():
            if problem is None:
                yield job
                continue
            losses[job] += 1
            if losses[job] >= most_losses:
                raise LostJobError(
                    f"{job} was given up after it had lost {most_losses} processes, the last because {problem}; "
                    "what is done is kept, and the same command tries the rest again"
                )
            lost(job, problem)
            waiting.appendleft(job)
