"""What a study gave, as tables: of runs, of their heads and layers, of their epochs, and of heads during training.

They come from the run folders of a study, or from the CSV files that are left of it where the weights are not kept.
"""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.train import HEADS_COLUMNS, LAYERS_COLUMNS, HistoryRow, RunFolder

SCHEMA = 1
"""Version of study.json and of the tables; raised whenever an older reader would go wrong."""
RESULT_COLUMNS = (
    *("epochs", "best_epoch", "best_val_acc", "test_acc", "min_mad", "max_mad", "min_entropy", "max_entropy"),
    *("position_association", "images_per_second", "wall_seconds"),
)
"""What a run gave: the columns of `runs` after run, condition, the factors and the seed."""
HEAD_COLUMNS = ("run", *(name for name in HEADS_COLUMNS if name != "epoch"))
LAYER_COLUMNS = ("run", *LAYERS_COLUMNS)
COURSE_COLUMNS = ("run", *HEADS_COLUMNS)
HISTORY_COLUMNS = ("run", *(field.name for field in fields(HistoryRow)))

_NAMED_OTHERWISE = {"best_val_acc": "val_acc"}
"""Column → its name in result.json."""


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
            **kept(folder, described["cells"], tuple(factors)),
        )

    @property
    def images_trained(self) -> int:
        """Images that went through the runs' training steps."""
        seconds = self.history.groupby("run")["seconds"].sum()
        return round(float((self.runs.set_index("run")["images_per_second"] * seconds).sum()))

    @property
    def device_seconds(self) -> float:
        """Time that training, testing and measuring took. Runs of one stack spend an epoch together, so it counts
        once: they have it in common to the last digit."""
        training = float(self.history["seconds"].unique().sum())
        after = float(self.runs["wall_seconds"].sum() - self.history["seconds"].sum())
        return training + after

    def write_tables(self, folder: Path) -> tuple[Path, ...]:
        """runs.csv, heads.csv, layers.csv, history.csv and, of what was measured during training, course.csv.

        Each is replaced whole; the files written.
        """
        tables = {"runs": self.runs, "heads": self.heads, "layers": self.layers, "history": self.history}
        if not self.course.empty:
            tables["course"] = self.course
        for name, table in tables.items():
            write_text(folder / f"{name}.csv", table.to_csv(index=False))
        return tuple(folder / f"{name}.csv" for name in tables)


def run_columns(factors: tuple[str, ...]) -> tuple[str, ...]:
    return ("run", "condition", *factors, "seed", *RESULT_COLUMNS)


def read_description(folder: Path) -> dict[str, Any]:
    """What study.json says, of a schema this version reads."""
    path = folder / "study.json"
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{folder} is not the folder of a study: it has no study.json") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(described, dict) or not isinstance(described.get("schema"), int):
        raise InputError(f"{path} does not describe a study")
    if described["schema"] > SCHEMA:
        raise InputError(
            f"{path} has schema {described['schema']}, but this nearsight reads up to {SCHEMA}; update nearsight"
        )
    missing = {"name", "scale", "design", "factors", "cells", "settings", "assumed"} - set(described)
    if missing:
        raise InputError(f"{path} is damaged: it does not say its {', '.join(sorted(missing))}")
    for number, cell in enumerate(described["cells"]):
        if missing := {"run", "condition", "levels", "seed", "config"} - set(cell):
            raise InputError(f"{path} is damaged: cell {number} does not say its {', '.join(sorted(missing))}")
    return described


def read_row(folder: RunFolder) -> dict[str, Any]:
    """The `RESULT_COLUMNS` of a complete run. What cannot be read is an `InputError` that names the file."""
    told = {**folder.read_result(), **folder.read_provenance()}
    try:
        row = {name: told[_NAMED_OTHERWISE.get(name, name)] for name in RESULT_COLUMNS}
    except KeyError as error:
        raise InputError(f"{folder.path} is damaged: its result does not say {error}") from error
    # A model without heads has none that is the most local.
    return {name: math.nan if value is None else value for name, value in row.items()}


@dataclass(frozen=True, eq=False)
class RunTables:
    """What a complete run gave."""

    row: dict[str, Any]
    heads: pd.DataFrame
    """Of its final model."""
    layers: pd.DataFrame
    history: pd.DataFrame
    course: pd.DataFrame
    """The heads at all epochs at which they were measured, if that was asked for."""


def read_run(folder: RunFolder) -> RunTables:
    """What a complete run gave. What cannot be read is an `InputError` that names the file."""
    row = read_row(folder)
    heads = _read_table(folder.heads, HEADS_COLUMNS, text=("layer_name",))
    # Heads may have been measured all through training. The model is that of the best epoch, and where both were
    # measured at that epoch the file holds the model's.
    final = heads[heads["epoch"] == row["best_epoch"]].drop(columns="epoch")
    if final.empty and not math.isnan(row["min_mad"]):
        raise InputError(f"{folder.heads} is damaged: it has no heads of epoch {row['best_epoch']}, the model's")
    return RunTables(
        row=row,
        heads=final,
        layers=_read_table(folder.layers, LAYERS_COLUMNS, text=("layer_name",)),
        history=_read_table(folder.path / "history.csv", HISTORY_COLUMNS[1:]),
        course=heads if folder.read_config().measure_every else heads.iloc[:0],
    )


def read_rows(folder: Path) -> pd.DataFrame:
    """The `runs` of a study folder without reading all else, for those who ask after every run."""
    described, rows = read_description(folder), []
    for cell in described["cells"]:
        run_folder = RunFolder(folder / "runs" / cell["run"])
        if run_folder.is_complete:
            with suppress(InputError):  # damaged, so not complete; the study does it again
                rows.append(_named(cell, read_row(run_folder)))
    return pd.DataFrame(rows, columns=list(run_columns(tuple(described["factors"]))))


def _named(cell: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row of `runs`."""
    return {"run": cell["run"], "condition": cell["condition"], **cell["levels"], "seed": cell["seed"], **row}


_OF_RUNS = {"heads": HEAD_COLUMNS, "layers": LAYER_COLUMNS, "history": HISTORY_COLUMNS, "course": COURSE_COLUMNS}
"""Tables with several rows per run."""


def _from_run_folders(folder: Path, cells: list[dict[str, Any]], factors: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    rows = []
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in _OF_RUNS}
    for cell in cells:
        run_folder = RunFolder(folder / "runs" / cell["run"])
        if not run_folder.is_complete:
            continue
        try:
            tables = read_run(run_folder)
        except InputError:  # likewise
            continue
        rows.append(_named(cell, tables.row))
        for name, columns in _OF_RUNS.items():
            parts[name].append(getattr(tables, name).assign(run=cell["run"])[list(columns)])
    joined = {
        name: pd.concat(some, ignore_index=True)
        if (some := [part for part in parts[name] if len(part)])
        else _none(name)
        for name in _OF_RUNS
    }
    return {"runs": pd.DataFrame(rows, columns=list(run_columns(factors))), **joined}


def _none(name: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(_OF_RUNS[name]))


def _from_tables(folder: Path, _: list[dict[str, Any]], factors: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    tables = {"runs": _read_table(folder / "runs.csv", run_columns(factors), text=("run", "condition", *factors))}
    for name, columns in _OF_RUNS.items():
        if name == "course" and not (folder / "course.csv").exists():
            tables[name] = _none(name)
        else:
            text = tuple(column for column in ("run", "layer_name") if column in columns)
            tables[name] = _read_table(folder / f"{name}.csv", columns, text=text)
    return tables


def _read_table(path: Path, columns: tuple[str, ...], text: tuple[str, ...] = ()) -> pd.DataFrame:
    """The columns of a CSV file, digit for digit. Those of text stay text: a hash may look like a number, and a level
    may be called "none"."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)[list(columns)]
        return frame.assign(**{name: _numbers(frame[name]) for name in columns if name not in text})
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (KeyError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise InputError(f"{path} is damaged: {' '.join(str(error).split())}") from error


def _numbers(column: "pd.Series[str]") -> "pd.Series[int] | pd.Series[float]":
    try:
        return column.astype("int64")
    except ValueError:
        return column.replace("", "nan").astype("float64")
