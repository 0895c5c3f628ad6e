"""What `nearsight finetune` found: a model before and after, and several such trainings over seeds.

Both are made from `finetune.json` alone, which the command writes and `nearsight report` reads.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nearsight.errors import InputError
from nearsight.files import FINETUNED, read_object
from nearsight.probe.settings import ABLATION_K
from nearsight.report.page.document import Section
from nearsight.report.page.tables import table_html
from nearsight.report.tables import MISSING, Row, Table, percent, rounded, span
from nearsight.study.statistics import mean_interval, paired_difference

SIDES = ("before", "after")
_SCORES = {
    "own": "its own classifier, %",
    "linear": "linear classifier, %",
    "knn": f"k-NN (k = {ABLATION_K}), %",
}
_LOCALITY = {"min_mad": "most local head: MAD", "mean_mad": "mean MAD"}
_SETTINGS = {"model", "added", "start", "seed", "data", "num_images", "num_reference"}
_NOTHING = "nothing"

Record = Mapping[str, Any]


def read_finetuned(folder: Path) -> Record:
    """What a folder of `nearsight finetune` says."""
    found = read_object(folder / FINETUNED, missing=f"nearsight finetune has left nothing in {folder}")
    sides = [found.get(side) for side in SIDES]
    known = all(isinstance(side, dict) and {*_SCORES, *_LOCALITY, "alpha"} <= side.keys() for side in sides)
    if not known or not found.keys() >= _SETTINGS:
        raise InputError(f"{folder / FINETUNED} is not what nearsight finetune writes")
    return found


def finetuned_table(record: Record) -> Table:
    """Both models: accuracies with their intervals over images, distances, strength."""
    rows = []
    for label in SIDES:
        side, row = record[label], Row(model=label)
        for name, title in _SCORES.items():
            row.both(name, None if side[name] is None else side[name]["value"], title, _in_words(side[name]))
        for name, title in _LOCALITY.items():
            row.both(name, side[name], title, rounded(side[name]))
        rows.append(row.both("alpha", side["alpha"], "GAug's α", rounded(side["alpha"], 4)))
    notes = [
        f"On {record['num_images']} test images of {record['data']}; in brackets 95 % intervals over images, which say "
        "nothing of other seeds. The linear classifier and k-NN learn from the features that the model's classifier "
        f"takes, of {record['num_reference']} training images.",
    ]
    if record["before"]["own"] is None:
        notes.append("Before, the model has no classifier for these classes.")
    return Table.of("finetuned", "Before and after", rows, notes=notes)


def finetuned_section(record: Record) -> Section:
    table = finetuned_table(record)
    return Section(name="finetuned", heading=table.title, body=table_html(table))


def seeds_section(found: Sequence[Record]) -> Section:
    table = seeds_table(found)
    return Section(name="finetuned", heading=table.title, body=table_html(table))


def seeds_table(found: Sequence[Record]) -> Table:
    """What was added, over seeds: the models after, and how they differ from those without anything added."""
    runs = pd.DataFrame(
        [
            {"condition": _condition(record), "seed": record["seed"], **_numbers(record["after"])}
            | {f"{name}_before": value for name, value in _numbers(record["before"]).items()}
            for record in sorted(found, key=lambda record: record["added"] != _NOTHING)
        ]
    ).astype(dict.fromkeys(["alpha", "alpha_before", "own_before"], float))
    rows = []
    for condition, of_condition in runs.groupby("condition", sort=False):
        row = Row(added=condition, seeds=len(of_condition))
        for name, title in {**_SCORES, **_LOCALITY}.items():
            scale, digits = (100.0, 1) if name in _SCORES else (1.0, 3)
            if of_condition[f"{name}_before"].notna().all():
                before = mean_interval(of_condition[f"{name}_before"])
                row.interval(f"{name}_before", before, f"before: {title}", scale=scale, digits=digits)
            row.interval(name, mean_interval(of_condition[name]), title, scale=scale, digits=digits)
            change, heading = paired_difference(runs, str(condition), _NOTHING, name), f"{title}: difference"
            if condition != _NOTHING and change.n:
                row.interval(f"{name}_difference", change, heading, scale=scale, digits=digits, signed=True)
            else:
                row.show(heading, MISSING)
        alpha = float(of_condition["alpha"].mean())
        rows.append(row.both("alpha", alpha, "GAug's α", MISSING if math.isnan(alpha) else rounded(alpha, 4)))
    notes = (
        "Means over seeds ± half of the 95 % interval; of two seeds, both are in brackets.",
        "Before: with what was added, at its start.",
        f"Differences: to {_NOTHING} added, after training, within seeds.",
    )
    return Table.of("finetuned", f"{found[0]['model']}: what was added", rows, notes=notes)


def _numbers(side: Record) -> dict[str, float | None]:
    scores = {name: None if side[name] is None else side[name]["value"] for name in _SCORES}
    return {**scores, **{name: side[name] for name in (*_LOCALITY, "alpha")}}


def _condition(record: Record) -> str:
    return _NOTHING if record["added"] == _NOTHING else f"{record['added']}, {record['start']}"


def _in_words(score: Mapping[str, float | None] | None) -> str:
    if score is None:
        return MISSING
    if score["low"] is None or score["high"] is None:
        return percent(score["value"])
    return f"{percent(score['value'])} [{span(percent(score['low']), percent(score['high']))}]"
