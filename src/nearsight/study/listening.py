"""What can be heard of a study while it runs, whoever runs it."""

from collections.abc import Sequence
from pathlib import Path

from nearsight.study.design import Cell
from nearsight.train import Listener, RunConfig


class StudyListener(Listener):
    """Told what happens while a study runs; the default listens to nothing.

    Where workers do the study, all of it is told in the process that started them, except for steps: these are too
    many to be sent around.
    """

    def planned(self, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        """These are the study's cells, and those of them that are not done yet."""

    def taken(self, cells: Sequence[Cell]) -> None:
        """A runner does these next, together as far as memory allows."""

    def given_back(self, cells: Sequence[Cell]) -> None:
        """It is no longer at these: they are done, cannot be done, or wait for somebody else."""

    def set_aside(self, path: Path, problem: str) -> None:
        """Something in a run folder is damaged; it is kept beside, and done again."""

    def taken_over(self, config: RunConfig) -> None:
        """Another runner thought that this one had ended, and does this run now."""

    def worker_lost(self, cells: Sequence[Cell], problem: str, seconds: float | None) -> None:
        """The worker at these cells ended unasked. They are tried again after so many seconds; None: not again."""
