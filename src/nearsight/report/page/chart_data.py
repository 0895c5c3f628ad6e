"""What the charts of a page draw: groups (models, or a study's conditions), their runs, and those' heads and epochs."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures.style import MODEL_COLOURS, model_style
from nearsight.report.inputs import ModelHeads, shorten
from nearsight.report.page.packing import columns

HEAD_NUMBERS = ("layer", "head", "mad", "mad_std", "entropy", "entropy_std")
EPOCH_NUMBERS = ("epoch", "train_loss", "val_loss", "val_acc")
COURSE_NUMBERS = ("epoch", "layer", "head", "mad", "entropy")
LABEL_LIMIT = 60
"""Characters of a name in a chart; whole names are in the tables."""
LINE_WIDTH = 1.8
# The same markers as in the figures, in Vega's words.
MARKERS = {
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


def of_models(models: Sequence[ModelHeads], grid_size: tuple[int, int] | None) -> dict[str, Any]:
    """Every model is a group of one run."""
    reported = [model.measured().assign(run=place) for place, model in enumerate(models)]
    epochs = [model.history.assign(run=place) for place, model in enumerate(models) if model.history is not None]
    during = [model.heads.assign(run=place) for place, model in enumerate(models) if model.heads["epoch"].nunique() > 1]
    return {
        "kind": "models",
        "palette": MODEL_COLOURS,
        "groups": groups_data([model.label for model in models]),
        "runs": {"group": list(range(len(models))), "seed": [None] * len(models)},
        "heads": heads_data(pd.concat(reported)),
        "history": history_data(pd.concat(epochs)) if epochs else None,
        "course": course_data(pd.concat(during)) if during else None,
        "uniform": None if grid_size is None else uniform_attention_distance(grid_size),
    }


def groups_data(labels: Sequence[str]) -> list[dict[str, Any]]:
    groups = []
    for place, label in enumerate(labels):
        style = model_style(place)
        dash = [] if style.dash == "solid" else [round(LINE_WIDTH * length, 1) for length in style.dash[1]]
        marker = MARKERS[style.marker]
        look = {"colour": style.colour, "dash": dash, "marker": marker}
        groups.append({"label": label, "short": shorten(label, LABEL_LIMIT), **look})
    return groups


def heads_data(frame: pd.DataFrame) -> dict[str, list[Any]]:
    there = frame[frame["mad"].notna() & frame["entropy"].notna()]
    return columns(there.sort_values(["run", "layer", "head"]), ("run", *HEAD_NUMBERS))


def history_data(frame: pd.DataFrame) -> dict[str, list[Any]]:
    return columns(frame.sort_values(["run", "epoch"]), ("run", *EPOCH_NUMBERS))


def course_data(frame: pd.DataFrame) -> dict[str, list[Any]]:
    there = frame[frame["mad"].notna() & frame["entropy"].notna()]
    return columns(there.sort_values(["epoch", "run", "layer", "head"]), ("run", *COURSE_NUMBERS))
