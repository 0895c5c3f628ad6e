"""What is heard of a study, and what is left of it, for tests of those who run it."""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nearsight.study import Cell, StudyFolder, StudyListener
from nearsight.train import HistoryRow, RunConfig, RunFolder


def table(folder: Path) -> pd.DataFrame:
    """runs.csv without what differs from one time to the next."""
    return pd.read_csv(folder / "runs.csv", dtype={"run": str}).drop(columns=["images_per_second", "wall_seconds"])


def as_results(study: Path, folder: Path) -> Path:
    """What is committed of a study, from a copy of it: its tables, and what they are of."""
    shutil.copytree(study, folder)
    StudyFolder(folder).write_tables()
    shutil.rmtree(folder / "runs")
    return folder


def text_of(path: Path) -> bytes:
    """Of a table, compressed or not."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


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
