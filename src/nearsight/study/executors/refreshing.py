"""runs.csv while cells train."""

import time

from nearsight.study.folder import StudyFolder

_SHARE_OF_TIME = 0.05
"""That goes, at most, into writing runs.csv anew while cells train."""


class RunsTable:
    """runs.csv, made anew when runs are done. Of a large study that takes time, so not after each of them."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder
        self._not_before = 0.0

    def refresh(self) -> bool:
        """Whether it was written; False: it was only a moment ago, and waits for another call."""
        began = time.monotonic()
        if began < self._not_before:
            return False
        self._folder.write_runs()
        ended = time.monotonic()
        self._not_before = ended + (ended - began) / _SHARE_OF_TIME
        return True
