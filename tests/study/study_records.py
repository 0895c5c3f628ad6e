"""What is heard of a study, and what is left of it, for tests of those who run it."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nearsight.study import Cell, StudyListener
from nearsight.train import HistoryRow, RunConfig, RunFolder


def table(folder: Path) -> pd.DataFrame:
    """runs.csv without what differs from one time to the next."""
    return pd.read_csv(folder / "runs.csv", dtype={"run": str}).drop(columns=["images_per_second", "wall_seconds"])


def events(folder: Path) -> Counter[tuple[str, str]]:
    """How often what happened to which run."""
    return Counter(
        (run.name, json.loads(line)["event"])
        for run in (folder / "runs").iterdir()
        for line in (run / "events.jsonl").read_text().splitlines()
    )


class Recorder(StudyListener):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.epochs: list[tuple[str, int]] = []
        self.done: list[str] = []
        self.lost: list[tuple[str, float | None]] = []

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.epochs.append((config.identity, row.epoch))

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        assert folder.read_result()["identity"] == config.identity
        self.done.append(config.identity)

    def worker_lost(self, cells: Sequence[Cell], problem: str, seconds: float | None) -> None:
        self.lost.append((problem, seconds))
