"""A study on disk.

study.json       what was asked for: factors, levels, every cell with its whole config; written first
plan.json        what the runs are to judge, and by which rules; written before the first of them trains
runs/<hash>/     a run folder per cell
locks/           which runner has which cell
runs.csv         a row per complete run; with heads.csv and history.csv, which come when all is done, this is all that
                 tables and figures need: the run folders can go
provenance.json  code, libraries and machines of all runs, and time of those that were not taken from tables
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from nearsight.configuration import decode
from nearsight.errors import InputError
from nearsight.files import (
    STUDY,
    check_file,
    check_kind,
    check_output_folder,
    output_folder,
    remove_remains,
    write_json,
    write_text,
)
from nearsight.study.design import Study, flat_settings
from nearsight.study.lock import Holder, Locks
from nearsight.study.results import SCHEMA, StudyResults, check_place, read_description, read_rows, run_folder
from nearsight.study.run_tables import result_problem
from nearsight.train import RunConfig, RunFolder, RunName
from nearsight.train.integrity import CERTIFIED, TAKEN_FROM, joined

State = Literal["done", "running", "started", "missing", "damaged"]


@dataclass(frozen=True, kw_only=True)
class CellState:
    """How far a cell is."""

    run: RunName
    condition: str
    seed: int
    state: State
    epochs: int
    """Whole epochs on disk."""
    holder: Holder | None
    """Who holds its lock; where that is stale, the state is not running."""
    problem: str
    """What is wrong with a damaged one."""


class StudyFolder:
    """The files of one study, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run_folder(self, run: RunName) -> RunFolder:
        return run_folder(self.path, run)

    def locks(self, *, token: str | None = None, lost_tokens: Collection[str] = ()) -> Locks:
        return Locks(self.path / "locks", token=token, lost_tokens=lost_tokens)

    def check(self, study: Study) -> None:
        """Refuse a folder that is another study's, or that nothing can be written to; nothing is changed."""
        check_output_folder(self.path)
        check_kind(self.path, STUDY)
        check_place(self.path, study.scale)
        has_tables = (self.path / "runs.csv").exists()
        if not (self.path / "study.json").exists():
            if has_tables:
                raise InputError(f"{self.path} holds runs.csv but no study.json; choose another --out")
            return
        described = read_description(self.path)
        if described["schema"] < SCHEMA:
            raise InputError(f"{self.path} was written by an older nearsight; choose another --out")
        _check_same(self.path, described, study)
        if has_tables and not (self.path / "runs").exists():
            raise InputError(
                f"{self.path} holds the tables of this study, whose runs are elsewhere, and they would be lost; "
                "choose another --out"
            )

    def claim(self, study: Study) -> None:
        """Make the folder this study's, or find that it already is. Cells it has of other seeds stay."""
        self.check(study)
        output_folder(self.path / "runs")
        remove_remains(self.path, below=True)
        described = study.to_json()
        if (self.path / "study.json").exists():
            held = read_description(self.path)
            ours = {(cell.condition, cell.seed) for cell in study.cells}
            described["cells"] += [cell for cell in held["cells"] if (cell["condition"], cell["seed"]) not in ours]
            described["cells"].sort(key=lambda cell: cell["seed"])
            if held == described:
                return
        write_json(self.path / "study.json", described)

    def cells(self) -> list[dict[str, Any]]:
        """What study.json says of every cell."""
        return list(read_description(self.path)["cells"])

    def is_done(self, run: RunName) -> bool:
        folder = self.run_folder(run)
        return folder.is_complete and not result_problem(folder)

    def states(self) -> list[CellState]:
        """How far every cell is. Where there are tables and no run folders, those in the tables are done."""
        results = StudyResults.read(self.path)
        epochs_of_done = dict(zip(results.runs["run"], results.runs["epochs"], strict=True))
        locks = self.locks()
        states = []
        for cell in self.cells():
            run = cell["run"]
            folder, holder, problem = self.run_folder(run), locks.holder(run), ""
            epochs = int(epochs_of_done.get(run, 0)) or _epochs_on_disk(folder)
            state: State = "started" if epochs else "missing"
            if run in epochs_of_done:
                state = "done"
            elif holder is not None and not holder.is_stale:
                state = "running"
            elif folder.is_complete:
                state, problem = "damaged", result_problem(folder)
            states.append(
                CellState(
                    run=run,
                    condition=cell["condition"],
                    seed=cell["seed"],
                    state=state,
                    epochs=epochs,
                    holder=holder,
                    problem=problem,
                )
            )
        return states

    def write_runs(self) -> None:
        """Rewrite runs.csv from the run folders.

        Another runner may do the same at this moment. So after writing the table, look once more: if a run was
        completed since, the table may have replaced one that had it.
        """
        written: list[str] | None = None
        while (complete := list((runs := read_rows(self.path))["run"])) != written:
            write_text(self.path / "runs.csv", runs.to_csv(index=False))
            written = complete

    def write_tables(self) -> StudyResults:
        """Everything about the study that can be kept without its run folders."""
        results = StudyResults.read(self.path)
        results.write_tables(self.path)
        runs = [self.run_folder(run) for run in results.runs["run"]]
        certificates = [run.read_provenance() for run in runs]
        origins = [certificate.get(TAKEN_FROM) for certificate in certificates]
        taken = Counter(study for study in origins if study is not None)
        about = {**joined(certificates, CERTIFIED), "runs": len(runs), **({TAKEN_FROM: dict(taken)} if taken else {})}
        # How long runs took that came from tables is not known, so what follows is of the others.
        timed = replace(results, runs=results.runs[[study is None for study in origins]])
        images, seconds = timed.images_trained, elapsed_seconds(runs)
        counted = {
            "images": images,
            "elapsed_seconds": seconds,
            "images_per_second": images / seconds if seconds else 0.0,
        }
        write_json(self.path / "provenance.json", {**about, **counted})
        return results


def _epochs_on_disk(folder: RunFolder) -> int:
    try:
        check_file(folder.path / "history.csv")
        return len(pd.read_csv(folder.path / "history.csv", usecols=["epoch"]))
    except (OSError, ValueError):
        return 0


def _check_same(path: Path, held: dict[str, Any], study: Study) -> None:
    """Name, scale, conditions and all settings must be the same; seeds may be others."""
    asked: dict[str, Any] = {"name": study.name, "scale": study.scale}
    asked |= {f"levels of {name}": list(labels) for name, labels in study.labels.items()}
    stored = {"name": held["name"], "scale": held["scale"]}
    stored |= {f"levels of {name}": labels for name, labels in held["factors"].items()}
    conditions = {cell.condition: cell.config for cell in study.cells}
    difference = _difference(stored, asked) or _difference(
        {"conditions": sorted({cell["condition"] for cell in held["cells"]})}, {"conditions": sorted(conditions)}
    )
    if difference:
        raise InputError(f"{path} holds another study ({difference}); choose another --out")
    for cell in held["cells"]:
        try:
            settings = flat_settings(decode(RunConfig, cell["config"]))
        except InputError as error:
            raise InputError(f"{path} holds this study with other settings: {error}; choose another --out") from error
        if difference := _difference(settings, flat_settings(conditions[cell["condition"]])):
            raise InputError(f"{path} holds this study with other settings ({difference}); choose another --out")


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The first thing that two descriptions do not have in common, in words."""
    for name in dict.fromkeys((*there, *here)):
        if there.get(name) != here.get(name):
            return f"{name}: {_words(there.get(name))} there, {_words(here.get(name))} here"
    return ""


def _words(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def elapsed_seconds(runs: Iterable[RunFolder]) -> float:
    """How long a study took by the clock: the time in which at least one of its runs was at work, by their events.

    Stacks train their runs together and processes share a device, so the seconds of runs and epochs cannot be added up.
    Of runs that were taken from tables it is not known.
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(span for run in runs for span in _spans(run)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _spans(run: RunFolder) -> Iterator[tuple[float, float]]:
    """When the run was at work, in seconds since 1970. One that was killed was so until its last event at least."""
    try:
        lines = run.events.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    starts = [number for number, line in enumerate(lines) if '"event": "started"' in line]
    for start, following in pairwise([*starts, len(lines)]):
        # A line may have been cut short when the run was killed; a damaged log is no error.
        moments = (_moment(line) for line in reversed(lines[start + 1 : following]))
        begin, end = _moment(lines[start]), next((moment for moment in moments if moment is not None), None)
        if begin is not None and end is not None:
            yield begin, end


def _moment(line: str) -> float | None:
    try:
        return datetime.fromisoformat(json.loads(line)["time"]).timestamp()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
