"""What an executor is given, and what it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nearsight.study.design import Cell
from nearsight.study.listening import StudyListener
from nearsight.study.location import StudyPublisher
from nearsight.train import RunName, Stop


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is missing of a study whose folder is claimed, and how it is to be done."""

    folder: Path
    groups: tuple[tuple[Cell, ...], ...]
    """In the order in which they are to be done; the cells of one train together as far as memory allows."""
    cells_per_stack: int
    """The most cells to take at a time."""
    data_dir: Path | None
    checkpoint_every: int
    location: StudyPublisher | None = None
    """Where finished runs are published, if elsewhere than in the folder."""


class Executor(Protocol):
    """Does the cells of a study: in this process, in several, on several machines. It changes no number."""

    def check(self) -> None:
        """Refuse what cannot work, before anything is written."""
        ...

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        """Do all that other runners are not at; run → what was wrong with it, of those that could not be done.

        A cell that cannot go on does not keep the others from their end. If a stop is wished for, whole epochs are put
        on disk and `StoppedError` raised.
        """
        ...
