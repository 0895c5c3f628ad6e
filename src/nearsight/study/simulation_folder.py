"""A simulation on disk.

study.json       what was asked for: conditions with all their settings, and every cell; written first
plan.json        what the runs are to judge, and by which rules; written before the first of them
runs.csv         a row per cell that is done: its settings where conditions differ, its seed, what it gave
<table>.csv      further tables of the simulation, such as curves: condition, seed and more
provenance.json  code, libraries, machine and time of all runs
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nearsight.errors import InputError
from nearsight.files import STUDY, check_kind, check_output_folder, read_object, write_json, write_text
from nearsight.study.design import flat
from nearsight.study.plan import Plan
from nearsight.study.results import check_place, missing_parts
from nearsight.study.run_tables import as_csv, reading_table, whole_rows
from nearsight.study.simulation import RUNS, SCHEMA, Simulation, SimulationCell

DIGITS = "%.7g"
"""Of numbers in tables: all that single precision has."""
WAY_OUT = "; put back a whole one, or run the study in another folder"
_KEY = ["condition", "seed"]


@dataclass(frozen=True, eq=False)
class SimulationResults:
    """The cells of a simulation that are done."""

    name: str
    scale: str
    """full, or small: shrunk to test the path, and no result."""
    responses: dict[str, str]
    settings: dict[str, object]
    """What all conditions share: dotted name → value."""
    assumed: tuple[str, ...]
    configs: dict[str, Any]
    """Condition → all its settings, as JSON values."""
    levels: dict[str, dict[str, object]]
    """Condition → the settings that set it apart."""
    cells: tuple[SimulationCell, ...]
    """All that were asked for, done or not."""
    tables: dict[str, pd.DataFrame]
    """By name; each has the columns condition and seed. `runs` has a row per cell that is done."""
    plan: Plan | None = None
    """What was planned; None where that is not known."""

    @property
    def runs(self) -> pd.DataFrame:
        return self.tables[RUNS]

    @classmethod
    def read(cls, folder: Path) -> "SimulationResults":
        described = read_simulation(folder)
        cells = tuple(SimulationCell(**{name: cell[name] for name in _OF_A_CELL}) for cell in described["cells"])
        levels: dict[str, dict[str, object]] = described["levels"]
        settings = {name for each in levels.values() for name in each}
        return cls(
            name=described["name"],
            scale=described["scale"],
            responses=described["responses"],
            settings=described["settings"],
            assumed=tuple(described["assumed"]),
            configs=described["conditions"],
            levels=levels,
            cells=cells,
            tables=read_tables(folder, cells, settings=settings, responses=described["responses"]),
            plan=Plan.read(folder),
        )


class SimulationFolder:
    """The files of one simulation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, simulation: Simulation) -> None:
        """Refuse a folder that is another study's, or that nothing can be written to; nothing is changed."""
        check_output_folder(self.path)
        check_kind(self.path, STUDY)
        check_place(self.path, simulation.scale)
        if (self.path / "study.json").exists():
            self._check_same(simulation)
            self._read_certificates()
        elif (self.path / "runs.csv").exists():
            raise InputError(f"{self.path} holds runs.csv but no study.json; choose another --out")

    def claim(self, simulation: Simulation) -> None:
        """Make the folder this simulation's, or find that it already is. Cells it has of other seeds stay."""
        self.check(simulation)
        described = simulation.to_json()
        if (self.path / "study.json").exists():
            held, order = read_simulation(self.path), list(simulation.conditions)
            ours = {cell["run"] for cell in described["cells"]}
            described["cells"] += [cell for cell in held["cells"] if cell["run"] not in ours]
            described["cells"].sort(key=lambda cell: (order.index(cell["condition"]), cell["seed"]))
            if held == described:
                return
        write_json(self.path / "study.json", described)

    def done(self) -> set[str]:
        """The cells that are in runs.csv."""
        return set(SimulationResults.read(self.path).runs["run"]) if (self.path / "study.json").exists() else set()

    def add(self, condition: str, cells: Sequence[SimulationCell], found: Mapping[str, pd.DataFrame]) -> None:
        """Put what the cells of a condition gave beside what there is. runs.csv comes last: it says what is done."""
        results = SimulationResults.read(self.path)
        order = {(cell.condition, cell.seed): place for place, cell in enumerate(results.cells)}
        runs = found[RUNS].assign(run=found[RUNS]["seed"].map({cell.seed: cell.run for cell in cells}))
        for name, table in {**{name: table for name, table in found.items() if name != RUNS}, RUNS: runs}.items():
            here = table.assign(condition=condition)
            held = results.tables.get(name, here.iloc[:0])
            known = held["condition"].eq(condition) & held["seed"].isin(here["seed"])
            whole = pd.concat([each for each in (held[~known], here) if len(each)], ignore_index=True)
            place = [order[key] for key in zip(whole["condition"], whole["seed"], strict=True)]
            whole = whole.iloc[pd.Series(place).argsort(kind="stable")]
            self._write_table(name, whole, results.levels)

    def write_provenance(self, certificate: Mapping[str, Any]) -> None:
        """Add the certificate of this run of the command to those of earlier ones."""
        before = self._read_certificates()
        certificates = {
            what: [*(each for each in before.get(what, []) if each != value), value]
            for what, value in certificate.items()
        }
        runs = SimulationResults.read(self.path).runs
        counted = {"runs": len(runs), "wall_seconds": round(float(runs["wall_seconds"].sum()), 1)}
        write_json(self.path / "provenance.json", {**certificates, **counted})

    def _read_certificates(self) -> dict[str, list[Any]]:
        """What provenance.json says of earlier ones; nothing where there is none yet."""
        path, way_out = self.path / "provenance.json", "; remove it, or choose another --out"
        if not path.exists():
            return {}
        stored = read_object(path, missing=str(self.path), way_out=way_out)
        certificates = {what: value for what, value in stored.items() if what not in ("runs", "wall_seconds")}
        for what, value in certificates.items():
            if not isinstance(value, list):
                raise InputError(f"{path} is damaged: its {what} is no list{way_out}")
        return certificates

    def _write_table(self, name: str, table: pd.DataFrame, levels: Mapping[str, Mapping[str, object]]) -> None:
        first = ["condition"]
        if name == RUNS:
            varied = list(next(iter(levels.values())))
            for each in varied:
                table = table.assign(
                    **{each: pd.Series([levels[label][each] for label in table["condition"]], table.index)}
                )
            first = ["run", "condition", *varied]
        columns = [*first, "seed", *(each for each in table.columns if each not in (*first, "seed"))]
        write_text(self.path / f"{name}.csv", as_csv(table[columns], float_format=DIGITS))

    def _check_same(self, simulation: Simulation) -> None:
        """Name, scale, conditions and all settings must be the same; seeds may be others."""
        held, asked = read_simulation(self.path), simulation.to_json()
        for what in ("name", "scale"):
            if held[what] != asked[what]:
                words = f"{what}: {held[what]} there, {asked[what]} here"
                raise InputError(f"{self.path} holds another study ({words}); choose another --out")
        there, here = flat(held["conditions"]), flat(asked["conditions"])
        for name in dict.fromkeys((*there, *here)):
            if there.get(name) != here.get(name):
                words = f"{name}: {there.get(name)} there, {here.get(name)} here"
                raise InputError(f"{self.path} holds this study with other settings ({words}); choose another --out")


def is_simulation(folder: Path) -> bool:
    """Whether the folder's study.json describes a simulation, and not a study of trainings."""
    try:
        described = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(described, dict) and described.get("kind") == "simulation"


def read_simulation(folder: Path) -> dict[str, Any]:
    """What study.json says of a simulation."""
    path = folder / "study.json"
    if not is_simulation(folder):
        raise InputError(f"{folder} holds no simulation: its study.json is missing, damaged or of another kind")
    described = read_object(path, missing=str(folder))
    if described.get("schema") != SCHEMA:
        raise InputError(f"{path} has schema {described.get('schema')}, but this nearsight reads {SCHEMA}")
    if missing := missing_parts(described, _OF_A_SIMULATION):
        raise InputError(f"{path} is damaged: it does not say its {missing}")
    if missing := missing_parts(described["levels"], dict.fromkeys(described["conditions"], dict)):
        raise InputError(f"{path} is damaged: it does not say the levels of {missing}")
    for number, cell in enumerate(described["cells"]):
        if missing := missing_parts(cell, _OF_A_CELL):
            raise InputError(f"{path} is damaged: cell {number} does not say its {missing}")
        if cell["condition"] not in described["conditions"]:
            raise InputError(f"{path} is damaged: cell {number} is of {cell['condition']!r}, which is not a condition")
    return described


_OF_A_SIMULATION: dict[str, type] = {
    **{"name": str, "scale": str, "responses": dict, "settings": dict, "assumed": list},
    **{"conditions": dict, "levels": dict, "cells": list},
}
_OF_A_CELL: dict[str, type] = {"condition": str, "seed": int, "run": str}


def read_tables(
    folder: Path, cells: Iterable[SimulationCell], *, settings: Collection[str], responses: Iterable[str]
) -> dict[str, pd.DataFrame]:
    """The rows of all cells that are done, by the table's name. `settings` are the columns of `runs` that may hold
    words. Damage is refused: a row that is cut short, or of no cell of the study, is an error that names the
    file."""
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
    # runs.csv is written last: a command that was killed before that leaves rows of cells that are not done.
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
    # Earlier versions let a condition be called NA.
    return pd.read_csv(io.StringIO(text), dtype={"run": str, "condition": str}, keep_default_na=False, na_values=[""])


def _check_numbers(table: pd.DataFrame, settings: Collection[str]) -> None:
    """Columns are of numbers or of words."""
    if not table.empty and not pd.api.types.is_integer_dtype(table["seed"]):
        raise ValueError("it has a seed that is not a whole number")
    for name in table.columns.difference(["run", *_KEY, *settings]):
        if not pd.api.types.is_numeric_dtype(table[name]):
            is_number = pd.to_numeric(table[name], errors="coerce").notna()
            if is_number.any():
                word = table.loc[~is_number & table[name].notna(), name].iloc[0]
                raise ValueError(f"its column {name} holds {word!r} among numbers")


def _check_cells(table: pd.DataFrame, run_of: Mapping[tuple[str, int], str]) -> None:
    for condition, seed in dict.fromkeys(_cells(table)):
        if (condition, seed) not in run_of:
            raise ValueError(f"it has a row of {condition}, seed {seed}, which is not a cell of the study")
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
