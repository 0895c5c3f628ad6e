"""Progress of a segmentation probe on standard error: a bar on a terminal, plain lines elsewhere."""

import time

from rich.progress import TaskID

from nearsight.commands.progress import SECONDS_BETWEEN_LINES, BarOrLines
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.head import LossRow
from nearsight.probe.segmentation.probing import SegmentListener


class SegmentProgress(BarOrLines, SegmentListener):
    """Shows one probe; use it as a context manager."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._tasks: dict[str, TaskID] = {}
        self._said = time.perf_counter()
        self._iterations = 0

    def started(self, steps_done: int, config: SegmentConfig) -> None:
        self._iterations = config.iterations
        if steps_done:
            self._say(f"continuing after iteration {steps_done}")

    def step(self, steps_done: int, last: LossRow | None) -> None:
        self._show("training", steps_done, self._iterations, "" if last is None else f"loss {last.loss:.3f}")

    def tested(self, num_done: int, num_images: int) -> None:
        self._show("testing", num_done, num_images, "")

    def _show(self, what: str, done: int, total: int, status: str) -> None:
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(f"{self._label}, {what}", total=total, status="")
            self._bar.update(self._tasks[what], completed=done, status=status)
        elif done == total or time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.perf_counter()
            self._say(f"{what} {done}/{total}{', ' if status else ''}{status}")
