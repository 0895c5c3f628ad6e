"""What the charts of a study's page draw."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nearsight.report.conditions import FACTOR_NAMES, ordered_conditions
from nearsight.report.figures.style import MODEL_COLOURS
from nearsight.report.page.chart_data import course_data, groups_data, heads_data, history_data
from nearsight.report.page.packing import columns, places
from nearsight.report.tables import Table
from nearsight.study.results import StudyResults

MOST_ROWS = 40_000
"""Of epochs, and of heads over epochs: about a megabyte each."""


def of_study(results: StudyResults, effects: Table | None) -> dict[str, Any]:
    """Every condition is a group, every complete run of it one of its runs; `effects` is the table of that name."""
    conditions = ordered_conditions(results)
    runs = list(results.runs["run"])
    history = results.history[results.history["run"].isin(runs)]
    course = _within_budget(results.course[results.course["run"].isin(runs)], results.runs)
    return {
        "kind": "study",
        "palette": MODEL_COLOURS,
        "groups": groups_data(conditions),
        "runs": {
            "group": places(results.runs["condition"], conditions),
            "seed": results.runs["seed"].tolist(),
            "factors": {name: results.runs[name].tolist() for name in results.factors},
        },
        "heads": heads_data(_numbered(results.heads[results.heads["run"].isin(runs)], runs)),
        "history": history_data(_numbered(_fewer_epochs(history), runs)) if len(history) else None,
        "course": course_data(_numbered(course, runs)) if len(course) else None,
        "effects": None if effects is None else _effects_data(effects),
        "uniform": None,
    }


def _effects_data(table: Table) -> dict[str, list[Any]]:
    spelt = [" × ".join(FACTOR_NAMES.get(name, name) for name in term.split(" × ")) for term in table.numbers["term"]]
    return columns(table.numbers.assign(term=spelt), ("response", "term", "effect", "low", "high"))


def _numbered(frame: pd.DataFrame, runs: Sequence[str]) -> pd.DataFrame:
    """With the places of the runs for their hashes."""
    return frame.assign(run=np.array(places(frame["run"], runs), dtype=np.int64))


def _fewer_epochs(history: pd.DataFrame) -> pd.DataFrame:
    """All epochs where there is room; else every other, third, … of each run, and the last."""
    step = -(-len(history) // MOST_ROWS)
    if step <= 1:
        return history
    last = history.groupby("run")["epoch"].transform("max")
    return history[(history["epoch"] % step == 1) | (history["epoch"] == last)]


def _within_budget(course: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """All runs and epochs where there is room; else the first seed of each condition, then fewer epochs."""
    if len(course) > MOST_ROWS:
        measured = runs[runs["run"].isin(course["run"].unique())]
        course = course[course["run"].isin(measured.drop_duplicates("condition")["run"])]
    epochs = np.sort(course["epoch"].unique())
    step = -(-len(course) // MOST_ROWS)
    kept = epochs if step <= 1 else np.union1d(epochs[::step], epochs[-1:])
    return course[course["epoch"].isin(kept)]
