"""What the charts of a page draw: groups (models, or a study's conditions), their runs, and those' heads and epochs.

Numbers are there once, in columns, and with exactly the digits that the page prints.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures.looks import PALETTE, looks
from nearsight.report.inputs import ModelHeads, shorten

if TYPE_CHECKING:  # charts of models do without
    from nearsight.report.tables import Table
    from nearsight.study.results import StudyResults

_HEAD_NUMBERS = ("layer", "head", "mad", "mad_std", "entropy", "entropy_std")
_EPOCH_NUMBERS = ("epoch", "train_loss", "val_loss", "val_acc")
_COURSE_NUMBERS = ("epoch", "layer", "head", "mad", "entropy")
_LABEL_LIMIT = 60
"""Characters of a name in a chart; whole names are in the tables."""
_LINE_WIDTH = 1.8
_DIGITS = 4
"""Decimals of distances, entropies, losses and accuracies: what is printed in the page is then what was rounded here,
and never a rounding of a rounding."""
_MOST_ROWS = 40_000
"""Of epochs, and of heads over epochs: about a megabyte each."""
# The same markers as in the figures, in Vega's words.
_MARKERS = {
    "o": "circle",
    "^": "triangle-up",
    "s": "square",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "M-1,-.5L-.5,-1L0,-.5L.5,-1L1,-.5L.5,0L1,.5L.5,1L0,.5L-.5,1L-1,.5L-.5,0Z",
    "p": "triangle-right",
    "*": "triangle-left",
}


# What stands under the charts.
PROFILES_OF_MODELS = (
    "The heads of each layer, from the most local to the least. Bands: ± one standard deviation over images. Dots: "
    "selected heads. Layers count from 0."
)
PROFILES_OF_STUDY = (
    "The heads of each layer, from the most local to the least, means over seeds. Bands: from the smallest to the "
    "largest seed. Dots: selected heads. Layers count from 0."
)
PLANE = (
    "Each point is a head. Lower left: it attends to a few patches close by. Upper right: far and everywhere. Drag "
    "over the plane, or type ranges, to select heads here and in all other charts; with the chart in focus, the arrow "
    "keys step through the heads. Layers and heads count from 0."
)
HEATMAPS_OF_MODELS = (
    "Bright is far (top) or spread out (bottom), dark is local or focused, on the same two colour scales for all "
    "models. Layers and heads count from 0."
)
HEATMAPS_OF_STUDY = (
    "Bright is far (top) or spread out (bottom), dark is local or focused, on the same two colour scales for all "
    "conditions. With several seeds a column is a rank by distance, from 1, and a cell the mean over seeds. Layers "
    "count from 0."
)
TRAINING = "Training losses compare only where augmentation and label smoothing are the same."
EFFECTS = (
    "Effects with their 95 % intervals: the mean with a factor minus the mean without it; for an interaction, half of "
    "what one factor changes in the other's effect. Grey: the interval holds 0."
)


def of_models(models: Sequence[ModelHeads], grid_size: tuple[int, int] | None) -> dict[str, Any]:
    """Every model is a group of one run."""
    reported = [model.measured().assign(run=place) for place, model in enumerate(models)]
    epochs = [model.history.assign(run=place) for place, model in enumerate(models) if model.history is not None]
    during = [model.heads.assign(run=place) for place, model in enumerate(models) if model.heads["epoch"].nunique() > 1]
    return {
        "kind": "models",
        "palette": PALETTE,
        "groups": _groups_data([model.label for model in models]),
        "runs": {"group": list(range(len(models))), "seed": [None] * len(models)},
        "heads": _heads_data(pd.concat(reported)),
        "history": _history_data(pd.concat(epochs)) if epochs else None,
        "course": _course_data(pd.concat(during)) if during else None,
        "uniform": None if grid_size is None else uniform_attention_distance(grid_size),
    }


def _groups_data(labels: Sequence[str]) -> list[dict[str, Any]]:
    groups = []
    for label, style in looks(labels).items():
        dash = [] if style.dash == "solid" else [round(_LINE_WIDTH * length, 1) for length in style.dash[1]]
        marker = _MARKERS[style.marker]
        look = {"colour": style.colour, "dash": dash, "marker": marker}
        groups.append({"label": label, "short": shorten(label, _LABEL_LIMIT), **look})
    return groups


def _heads_data(frame: pd.DataFrame) -> dict[str, list[Any]]:
    there = frame[frame["mad"].notna() & frame["entropy"].notna()]
    return _columns(there.sort_values(["run", "layer", "head"]), ("run", *_HEAD_NUMBERS))


def _history_data(frame: pd.DataFrame) -> dict[str, list[Any]]:
    return _columns(frame.sort_values(["run", "epoch"]), ("run", *_EPOCH_NUMBERS))


def _course_data(frame: pd.DataFrame) -> dict[str, list[Any]]:
    there = frame[frame["mad"].notna() & frame["entropy"].notna()]
    return _columns(there.sort_values(["epoch", "run", "layer", "head"]), ("run", *_COURSE_NUMBERS))


def of_study(results: "StudyResults", effects: "Table | None") -> dict[str, Any]:
    """Every condition is a group, every complete run of it one of its runs; `effects` is the table of that name."""
    from nearsight.report.conditions import ordered_conditions

    conditions = ordered_conditions(results)
    runs = list(results.runs["run"])
    history = results.history[results.history["run"].isin(runs)]
    course = _within_budget(results.course[results.course["run"].isin(runs)], results.runs)
    return {
        "kind": "study",
        "palette": PALETTE,
        "groups": _groups_data(conditions),
        "runs": {
            "group": _places(results.runs["condition"], conditions),
            "seed": results.runs["seed"].tolist(),
            "factors": {name: results.runs[name].tolist() for name in results.factors},
        },
        "heads": _heads_data(_numbered(results.heads[results.heads["run"].isin(runs)], runs)),
        "history": _history_data(_numbered(_fewer_epochs(history), runs)) if len(history) else None,
        "course": _course_data(_numbered(course, runs)) if len(course) else None,
        "effects": None if effects is None else _effects_data(effects),
        "uniform": None,
    }


def _effects_data(table: "Table") -> dict[str, list[Any]]:
    from nearsight.report.study_tables import spelt

    terms = [spelt(term) for term in table.numbers["term"]]
    return _columns(table.numbers.assign(term=terms), ("response", "term", "effect", "low", "high"))


def _numbered(frame: pd.DataFrame, runs: Sequence[str]) -> pd.DataFrame:
    """With the places of the runs for their hashes."""
    return frame.assign(run=np.array(_places(frame["run"], runs), dtype=np.int64))


def _fewer_epochs(history: pd.DataFrame) -> pd.DataFrame:
    """All epochs where there is room; else every other, third, … of each run, and the last."""
    step = -(-len(history) // _MOST_ROWS)
    if step <= 1:
        return history
    last = history.groupby("run")["epoch"].transform("max")
    return history[(history["epoch"] % step == 1) | (history["epoch"] == last)]


def _within_budget(course: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """All runs and epochs where there is room; else the first seed of each condition, then fewer epochs."""
    if len(course) > _MOST_ROWS:
        measured = runs[runs["run"].isin(course["run"].unique())]
        course = course[course["run"].isin(measured.drop_duplicates("condition")["run"])]
    epochs = np.sort(course["epoch"].unique())
    step = -(-len(course) // _MOST_ROWS)
    kept = epochs if step <= 1 else np.union1d(epochs[::step], epochs[-1:])
    return course[course["epoch"].isin(kept)]


def _columns(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, list[Any]]:
    """The named columns as lists of JSON values."""
    return {name: [_plain(value) for value in frame[name].tolist()] for name in names}


def _plain(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = round(value, _DIGITS)
    return int(short) if short == int(short) else short


def _places(values: Iterable[Any], known: Sequence[Any]) -> list[int]:
    """Where each value stands among the known ones."""
    place = {value: number for number, value in enumerate(known)}
    return [place[value] for value in values]
