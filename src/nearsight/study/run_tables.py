"""What one complete run gave, from its folder; and, where something in one is damaged, how the run can still be done.

A study reads thousands of these, so the small files of a run become plain columns, and data frames only where they
are asked for: making one takes longer than reading the file.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.files import check_file
from nearsight.train import HEADS_COLUMNS, LAYERS_COLUMNS, SCHEMA, HistoryRow, RunConfig, RunFolder

RESULT_COLUMNS = (
    *("epochs", "best_epoch", "best_val_acc", "test_acc", "min_mad", "max_mad", "min_entropy", "max_entropy"),
    *("max_share_self", "max_share_near", "position_association", "images_per_second", "wall_seconds"),
)
"""What a run gave, in a row."""
OF_LATER_VERSIONS = ("max_share_self", "max_share_near")
"""Which runs, and tables, of earlier ones do not have."""
EPOCH_COLUMNS = tuple(field.name for field in fields(HistoryRow))
READ_AS_MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Words that `pandas.read_csv` takes for a missing value."""
NO_WORD = "–"
"""In tables, where there is no word."""

Columns = dict[str, NDArray[Any]]
"""A table: column → int64, float64 or, of text, objects."""

_NAMED_OTHERWISE = {"best_val_acc": "val_acc"}
"""Column → its name in result.json."""
_ROWS_AT_ONCE = 4096
WHOLE = ("epochs", "best_epoch", "seed")
"""Columns of whole numbers."""
MOST_COUNTED = {"layer": 4096, "head": 4096}
"""Columns that count from 0, and what they stay below: tables become arrays of all layers and heads there are."""
MOST_ROWS = 5_000_000
"""Of a table; a compressed one may be a thousand times as large as its file."""
LONGEST_LINE = 2**20
"""Of a table, in characters."""


@dataclass(frozen=True, eq=False)
class RunTables:
    """What a complete run gave."""

    row: dict[str, Any]
    """`RESULT_COLUMNS`."""
    columns: Mapping[str, Columns]
    """heads, layers, history and course."""

    @cached_property
    def heads(self) -> pd.DataFrame:
        """Of its final model."""
        return pd.DataFrame(self.columns["heads"])

    @cached_property
    def layers(self) -> pd.DataFrame:
        return pd.DataFrame(self.columns["layers"])

    @cached_property
    def history(self) -> pd.DataFrame:
        return pd.DataFrame(self.columns["history"])

    @cached_property
    def course(self) -> pd.DataFrame:
        """The heads at all epochs at which they were measured, if that was asked for."""
        return pd.DataFrame(self.columns["course"])


def read_run(folder: RunFolder) -> RunTables:
    """What a complete run gave. What cannot be read is an `InputError` that names the file."""
    row = read_row(folder)
    heads = read_columns(folder.heads, HEADS_COLUMNS, text=("layer_name",))
    # Heads may have been measured all through training. The model is that of the best epoch, and where both were
    # measured at that epoch the file holds the model's.
    final = heads["epoch"] == row["best_epoch"]
    if not final.any() and not math.isnan(row["min_mad"]):
        raise InputError(f"{folder.heads} is damaged: it has no heads of epoch {row['best_epoch']}, the model's")
    was_followed = folder.read_config().measure_every > 0
    columns = {
        "heads": {name: values[final] for name, values in heads.items() if name != "epoch"},
        "layers": read_columns(folder.layers, LAYERS_COLUMNS, text=("layer_name",)),
        "history": read_columns(folder.path / "history.csv", EPOCH_COLUMNS),
        "course": heads if was_followed else {name: values[:0] for name, values in heads.items()},
    }
    return RunTables(row, columns)


def read_row(folder: RunFolder) -> dict[str, Any]:
    """The `RESULT_COLUMNS` of a complete run. What cannot be read is an `InputError` that names the file."""
    values = {**folder.read_result(), **folder.read_provenance()}
    try:
        values = dict.fromkeys(OF_LATER_VERSIONS) | values
        row = {name: values[_NAMED_OTHERWISE.get(name, name)] for name in RESULT_COLUMNS}
    except KeyError as error:
        raise InputError(f"{folder.path} is damaged: its result does not say {error}") from error
    for name, value in row.items():
        if not _is_result(name, value):
            raise InputError(f"{folder.path} is damaged: its result says {value!r} for {name}, not a valid number")
    # A model without heads has none that is the most local.
    return {name: math.nan if value is None else value for name, value in row.items()}


def _is_result(name: str, value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 2**63  # what a column of whole numbers holds
    return name not in WHOLE and (value is None or (type(value) is float and not math.isinf(value)))


def as_in_folder(row: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `read_row`: columns under the names that they have in a run folder's JSON."""
    named = {_NAMED_OTHERWISE.get(name, name): value for name, value in row.items()}
    return {name: None if math.isnan(value) else value for name, value in named.items()}


def read_columns(path: Path, columns: Sequence[str], text: Sequence[str] = ()) -> Columns:
    """The columns of a CSV file, compressed or not, digit for digit. Those of text stay text: a hash may look like a
    number, and a level may be called "none". Those of later versions may be missing."""
    check_file(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with reading_table(path), opened(path, "rt", encoding="utf-8", newline="") as file:
        return _columns(csv.reader(_lines(file), strict=True), columns, text)


def as_csv(table: pd.DataFrame, **options: Any) -> str:
    """The text of a CSV file that plain `pandas.read_csv` reads as it is: a column of words has a dash where there is
    none. Numbers that are missing are empty cells."""
    for name in table.select_dtypes(["object", "string"]).columns:
        is_missing = table[name].isna() | table[name].eq("")
        if is_missing.any() and any(isinstance(value, str) for value in table[name]):
            table = table.assign(**{name: table[name].astype(object).mask(is_missing, NO_WORD)})
    return str(table.to_csv(index=False, **options))


def check_label(label: str, whose: str) -> None:
    """Refuse a name of a level or condition that tables would lose."""
    if label in READ_AS_MISSING:
        raise InputError(f"{whose} is called {label!r}, which pandas reads as a missing value; give it another name")


@contextmanager
def reading_table(path: Path, way_out: str = "") -> Iterator[None]:
    """What is wrong with a CSV file is an `InputError` that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, OverflowError, csv.Error, EOFError, zlib.error) as error:
        # Not a number, or not UTF-8; too large a one; a compressed file that is cut short or changed.
        raise InputError(f"{path} is damaged: {' '.join(str(error).split())}{way_out}") from error


def _lines(file: IO[str]) -> Iterator[str]:
    """The lines of a file, if they are not too long and not too many."""
    for line in islice(iter(lambda: file.readline(LONGEST_LINE), ""), MOST_ROWS):
        if len(line) == LONGEST_LINE:
            raise ValueError(f"it has a line of more than {LONGEST_LINE} characters")
        yield line
    if file.readline(1):
        raise ValueError(f"it has more than {MOST_ROWS} rows")


def whole_rows(rows: Iterable[list[str]], header: Sequence[str]) -> list[list[str]]:
    """Those that are not empty; each must be as long as the first."""
    filled = [row for row in rows if row]
    if any(len(row) != len(header) for row in filled):
        raise ValueError("it has a row that is not as long as the first")
    return filled


def _columns(rows: Iterator[list[str]], columns: Sequence[str], text: Sequence[str]) -> Columns:
    header = next(rows, [])
    if absent := [name for name in columns if name not in (*header, *OF_LATER_VERSIONS)]:
        raise ValueError(f"it has no column {', '.join(absent)}")
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in columns}
    while some := list(islice(rows, _ROWS_AT_ONCE)):  # of a large file, the text is never there as a whole
        filled = whole_rows(some, header)
        by_place = list(zip(*filled, strict=True)) or [()] * len(header)
        for name, list_of_parts in parts.items():
            values = by_place[header.index(name)] if name in header else ("",) * len(filled)
            list_of_parts.append(_texts(values) if name in text else _numbers(values))
    joined = {
        name: np.concatenate(found) if found else np.empty(0, object if name in text else np.int64)
        for name, found in parts.items()
    }
    for name, column in joined.items():
        _check_numbers(name, column)
    return joined


def _check_numbers(name: str, values: NDArray[Any]) -> None:
    """Refuse what can be no result, layer or head, before memory is taken for it."""
    if name in RESULT_COLUMNS and np.isinf(values).any():
        raise ValueError(f"its column {name} holds an infinite number")
    if name in (*WHOLE, *MOST_COUNTED) and values.dtype != np.int64:
        raise ValueError(f"its column {name} holds a value that is not a whole number")
    if name in MOST_COUNTED and len(values) and not 0 <= values.min() <= values.max() < MOST_COUNTED[name]:
        raise ValueError(f"its column {name} holds numbers that are not from 0 to {MOST_COUNTED[name] - 1}")


def _texts(values: Sequence[str]) -> NDArray[np.object_]:
    same: dict[str, str] = {}  # names of layers come again and again, and are kept once
    return np.array([same.setdefault(value, value) for value in values], dtype=object)


def _numbers(values: Sequence[str]) -> NDArray[Any]:
    try:
        return np.array(list(map(int, values)), dtype=np.int64)
    except ValueError:
        return np.array([float(value) if value else math.nan for value in values], dtype=np.float64)


def result_problem(folder: RunFolder) -> str:
    """What is wrong with a complete folder, in words; nothing if it can be read."""
    try:
        read_run(folder)
    except InputError as error:
        return str(error)
    return ""


def make_ready(folder: RunFolder, config: RunConfig, report: Callable[[Path, str], None]) -> None:
    """Make a folder one that training starts from or continues; only for the runner that trains there.

    What is damaged is kept beside and done again; `report` is called with it and the reason. What belongs to another
    run, was written by a newer nearsight or cannot be touched is an `InputError` that names it.
    """
    if not folder.path.exists():
        return
    try:
        if problem := _config_problem(folder, config):
            report(folder.path, problem)
            _set_aside(folder.path)
            return
        if folder.is_complete and (problem := result_problem(folder)):
            report(folder.path / "provenance.json", problem)
            _set_aside(folder.path / "provenance.json")  # without it, the end of the run is done again
        if not folder.is_complete and (problem := _checkpoint_problem(folder, config)):
            report(folder.checkpoint, problem)
            _set_aside(folder.checkpoint)
    except OSError as error:
        raise InputError(f"{folder.path} cannot be continued: {error.strerror or error}") from error


def _config_problem(folder: RunFolder, config: RunConfig) -> str:
    path = folder.path / "config.json"
    check_file(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{path} is missing" if any(folder.path.glob("*.safetensors")) else ""
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        return f"{path} is damaged: {error}"
    try:
        folder.read_config()
    except InputError as error:
        schema = stored.get("schema") if isinstance(stored, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise
        return str(error)
    folder.check(config)
    return ""


def _checkpoint_problem(folder: RunFolder, config: RunConfig) -> str:
    try:
        stored = folder.read_checkpoint(config)
    except (InputError, KeyError) as error:
        return str(error)
    if stored is not None:
        folder.write_history(stored[0].history)  # which the end of a run does not write again
    return ""


def _set_aside(path: Path) -> None:
    """Rename a damaged file, so that its content can still be examined."""
    number = 1
    while (place := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(place)
