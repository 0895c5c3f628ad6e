"""The scores of probed models as a table, on disk and off it.

probes.csv    a row per model and score
probes.json   what the models have in common: the study they are of, and its scale
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from nearsight.errors import InputError
from nearsight.files import check_file, read_object, write_json, write_text
from nearsight.report.conditions import SMALL
from nearsight.report.tables import records
from nearsight.study.plan import Plan
from nearsight.study.results import COURSE_COLUMNS, HEAD_COLUMNS, HISTORY_COLUMNS, StudyResults, missing_parts
from nearsight.study.run_tables import NO_WORD, as_csv
from nearsight.study.statistics import Estimate

SCHEMA = 1
USUAL_K = 20
"""Of k-NN, where one number has to stand for all: DINO's choice."""
_TITLES = {"linear": "linear", "retrieve_miou": "retrieval mIoU", "segment_miou": "segmentation mIoU"}
"""Name of a score → how tables and figures call it."""
_KNN = "knn_"
"""How the names of the others begin, which end in k."""


def knn_measure(k: int) -> str:
    return f"{_KNN}{k}"


def is_measure(name: str) -> bool:
    return name in _TITLES or re.fullmatch(rf"{_KNN}[0-9]{{1,9}}", name) is not None


def title_of(measure: str) -> str:
    """In words: knn_20 is "k-NN, k = 20"."""
    return f"k-NN, k = {measure.removeprefix(_KNN)}" if measure.startswith(_KNN) else _TITLES[measure]


def ordered(measures: Iterable[str]) -> list[str]:
    """k-NN by k, then linear, retrieval and segmentation."""
    known = set(measures)
    knn = sorted((name for name in known if name.startswith(_KNN)), key=lambda name: int(name.removeprefix(_KNN)))
    return [*knn, *(name for name in _TITLES if name in known)]


def main_measures(measures: Iterable[str]) -> list[str]:
    """One of each probe; of k-NN that of the usual k or, where it is not there, of the smallest."""
    names = ordered(measures)
    knn = [name for name in names if name.startswith(_KNN)]
    kept = [knn_measure(USUAL_K)] if knn_measure(USUAL_K) in knn else knn[:1]
    return [*kept, *names[len(knn) :]]


@dataclass(frozen=True, kw_only=True)
class ProbedModel:
    """Whose features were probed."""

    model: str
    """Its name for people; no two share one."""
    condition: str = ""
    """Empty for a model that stands for itself."""
    seed: int | None = None
    num_parameters: int
    image_size: int
    """Side of the images it was made for, in pixels; the longer one."""
    trained_on: str = ""
    """The data set of the run it is of, if it is of one."""
    min_mad: float | None = None
    """Likewise: the distance of its most local head."""
    epoch_seconds: float | None = None
    """Likewise: how long an epoch took, in the middle of them. Runs that train as one have the time of all together."""


SCORE_COLUMNS = ("probe", "data", "measure", "value", "low", "high", "num_images", "identity")
COLUMNS = (*(field.name for field in fields(ProbedModel)), *SCORE_COLUMNS)
_NUMBERS = {
    **{"seed": "Int64", "num_parameters": "int64", "image_size": "int64", "num_images": "int64"},
    **{"value": "float64", "low": "float64", "high": "float64"},
    **dict.fromkeys(OF_RUNS := ("min_mad", "epoch_seconds"), "float64"),
}
"""Columns of numbers; those of runs are not in tables of models that are of none, nor in older ones."""

_MAY_BE_EMPTY = ("condition", "trained_on")


@dataclass(frozen=True, eq=False, kw_only=True)
class ProbeResults:
    """The scores of some models."""

    name: str
    """Of the study that the models are of, or of the models together."""
    scale: str
    """full, or small: shrunk to test the path, and no result."""
    planned: tuple[str, ...]
    """The conditions of the study; none where the models are of none."""
    rows: pd.DataFrame
    """A row per model and score: `COLUMNS`. Scores are shares; low and high are the ends of 95 % intervals over test
    images, NaN where there are none."""
    plan: Plan | None = None
    """What the scores were to judge; None where that is not known."""

    @classmethod
    def of(
        cls,
        found: Sequence[tuple[ProbedModel, Sequence[Mapping[str, Any]]]],
        *,
        name: str,
        scale: str = "full",
        planned: tuple[str, ...] = (),
        plan: Plan | None = None,
    ) -> "ProbeResults":
        """Of models, each with its scores (`SCORE_COLUMNS`)."""
        rows = pd.DataFrame(
            [{**asdict(model), **score} for model, scores in found for score in scores], columns=list(COLUMNS)
        )
        return cls(name=name, scale=scale, planned=planned, rows=rows.astype(_NUMBERS), plan=plan)

    @classmethod
    def read(cls, folder: Path) -> "ProbeResults":
        """What `write` put there."""
        about = read_object(folder / "probes.json", missing=f"{folder} holds no probes")
        if missing := missing_parts(about, {"schema": int, "name": str, "scale": str, "planned": list}):
            raise InputError(f"{folder / 'probes.json'} is damaged: it does not say its {missing}")
        if about["schema"] > SCHEMA:
            raise InputError(
                f"{folder / 'probes.json'} has schema {about['schema']}, but this nearsight reads up to {SCHEMA}; "
                "update nearsight"
            )
        try:
            # As text first: a model may be called "none", and no digit may get lost.
            check_file(folder / "probes.csv")
            table = pd.read_csv(folder / "probes.csv", dtype=str, keep_default_na=False)
            rows = table.assign(**{name: "" for name in OF_RUNS if name not in table})[list(COLUMNS)]
            rows = rows.assign(**{name: rows[name].replace("", None) for name in _NUMBERS}).astype(_NUMBERS)
            rows = rows.assign(**{name: rows[name].replace(NO_WORD, "") for name in _MAY_BE_EMPTY})
            if unknown := [name for name in rows["measure"] if not is_measure(name)]:
                raise ValueError(f"{unknown[0]!r} is not a measure")
            planned, plan = tuple(about["planned"]), Plan.read(folder)
            return cls(name=about["name"], scale=about["scale"], planned=planned, rows=rows, plan=plan)
        except FileNotFoundError as error:
            raise InputError(f"{folder} holds no probes: probes.csv is missing") from error
        except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:  # no table, or another
            raise InputError(f"the probes in {folder} are damaged: {' '.join(str(error).split())}") from error

    def write(self, folder: Path) -> tuple[Path, ...]:
        about, table = folder / "probes.json", folder / "probes.csv"
        write_json(about, {"schema": SCHEMA, "name": self.name, "scale": self.scale, "planned": list(self.planned)})
        unknown = [name for name in OF_RUNS if self.rows[name].isna().all()]
        write_text(table, as_csv(self.rows.drop(columns=unknown)))
        return about, table

    @property
    def measures(self) -> list[str]:
        return ordered(self.rows["measure"])

    @property
    def models(self) -> list[ProbedModel]:
        names = [field.name for field in fields(ProbedModel)]
        rows = records(self.rows[names].drop_duplicates("model"))
        found = []
        for row in rows:
            known: dict[str, Any] = {name: None if pd.isna(value) else value for name, value in row.items()}
            known["seed"] = None if known["seed"] is None else int(known["seed"])
            found.append(ProbedModel(**known))
        return found

    def scores(self, measure: str) -> dict[str, Estimate]:
        """Model → its score, with the interval over test images."""
        rows = self.rows[self.rows["measure"] == measure]
        ends = zip(rows["value"], rows["low"], rows["high"], strict=True)
        estimates = [Estimate(value=float(value), low=float(low), high=float(high)) for value, low, high in ends]
        return dict(zip(rows["model"], estimates, strict=True))

    @property
    def scale_notes(self) -> list[str]:
        return [] if self.scale == "full" else [SMALL]

    @property
    def num_conditions(self) -> int:
        return self.rows.loc[self.rows["condition"] != "", "condition"].nunique()

    def as_study(self) -> StudyResults:
        """The models with a condition, for all that compares conditions over seeds: a run each, a column per score, and
        what is known of the run that a model is of."""
        return self._study

    @cached_property
    def _study(self) -> StudyResults:
        known = self.rows[self.rows["condition"] != ""].astype({"seed": "int64"})
        runs = known.pivot_table(
            index=["model", "condition", "seed"], columns="measure", values="value", sort=False
        ).reset_index()
        of_runs = known.drop_duplicates("model").set_index("model")[list(OF_RUNS)].dropna(axis=1, how="all")
        runs = runs.join(of_runs, on="model")
        conditions = list(dict.fromkeys([*self.planned, *runs["condition"]]))
        present = [label for label in conditions if label in set(runs["condition"])]
        return StudyResults(
            name=f"{self.name}, probed",
            factors={"model": tuple(present)},
            runs=runs.rename(columns={"model": "run"}).assign(model=runs["condition"]),
            heads=pd.DataFrame(columns=list(HEAD_COLUMNS)),
            history=pd.DataFrame(columns=list(HISTORY_COLUMNS)),
            course=pd.DataFrame(columns=list(COURSE_COLUMNS)),
            scale=self.scale,
            settings={},
            assumed=(),
            planned=tuple(conditions),
        )

    def as_json(self) -> dict[str, Any]:
        rows = self.rows.astype(object).where(self.rows.notna(), None)
        return {"name": self.name, "scale": self.scale, "results": records(rows)}
