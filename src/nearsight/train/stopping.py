"""Ending training early and well: somebody wishes it, training heeds the wish after the step it is in."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class StoppedError(Exception):
    """Training ended because that was wished for; its folders hold the last whole epoch and can be continued."""

    def __init__(self, by: str, epochs_done: Sequence[int]) -> None:
        self.by = by
        least, most = min(epochs_done), max(epochs_done)
        if most == 0:
            where = "before the first epoch was over"
        else:
            where = f"after epoch {most}" if least == most else f"after epochs {least} to {most}"
        super().__init__(f"stopped by {by} {where}; the same command continues")


class Stop:
    """A wish that training end. Anybody may make it at any time: a signal handler, another thread, a listener."""

    def __init__(self) -> None:
        self.by: str | None = None
        """Who made the wish, in a word for people."""
        self.is_heeded = False
        """Whether training is under way and will ask; before and after, a wish would wait for nobody."""

    @property
    def requested(self) -> bool:
        return self.by is not None

    def request(self, by: str) -> None:
        self.by = by

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Around whatever asks for the wish at short intervals."""
        self.is_heeded = True
        try:
            yield
        finally:
            self.is_heeded = False
