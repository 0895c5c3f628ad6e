"""What heads are worth to the runs of a study, as tables: on disk and off it, and what each run's numbers say.

ablated.json                                                 the study, and the grid of patches that its runs see
ablation-heads.csv, ablation-reach.csv, ablation-removal.csv  a row per run and variant of it (`nearsight ablate`)
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.files import ABLATED, check_file, read_object, write_json, write_text
from nearsight.metrics import next_patch_distance
from nearsight.report.ablation import SMALL, TABLES, Kind
from nearsight.report.own_patch import OWN_PATCH
from nearsight.study.plan import Plan
from nearsight.study.results import COURSE_COLUMNS, HEAD_COLUMNS, HISTORY_COLUMNS, StudyResults, missing_parts
from nearsight.study.run_tables import as_csv

SCHEMA = 1
ALL = "all"
"""In place of a layer: all of them."""
OF_RUN = {"run": "str", "condition": "str", "seed": "int64", "num_images": "int64", "base": "float64"}
"""Columns that say whose row it is: of how many images, and the accuracy of the unchanged model on them."""
_LOSS = dict.fromkeys(("accuracy", "loss", "loss_low", "loss_high"), "float64")
_OWN: dict[Kind, dict[str, str]] = {
    "head": {"plan": "str", "layer": "int64", "head": "int64", **_LOSS, "mad": "float64", "entropy": "float64"},
    "reach": {"layer": "str", "reach": "float64", **_LOSS},
    "removal": {"order": "str", "removed": "int64", **_LOSS},
}
COLUMNS = {kind: {**OF_RUN, **own} for kind, own in _OWN.items()}
"""Kind → the columns of its table, and their types."""
NEEDED, RANK, RANK_WITHIN, AREA = "reach_needed", "rank", "rank_within", "area"
"""Of a run (`AblatedRuns.as_study`)."""


def changed(study: str) -> str:
    """The name under which questions about a study's changed heads are declared (`report_on`)."""
    return f"{study}, heads changed"


@dataclass(frozen=True, eq=False, kw_only=True)
class AblatedRuns:
    """The runs of a study, each unchanged and in all its variants."""

    name: str
    """Of the study."""
    scale: str
    planned: tuple[str, ...]
    """Its conditions, done or not."""
    grid: tuple[int, int]
    """Rows and columns of the patches that its runs see."""
    tables: Mapping[Kind, pd.DataFrame]
    """Kind → `COLUMNS`. A loss is of the unchanged model's accuracy; its ends are of a 95 % interval over images."""
    plan: Plan | None = None

    @classmethod
    def none_of(cls, name: str, scale: str, planned: tuple[str, ...], grid: tuple[int, int]) -> "AblatedRuns":
        """Of a study before anything is asked."""
        tables = {kind: pd.DataFrame(columns=list(columns)).astype(columns) for kind, columns in COLUMNS.items()}
        return cls(name=name, scale=scale, planned=planned, grid=grid, tables=tables)

    @classmethod
    def read(cls, folder: Path) -> "AblatedRuns":
        """What `write` put there."""
        path = folder / ABLATED
        about = read_object(path, missing=f"{folder} holds no study whose heads were changed")
        if missing := missing_parts(about, {"schema": int, "name": str, "scale": str, "planned": list, "grid": list}):
            raise InputError(f"{path} is damaged: it does not say its {missing}")
        if about["schema"] > SCHEMA:
            raise InputError(f"{path} has schema {about['schema']}, but this nearsight reads up to {SCHEMA}; update it")
        tables = {}
        for kind, columns in COLUMNS.items():
            table = folder / f"{TABLES[kind]}.csv"
            try:
                check_file(table)
                rows = pd.read_csv(table, dtype=str, keep_default_na=False)[list(columns)]
                numbers = {name: rows[name].replace("", None) for name, kind_of in columns.items() if kind_of != "str"}
                tables[kind] = rows.assign(**numbers).astype(columns)
            except (FileNotFoundError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
                raise InputError(f"{table} is damaged: {' '.join(str(error).split())}") from error
        rows_of_grid, columns_of_grid = map(int, about["grid"])
        return cls(
            name=about["name"],
            scale=about["scale"],
            planned=tuple(about["planned"]),
            grid=(rows_of_grid, columns_of_grid),
            tables=tables,
            plan=Plan.read(folder),
        )

    def write(self, folder: Path) -> tuple[Path, ...]:
        about = {"schema": SCHEMA, "name": self.name, "scale": self.scale}
        write_json(folder / ABLATED, {**about, "planned": list(self.planned), "grid": list(self.grid)})
        paths = [folder / ABLATED]
        for kind, table in self.tables.items():
            paths.append(folder / f"{TABLES[kind]}.csv")
            write_text(paths[-1], as_csv(table))
        return tuple(paths)

    def joined(self, kind: Kind, rows: pd.DataFrame) -> "AblatedRuns":
        """With rows of a kind beside those that are there; of a run that has some, the new ones alone."""
        own = self.tables[kind]
        kept = own[~own["run"].isin(rows["run"])]
        both = pd.concat([kept, rows[list(COLUMNS[kind])].astype(COLUMNS[kind])], ignore_index=True)
        # In the order of the study, whatever was asked when; the variants of a run stay in theirs.
        place = {label: number for number, label in enumerate(self.planned)}
        order = both.assign(place=both["condition"].map(place)).sort_values(["place", "seed"], kind="stable").index
        return replace(self, tables={**self.tables, kind: both.loc[order].reset_index(drop=True)})

    def asked(self, kind: Kind) -> frozenset[str]:
        """The runs that have rows of a kind."""
        return frozenset(self.tables[kind]["run"])

    @property
    def own_patch_bound(self) -> float:
        """The distance below which a head is an own-patch head."""
        return OWN_PATCH * next_patch_distance(self.grid)

    def heads(self, plan: str) -> pd.DataFrame:
        """The rows of single heads that follow a plan."""
        table = self.tables["head"]
        return table[table["plan"] == plan]

    def needed(self) -> pd.DataFrame:
        """Per run and layer: the smallest reach at which it loses less than 1 point; where there is none, the diagonal
        of the grid, which is no limit."""
        table, no_limit = self.tables["reach"], math.hypot(*(side - 1 for side in self.grid))
        single = table[table["layer"] != ALL].astype({"layer": "int64"})
        enough = single.assign(**{NEEDED: single["reach"].where(single["loss"] < SMALL)})
        found = enough.groupby(["run", "condition", "seed", "layer"], sort=False)[NEEDED].min()
        return found.fillna(no_limit).reset_index()

    def areas(self) -> pd.DataFrame:
        """Per run and order of removal: the mean accuracy while all heads are removed, by trapezoids."""
        rows = [
            {**dict(zip(("run", "condition", "seed", "order"), key, strict=True)), AREA: _area(curve)}
            for key, curve in self.tables["removal"].groupby(["run", "condition", "seed", "order"], sort=False)
        ]
        return pd.DataFrame(rows, columns=["run", "condition", "seed", "order", AREA])

    def as_study(self) -> StudyResults:
        """For all that compares conditions over seeds: a row per run."""
        return self._study

    @cached_property
    def _study(self) -> StudyResults:
        runs = pd.concat([table[["run", "condition", "seed"]] for table in self.tables.values()])
        runs = runs.drop_duplicates("run").set_index("run")
        runs = runs.join(self.needed().groupby("run")[NEEDED].mean())
        runs = runs.join(pd.DataFrame(dict(_ranks(self.heads("zero"))), index=[RANK, RANK_WITHIN]).T)
        runs = runs.join(_beside_random(self.areas())).rename_axis("run").reset_index()
        present = tuple(label for label in self.planned if label in set(runs["condition"]))
        return StudyResults(
            name=changed(self.name),
            factors={"trained": present},
            runs=runs.assign(trained=runs["condition"]),
            heads=pd.DataFrame(columns=list(HEAD_COLUMNS)),
            history=pd.DataFrame(columns=list(HISTORY_COLUMNS)),
            course=pd.DataFrame(columns=list(COURSE_COLUMNS)),
            scale=self.scale,
            settings={},
            assumed=(),
            planned=self.planned,
            plan=self.plan,
        )


def _area(curve: pd.DataFrame) -> float:
    removed = np.array([0, *curve["removed"]]) / curve["removed"].max()
    return float(np.trapezoid([curve["base"].iloc[0], *curve["accuracy"]], removed))


def _ranks(heads: pd.DataFrame) -> Iterable[tuple[str, list[float]]]:
    """Of every run: Spearman's correlation of MAD and loss over its heads, and with ranks taken within layers."""
    for run, rows in heads.groupby("run", sort=False):
        both = rows[["mad", "loss"]]
        within = both.groupby(rows["layer"]).rank()
        within -= within.groupby(rows["layer"]).transform("mean")
        yield str(run), [float(ranked["mad"].corr(ranked["loss"])) for ranked in (both.rank(), within)]


def _beside_random(areas: pd.DataFrame) -> "pd.Series[float]":
    """Per run: the area with the most local heads removed first, less the mean of those in random order."""
    by_order = areas.pivot_table(index="run", columns="order", values=AREA, sort=False)
    random = [name for name in by_order if str(name).startswith("random")]
    first = by_order.get("most local first", pd.Series(dtype=float))
    return (first - by_order[random].mean(axis=1)).rename(AREA)


def rows_of(frame: pd.DataFrame, kind: Kind, about: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of `Ablation.to_frame` as rows of a run, which `about` describes (`OF_RUN`)."""
    return frame.assign(**about)[list(COLUMNS[kind])].astype(COLUMNS[kind])
