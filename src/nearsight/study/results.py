"""What a study gave, as tables: of runs, of their heads and layers, of their epochs, and of heads during training.

They come from the run folders of a study, or from the CSV files that are left of it where the weights are not kept.
"""

import gzip
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.files import check_file, replacing, write_text
from nearsight.study.plan import Plan
from nearsight.study.run_tables import (
    EPOCH_COLUMNS,
    OF_LATER_VERSIONS,
    RESULT_COLUMNS,
    Columns,
    read_columns,
    read_row,
    read_run,
)
from nearsight.train import HEADS_COLUMNS, LAYERS_COLUMNS, RunFolder, RunName

SCHEMA = 1
"""Version of study.json and of the tables; raised whenever an older reader would go wrong."""
COURSE = "course.csv.gz"
"""Of every head after every epoch, which is megabytes."""
HEAD_COLUMNS = ("run", *(name for name in HEADS_COLUMNS if name != "epoch"))
LAYER_COLUMNS = ("run", *LAYERS_COLUMNS)
COURSE_COLUMNS = ("run", *HEADS_COLUMNS)
HISTORY_COLUMNS = ("run", *EPOCH_COLUMNS)


@dataclass(frozen=True, eq=False)
class StudyResults:
    """The complete runs of a study."""

    name: str
    factors: dict[str, tuple[str, ...]]
    """Factor → the labels of its levels, in order; the first is the base."""
    runs: pd.DataFrame
    """A row per complete run: run (its hash), condition, a column per factor (the level's label), seed and
    `RESULT_COLUMNS`."""
    heads: pd.DataFrame
    """The heads of the runs' final models: `HEAD_COLUMNS`."""
    history: pd.DataFrame
    """The runs' epochs: `HISTORY_COLUMNS`."""
    scale: str
    """full, or small: shrunk to test the path, and no result."""
    settings: dict[str, object]
    """What all cells share: dotted name → value. Settings of an augmentation are shared by the cells that have it."""
    assumed: tuple[str, ...]
    """Names among the settings and factors whose values the paper does not report."""
    layers: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(LAYER_COLUMNS)))
    """What the tokens of the final models' layers are like: `LAYER_COLUMNS`."""
    course: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(COURSE_COLUMNS)))
    """The heads during training, of the runs that were measured then: `COURSE_COLUMNS`."""
    planned: tuple[str, ...] = ()
    """The conditions that were asked for; none where that is not known."""
    seeds: tuple[int, ...] = ()
    """Likewise."""
    design: str = ""
    """In a line for people, as in "full factorial"; of a fraction, what is aliased with what."""
    plan: Plan | None = None
    """What its runs were to judge; None where that is not known."""

    @classmethod
    def read(cls, folder: Path) -> "StudyResults":
        """The results in a study folder, complete or not, or in a folder of committed results."""
        described = read_description(folder)
        factors = {name: tuple(labels) for name, labels in described["factors"].items()}
        kept = _from_run_folders if (folder / "runs").is_dir() else _from_tables
        return cls(
            name=described["name"],
            factors=factors,
            scale=described["scale"],
            settings=described["settings"],
            assumed=tuple(described["assumed"]),
            planned=tuple(dict.fromkeys(cell["condition"] for cell in described["cells"])),
            seeds=tuple(dict.fromkeys(cell["seed"] for cell in described["cells"])),
            design=described["design"],
            plan=Plan.read(folder),
            **kept(folder, described["cells"], tuple(factors)),
        )

    @property
    def images_trained(self) -> int:
        """Images that went through the runs' training steps."""
        seconds = self.history.groupby("run")["seconds"].sum()
        return round(float((self.runs.set_index("run")["images_per_second"] * seconds).sum()))

    def write_tables(self, folder: Path) -> tuple[Path, ...]:
        """runs.csv, heads.csv, layers.csv, history.csv and, of what was measured during training, course.csv.gz.

        Each is replaced whole; the files written. Columns of later versions that no run has are left out.
        """
        unknown = [name for name in OF_LATER_VERSIONS if name in self.runs and self.runs[name].isna().all()]
        tables = {
            "runs": self.runs.drop(columns=unknown),
            "heads": self.heads,
            "layers": self.layers,
            "history": self.history,
        }
        written = []
        for name, table in tables.items():
            written.append(folder / f"{name}.csv")
            write_text(written[-1], table.to_csv(index=False))
        if not self.course.empty:
            written.append(folder / COURSE)
            # Without the time of writing, so that the same numbers are the same file.
            with replacing(written[-1]) as temporary:
                temporary.write_bytes(gzip.compress(self.course.to_csv(index=False).encode(), mtime=0))
        return tuple(written)


def check_place(path: Path, scale: str) -> None:
    """Refuse a folder of results for a study that has none."""
    if scale == "small" and "results" in path.resolve().parts:
        raise InputError(f"{path} is for results, and a study at small scale has none; choose another --out")


def run_columns(factors: tuple[str, ...]) -> tuple[str, ...]:
    return ("run", "condition", *factors, "seed", *RESULT_COLUMNS)


def run_folder(study: Path, run: RunName) -> RunFolder:
    """Where a run of a study lies; the only way from a name to a path."""
    return RunFolder(study / "runs" / RunName(run))


def read_description(folder: Path) -> dict[str, Any]:
    """What study.json says, of a schema this version reads."""
    path = folder / "study.json"
    check_file(path)
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{folder} is not the folder of a study: it has no study.json") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(described, dict) or not isinstance(described.get("schema"), int):
        raise InputError(f"{path} does not describe a study")
    if described["schema"] > SCHEMA:
        raise InputError(
            f"{path} has schema {described['schema']}, but this nearsight reads up to {SCHEMA}; update nearsight"
        )
    if missing := missing_parts(described, _OF_A_STUDY):
        raise InputError(f"{path} is damaged: it does not say its {missing}")
    if not all(isinstance(labels, list) for labels in described["factors"].values()):
        raise InputError(f"{path} is damaged: a factor has no levels")
    for number, cell in enumerate(described["cells"]):
        if missing := missing_parts(cell, _OF_A_CELL):
            raise InputError(f"{path} is damaged: cell {number} does not say its {missing}")
        try:
            cell["run"] = RunName(cell["run"])
        except InputError as error:
            raise InputError(f"{path} is damaged: cell {number}: {error}") from error
        cell["condition"] = _label(cell["condition"])
        cell["levels"] = {factor: _label(label) for factor, label in cell["levels"].items()}
    described["factors"] = {factor: list(map(_label, labels)) for factor, labels in described["factors"].items()}
    return described


def _label(label: Any) -> Any:
    """Of a level or condition. In earlier versions one was called None, which pandas reads as a missing value."""
    return "None of these" if label == "None" else label


_OF_A_STUDY: dict[str, type] = {
    **{"name": str, "scale": str, "design": str},
    **{"factors": dict, "cells": list, "settings": dict, "assumed": list},
}
_OF_A_CELL: dict[str, type] = {"run": str, "condition": str, "levels": dict, "seed": int, "config": dict}


def missing_parts(value: Any, parts: dict[str, type]) -> str:
    """The parts that a JSON value does not have, or not as what they should be."""
    fields = value if isinstance(value, dict) else {}
    return ", ".join(sorted(name for name, kind in parts.items() if not isinstance(fields.get(name), kind)))


def read_rows(folder: Path) -> pd.DataFrame:
    """The `runs` of a study folder without reading the rest, for callers that ask after every run."""
    described, rows = read_description(folder), []
    for cell in described["cells"]:
        run = run_folder(folder, cell["run"])
        if run.is_complete:
            with suppress(InputError):  # damaged, so not complete; the study does it again
                rows.append(_named(cell, read_row(run)))
    return pd.DataFrame(rows, columns=list(run_columns(tuple(described["factors"]))))


def _named(cell: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row of `runs`."""
    return {"run": cell["run"], "condition": cell["condition"], **cell["levels"], "seed": cell["seed"], **row}


_OF_RUNS = {"heads": HEAD_COLUMNS, "layers": LAYER_COLUMNS, "history": HISTORY_COLUMNS, "course": COURSE_COLUMNS}
"""Tables with several rows per run."""
_MOST_NAMED = 3


def _from_run_folders(folder: Path, cells: list[dict[str, Any]], factors: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    rows, runs = [], []
    parts: dict[str, list[Columns]] = {name: [] for name in _OF_RUNS}
    for cell in cells:
        run = run_folder(folder, cell["run"])
        if not run.is_complete:
            continue
        try:
            tables = read_run(run)
        except InputError:  # likewise
            continue
        rows.append(_named(cell, tables.row))
        runs.append(cell["run"])
        for name, columns in tables.columns.items():
            parts[name].append(columns)
    joined = {name: _joined(name, runs, parts.pop(name)) for name in _OF_RUNS}
    return {"runs": pd.DataFrame(rows, columns=list(run_columns(factors))), **joined}


def _joined(name: str, runs: list[str], parts: list[Columns]) -> pd.DataFrame:
    """One table of all runs."""
    sizes = [len(next(iter(part.values()))) for part in parts]
    if not sum(sizes):
        return _none(name)
    first, *others = _OF_RUNS[name]
    joined: dict[str, Any] = {first: np.repeat(np.array(runs, dtype=object), sizes)}
    for column in others:  # a table without rows does not decide the types of columns
        joined[column] = np.concatenate([part.pop(column) for part, size in zip(parts, sizes, strict=True) if size])
    return pd.DataFrame(joined)


def _none(name: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(_OF_RUNS[name]))


def _from_tables(folder: Path, _: list[dict[str, Any]], factors: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    runs = _read_table(folder / "runs.csv", run_columns(factors), ("run", "condition", *factors))
    tables = {"runs": runs.assign(**{name: list(map(_label, runs[name])) for name in ("condition", *factors)})}
    for name, columns in _OF_RUNS.items():
        path = folder / (COURSE if name == "course" else f"{name}.csv")
        if name == "course" and not path.exists():
            tables[name] = _none(name)
        else:
            text = tuple(column for column in ("run", "layer_name") if column in columns)
            tables[name] = _read_table(path, columns, text)
    _check_heads(folder / "heads.csv", tables["runs"], tables["heads"])
    return tables


def _check_heads(path: Path, runs: pd.DataFrame, heads: pd.DataFrame) -> None:
    """Every run with a most local head has heads."""
    lacking = runs[runs["min_mad"].notna() & ~runs["run"].isin(heads.loc[heads["mad"].notna(), "run"])]
    if len(lacking):
        few = [f"{row.condition}, seed {row.seed} ({row.run})" for row in lacking.head(_MOST_NAMED).itertuples()]
        more = f" and {len(lacking) - len(few)} more" if len(lacking) > len(few) else ""
        raise InputError(
            f"{path} is damaged: it has no heads of {'; '.join(few)}{more}; put back a whole one, or leave these runs "
            "out of runs.csv"
        )


def _read_table(path: Path, columns: tuple[str, ...], text: tuple[str, ...]) -> pd.DataFrame:
    table = pd.DataFrame(read_columns(path, columns, text))
    try:
        return table.assign(run=[RunName(run) for run in table["run"]])
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}") from error
