"""Cells that wait for a worker, those among them that have lost one, and how patiently they are tried again."""

import itertools
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nearsight.errors import check_at_least
from nearsight.study.design import Cell


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often, and after how long, cells are tried again that lost their worker."""

    most: int = 4
    """Losses in a row, without a whole epoch between them, after which cells are given up."""
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
class Attempt:
    """Cells for one worker to do."""

    cells: tuple[Cell, ...]
    losses: int = 0
    """Workers that were lost at these cells since one of them finished an epoch."""
    gone: tuple[str, ...] = ()
    """The tokens of all workers that were lost at them: their locks hold nothing."""
    not_before: float = 0.0
    """On the clock of `time.monotonic`."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this attempt from all others."""


class Backlog:
    """What is still to be given to workers."""

    def __init__(self, stacks: Iterable[Sequence[Cell]], retries: Retries) -> None:
        self._retries = retries
        self._waiting = [Attempt(cells=tuple(stack)) for stack in stacks if stack]

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, now: float) -> Attempt | None:
        """The first that may be tried now."""
        for position, attempt in enumerate(self._waiting):
            if attempt.not_before <= now:
                return self._waiting.pop(position)
        return None

    def lost(self, attempt: Attempt, left: Sequence[Cell], *, progressed: bool, now: float) -> float | None:
        """Put back what is left of an attempt whose worker was lost; how long it waits, or None: it is given up.

        What was lost twice without an epoch between goes on as two halves: it may be that memory was missing, or that
        one cell is to blame.
        """
        losses = 1 if progressed else attempt.losses + 1
        if losses > self._retries.most:
            return None
        seconds = self._retries.wait(losses)
        middle = len(left) if losses < 2 else math.ceil(len(left) / 2)
        gone = (*attempt.gone, attempt.token)
        self._waiting += [
            Attempt(cells=tuple(part), losses=losses, gone=gone, not_before=now + seconds)
            for part in (left[:middle], left[middle:])
            if part
        ]
        return seconds


def divide(groups: Iterable[Sequence[Cell]], *, most: int, least_parts: int) -> list[tuple[Cell, ...]]:
    """The groups in parts that can train as one stack: none larger than `most`, and so many that no worker is idle.

    No stack is cut to make parts of equal size: half a stack takes more than half the time, and what is finished early
    is not lost if the rest is stopped.
    """
    groups = [group for group in groups if group]
    total = sum(map(len, groups))
    most = max(1, min(most, math.ceil(total / max(1, least_parts))))
    parts: list[tuple[Cell, ...]] = []
    for stack in itertools.chain.from_iterable(map(_stacks, groups)):
        num_parts = math.ceil(len(stack) / most)
        ends = [round(number * len(stack) / num_parts) for number in range(num_parts + 1)]
        parts += [tuple(stack[begin:end]) for begin, end in itertools.pairwise(ends)]
    return parts


def _stacks(group: Sequence[Cell]) -> Iterable[list[Cell]]:
    """Cells that can train together, in the order in which their kinds first come."""
    alike: dict[object, list[Cell]] = {}
    for cell in group:
        alike.setdefault(cell.config.stack_key, []).append(cell)
    return alike.values()
