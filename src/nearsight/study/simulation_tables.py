"""The tables of a simulation, from its folder. Nothing damaged is believed: a row that is cut short, or that is of no
cell of the study, is an error that names the file."""

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from nearsight.study.run_tables import reading_table, whole_rows
from nearsight.study.simulation import RUNS, SimulationCell

WAY_OUT = "; put back a whole one, or run the study in another folder"
_KEY = ["condition", "seed"]


def read_tables(
    folder: Path, cells: Iterable[SimulationCell], *, settings: Collection[str], responses: Iterable[str]
) -> dict[str, pd.DataFrame]:
    """The rows of all cells that are done, by the table's name. `settings` are the columns of `runs` that may hold
    words."""
    run_of = {(cell.condition, cell.seed): cell.run for cell in cells}
    needed = {RUNS: ("run", *_KEY, *responses, "wall_seconds")}
    tables = {}
    for path in sorted(folder.glob("*.csv")):
        with reading_table(path, WAY_OUT):
            tables[path.stem] = _read(path, needed.get(path.stem, tuple(_KEY)))
            _check_numbers(tables[path.stem], settings)
            _check_cells(tables[path.stem], run_of)
    runs = tables.setdefault(RUNS, pd.DataFrame(columns=["run", *_KEY]))
    for name, table in tables.items():
        with reading_table(folder / f"{name}.csv", WAY_OUT):
            _check_complete(table, runs)
    # runs.csv is written last: whoever was killed before that has left rows of cells that are not done.
    done = set(_cells(runs))
    return {name: table.loc[[cell in done for cell in _cells(table)]] for name, table in tables.items()}


def _read(path: Path, needed: Sequence[str]) -> pd.DataFrame:
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):  # a number without its last digits is a number
        raise ValueError("its last row is cut short")
    rows = csv.reader(io.StringIO(text), strict=True)
    header = next(rows, [])
    if absent := [name for name in needed if name not in header]:
        raise ValueError(f"it has no column {', '.join(absent)}")
    whole_rows(rows, header)
    # A condition may be called NA.
    return pd.read_csv(io.StringIO(text), dtype={"run": str, "condition": str}, keep_default_na=False, na_values=[""])


def _check_numbers(table: pd.DataFrame, settings: Collection[str]) -> None:
    """Columns are of numbers or of words."""
    if not table.empty and not pd.api.types.is_integer_dtype(table["seed"]):
        raise ValueError("it has a seed that is no whole number")
    for name in table.columns.difference(["run", *_KEY, *settings]):
        if not pd.api.types.is_numeric_dtype(table[name]):
            is_number = pd.to_numeric(table[name], errors="coerce").notna()
            if is_number.any():
                word = table.loc[~is_number & table[name].notna(), name].iloc[0]
                raise ValueError(f"its column {name} holds {word!r} among numbers")


def _check_cells(table: pd.DataFrame, run_of: Mapping[tuple[str, int], str]) -> None:
    for condition, seed in dict.fromkeys(_cells(table)):
        if (condition, seed) not in run_of:
            raise ValueError(f"it has a row of {condition}, seed {seed}, which is no cell of the study")
    if "run" in table:
        if table.duplicated(_KEY).any():
            raise ValueError("it has two rows of one cell")
        for run, cell in zip(table["run"], _cells(table), strict=True):
            if run != run_of[cell]:
                raise ValueError(f"it has run {run} of {cell[0]}, seed {cell[1]}, which is {run_of[cell]}")


def _check_complete(table: pd.DataFrame, runs: pd.DataFrame) -> None:
    """Whatever is done is in all tables, and no seed of a condition has fewer rows than another."""
    counts = Counter(_cells(table))
    most: Counter[str] = Counter()
    for condition, seed in _cells(runs):
        most[condition] = max(most[condition], counts[condition, seed])
    for condition, seed in _cells(runs):
        if (count := counts[condition, seed]) < max(most[condition], 1):
            needed = most[condition] or "some"
            raise ValueError(f"it has {count} rows of {condition}, seed {seed}, but {needed} are needed")


def _cells(table: pd.DataFrame) -> list[tuple[str, int]]:
    """Condition and seed of each row."""
    return list(zip(table["condition"], table["seed"], strict=True))
