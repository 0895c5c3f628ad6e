"""Attempts that workers make, the events they report, and how work is retried whose worker was lost.

A pool (`nearsight.work.processes`, `nearsight.work.ray_cluster`) runs attempts somewhere and reports events. A
`Driver` gives parts of some work to a pool. The rules are the same for all work: an attempt whose worker was lost waits
before it is retried, each time twice as long; after two losses without progress it is split into halves; after the
fifth it is given up, and the rest goes on.
"""

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from nearsight.errors import check_at_least
from nearsight.train import Stop

Item = TypeVar("Item")
Result = TypeVar("Result")

_SECONDS_BETWEEN_LOOKS = 0.25


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often, and after how long, work is retried whose worker was lost."""

    most: int = 4
    """Losses in a row, without progress between them, after which it is given up."""
    first_wait: float = 1.0
    """Seconds before the first new try; twice as long before each further one."""
    longest_wait: float = 60.0

    def __post_init__(self) -> None:
        check_at_least("most", self.most, 0)
        check_at_least("first_wait", self.first_wait, 0)
        check_at_least("longest_wait", self.longest_wait, self.first_wait)

    def wait(self, losses: int) -> float:
        return min(self.first_wait * 2.0 ** (losses - 1), self.longest_wait)


@dataclass(frozen=True, kw_only=True)
class Attempt(Generic[Item]):
    """What one worker is to do."""

    items: tuple[Item, ...]
    losses: int = 0
    """Workers that were lost at these items since there was progress."""
    lost_tokens: tuple[str, ...] = ()
    """The tokens of all attempts at them whose workers were lost: their locks are void."""
    not_before: float = 0.0
    """On the clock of `time.monotonic`."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identifies this attempt, and owns the locks that are taken for it."""


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[Result]):
    """How an attempt ended whose worker was not lost."""

    result: Result | None = None
    """None also where a stop was requested before it began."""
    stopped_by: str | None = None
    """Who requested a stop, if something is left because of that."""


class Tell(Protocol):
    """Sends a message from a worker to its driver."""

    def __call__(self, message: Any, *, at_once: bool = False) -> None:
        """`at_once`: it must not be lost with the worker."""


Do = Callable[[Attempt[Item], Tell, Stop], Outcome[Result]]
"""What a worker does with one attempt after the other. An error that it raises ends the worker, which is then lost:
whatever state it is in, as after an error of CUDA, the next one starts without it."""
Make = Callable[[str], Do[Item, Result]]
"""Called once in each worker, with its device. It is sent there, so it must be something that can be pickled."""


@dataclass(frozen=True)
class Heard:
    """A worker says something."""

    token: str
    message: Any


@dataclass(frozen=True)
class Ended(Generic[Result]):
    """A worker has finished its attempt."""

    token: str
    outcome: Outcome[Result]


@dataclass(frozen=True)
class Lost:
    """A worker ended without being asked to."""

    token: str
    problem: str


Event = Heard | Ended[Result] | Lost


class Pool(Protocol[Item, Result]):
    """Workers, here or elsewhere."""

    @property
    def num_wanted(self) -> int:
        """How many attempts it takes to keep all of them busy."""
        ...

    @property
    def num_free(self) -> int:
        """How many more can be given now."""
        ...

    def give(self, attempt: Attempt[Item]) -> None: ...

    def listen(self, seconds: float) -> Sequence[Event[Result]]:
        """The events so far, in order; if there are none, those of the next so many seconds."""
        ...

    def stop(self, by: str) -> None:
        """Ask all workers to end. Every attempt still gets an `Ended` or a `Lost`."""
        ...


class Backlog(Generic[Item]):
    """What is still to be given to workers."""

    def __init__(self, parts: Iterable[Sequence[Item]], retries: Retries) -> None:
        self._retries = retries
        self._waiting = [Attempt(items=tuple(part)) for part in parts if part]

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, now: float) -> Attempt[Item] | None:
        """The first that may be tried now."""
        for position, attempt in enumerate(self._waiting):
            if attempt.not_before <= now:
                return self._waiting.pop(position)
        return None

    def lost(self, attempt: Attempt[Item], left: Sequence[Item], *, progressed: bool, now: float) -> float | None:
        """Put back what is left of an attempt whose worker was lost; how long it waits, or None: it is given up.

        What was lost twice without progress goes on as two halves: it may be that memory was missing, or that one item
        is to blame.
        """
        losses = 1 if progressed else attempt.losses + 1
        if losses > self._retries.most:
            return None
        seconds = self._retries.wait(losses)
        middle = len(left) if losses < 2 else math.ceil(len(left) / 2)
        lost_tokens = (*attempt.lost_tokens, attempt.token)
        self._waiting += [
            Attempt(items=tuple(part), losses=losses, lost_tokens=lost_tokens, not_before=now + seconds)
            for part in (left[:middle], left[middle:])
            if part
        ]
        return seconds


class Driver(ABC, Generic[Item, Result]):
    """Gives work to a pool. Subclasses decide what the work is and how its events are handled."""

    def __init__(self, pool: Pool[Item, Result], retries: Retries, stop: Stop) -> None:
        self._pool, self._retries, self._stop = pool, retries, stop

    @abstractmethod
    def ended(self, attempt: Attempt[Item], outcome: Outcome[Result]) -> None:
        """An attempt ended; with something left only if a stop was requested here."""

    @abstractmethod
    def lost(self, attempt: Attempt[Item], left: Sequence[Item], problem: str, seconds: float | None) -> None:
        """The worker at these items was lost. They are tried again after so many seconds; None: not again."""

    def left(self, attempt: Attempt[Item]) -> Sequence[Item]:
        """What is still to be done of an attempt whose worker was lost."""
        return attempt.items

    def heard(self, attempt: Attempt[Item], message: Any) -> bool:
        """Handle a worker's message; returns whether it is progress, after which losses count from 0 again."""
        raise NotImplementedError

    def looked(self) -> None:
        """All events so far were handled."""

    def drive(self, parts: Iterable[Sequence[Item]]) -> int:
        """Have all parts done; how many were not begun, because a stop was requested."""
        backlog, running = Backlog(parts, self._retries), dict[str, Attempt[Item]]()
        progressed: set[str] = set()
        asked = False
        while running or (len(backlog) and not asked):
            if self._stop.by is not None and not asked:
                self._pool.stop(self._stop.by)
                asked = True
            while not asked and self._pool.num_free > 0 and (new := backlog.take(time.monotonic())):
                running[new.token] = new
                self._pool.give(new)
            for event in self._pool.listen(_SECONDS_BETWEEN_LOOKS):
                attempt = running.get(event.token)
                if attempt is None:  # a late message of an attempt that was given up
                    continue
                if isinstance(event, Heard):
                    if self.heard(attempt, event.message):
                        progressed.add(attempt.token)
                    continue
                del running[attempt.token]
                if isinstance(event, Lost):
                    problem = event.problem
                elif event.outcome.stopped_by is not None and self._stop.by is None:
                    problem = f"the worker was stopped by {event.outcome.stopped_by}"
                else:
                    self.ended(attempt, event.outcome)
                    continue
                left = self.left(attempt)
                if left and self._stop.by is None:
                    has = attempt.token in progressed
                    seconds = backlog.lost(attempt, left, progressed=has, now=time.monotonic())
                    self.lost(attempt, left, problem, seconds)
            self.looked()
        return len(backlog)
