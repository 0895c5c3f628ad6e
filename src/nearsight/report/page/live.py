"""The page of a study while it runs: what there is so far, how far it is, and how long it will take at most."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.report.page.document import Document
from nearsight.report.page.results import study_page_html
from nearsight.report.page.tables import label_html
from nearsight.study import Cell, StudyFolder, StudyListener, StudyResults
from nearsight.train import HistoryRow, RunConfig, RunFolder

SECONDS_BETWEEN = 60.0
LARGEST_SHARE = 0.05
"""Of the time, that may go into pages: many runs take longer to write down, and training waits for it."""
CELLS_NAMED = 12
"""Cells at work that the page names; of more it says how many."""


class LivePage(StudyListener):
    """Passes all events on to another listener, and at most once a minute replaces the page by a newer one.

    Tests and claims are left to the page of the complete study. What is left is counted in epochs of cells, as in the
    command's own progress: early stopping ends cells sooner. A page that cannot be written does not stop a study.
    """

    def __init__(
        self,
        folder: Path,
        listener: StudyListener | None = None,
        *,
        name: str = "report.html",
        seconds_between: float = SECONDS_BETWEEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._path = folder, folder / name
        self._listener = listener or StudyListener()
        self._seconds_between, self._clock = seconds_between, clock
        self._began = clock()
        self._next = self._began
        self._cells: dict[str, Cell] = {}
        """All of the study, by their runs."""
        self._left: dict[str, int] = {}
        """Epochs at most, of the cells that are not done."""
        self._epochs: dict[str, int] = {}
        """Of the cells that this runner is at."""
        self._epochs_done_here = 0

    def planned(self, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        self._listener.planned(cells, missing)
        self._cells = {cell.run: cell for cell in cells}
        self._left = {cell.run: cell.config.protocol.max_epochs for cell in missing}
        self._began = self._clock()
        if missing:  # else the page of the whole study stays
            self._refresh()

    def taken(self, cells: Sequence[Cell]) -> None:
        self._listener.taken(cells)

    def released(self, cells: Sequence[Cell]) -> None:
        self._listener.released(cells)
        for cell in cells:
            self._epochs.pop(cell.run, None)

    def worker_lost(self, cells: Sequence[Cell], problem: str, seconds: float | None) -> None:
        self._listener.worker_lost(cells, problem, seconds)

    def set_aside(self, path: Path, problem: str) -> None:
        self._listener.set_aside(path, problem)

    def taken_over(self, config: RunConfig) -> None:
        self._listener.taken_over(config)
        self._epochs.pop(config.identity, None)

    def started(self, config: RunConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._listener.started(config, epochs_done, steps_per_epoch)
        self._epochs[config.identity] = epochs_done

    def step(self, step: int) -> None:
        self._listener.step(step)

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self._listener.epoch(config, row)
        self._epochs[config.identity] = row.epoch
        self._epochs_done_here += 1
        self._refresh()

    def split(self, sizes: Sequence[int]) -> None:
        self._listener.split(sizes)

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        self._listener.finished(config, folder)
        self._epochs.pop(config.identity, None)
        self._left.pop(config.identity, None)
        self._refresh()

    def _refresh(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        with suppress(OSError):
            write_text(self._path, self._html())
        took = self._clock() - now
        self._next = now + took + max(self._seconds_between, took / LARGEST_SHARE)

    def _html(self) -> str:
        refresh = max(1, round(self._seconds_between))
        try:
            results = StudyResults.read(self._folder)
            return study_page_html(
                results, with_stills=False, with_tests=False, banner=self.progress_html(), refresh_seconds=refresh
            )
        except InputError as reason:  # nothing is complete yet
            return Document(
                title=self._folder.resolve().name,
                headline="No run is complete yet.",
                details=[escape(str(reason))],
                hero="",
                sections=(),
                banner=self.progress_html(),
                refresh_seconds=refresh,
            ).html()

    def progress_html(self) -> str:
        """How far the study is, in all runners' hands, and what this one is at."""
        done = len(self._cells) - len(self._left)
        with suppress(InputError):  # others may be at it too
            states = Counter(state.state for state in StudyFolder(self._folder).states())
            done = max(done, states["done"])
        at = [
            f"<li>{label_html(self._cells[run].condition)}, seed {self._cells[run].seed}: epoch {epoch} of at most "
            f"{self._cells[run].config.protocol.max_epochs}</li>"
            for run, epoch in list(self._epochs.items())[:CELLS_NAMED]
            if run in self._cells
        ]
        more = len(self._epochs) - CELLS_NAMED
        also = f"<p>and {more} more.</p>" if more > 0 else ""
        total = sum(cell.config.protocol.max_epochs for cell in self._cells.values())
        share = 1 - self._epochs_left() / total if total else 0.0
        return (
            '<div class="progress" role="region" aria-label="Progress">'
            f'<progress value="{share:.4f}" aria-label="Share of the epochs"></progress>'
            f"<p><b>{done} of {len(self._cells)} cells done</b>, {len(self._epochs)} running here. "
            f"{self._time_left()} Written at {time.strftime('%Y-%m-%d %H:%M:%S')}; this page renews itself.</p>"
            + (f"<details><summary>What is running</summary><ul>{''.join(at)}</ul>{also}</details>" if at else "")
            + "</div>"
        )

    def _time_left(self) -> str:
        if not self._epochs_done_here:
            return "How long it will take is not known yet."
        seconds = self._epochs_left() * (self._clock() - self._began) / self._epochs_done_here
        return f"At most {seconds / 60:.0f} min left."

    def _epochs_left(self) -> int:
        return sum(most - self._epochs.get(run, 0) for run, most in self._left.items())
