"""How training ends early: it cannot go on, or a stop was requested."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class TrainingError(RuntimeError):
    """Training cannot go on; the run folder keeps the last good checkpoint."""


class LostProcessError(TrainingError):
    """One of several processes that train together is lost, or does not answer."""

    def __init__(self, num_processes: int, reason: str) -> None:
        super().__init__(
            f"another of {num_processes} processes was lost or does not answer ({reason}); the last checkpoint is "
            "kept, and the same command continues, on any number of processes"
        )


class StoppedError(Exception):
    """Training ended because a stop was requested; its folders hold the last whole epoch and can be continued."""

    def __init__(self, by: str, epochs_done: Sequence[int]) -> None:
        self.by = by
        least, most = min(epochs_done), max(epochs_done)
        if most == 0:
            where = "before the first epoch was over"
        else:
            where = f"after epoch {most}" if least == most else f"after epochs {least} to {most}"
        super().__init__(f"stopped by {by} {where}; the same command continues")


class Stop:
    """A request to stop, which training checks for after every step. It may come at any time, from a signal handler,
    another thread or a listener."""

    def __init__(self) -> None:
        self.by: str | None = None
        """Who requested the stop, in a word for people."""
        self.is_listening = False
        """Whether something runs that checks for a stop; otherwise a request has no effect."""

    @property
    def requested(self) -> bool:
        return self.by is not None

    def request(self, by: str) -> None:
        self.by = by

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around code that checks for a stop at short intervals."""
        self.is_listening = True
        try:
            yield
        finally:
            self.is_listening = False


def divergence(folder: Path, loss: float, epoch: int) -> str:
    """That a loss is not finite, in which epoch (counted from 1), and what is left of the run in this folder."""
    kept = f"the checkpoint of epoch {epoch - 1} is kept" if epoch > 1 else "no epoch was finished"
    return f"the loss of {folder} became {loss} in epoch {epoch}; {kept}"


def way_out_of_divergence(precision: str) -> str:
    """What to try, of runs in this arithmetic."""
    return "Try a lower --protocol.lr" + ("" if precision == "fp32" else ", or --precision fp32")
