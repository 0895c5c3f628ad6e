"""What `nearsight study` says about a study's folder."""

import math
from collections import Counter
from typing import Any

from nearsight.study import CellState, StudyFolder, StudyResults
from nearsight.study.design import MOST_SEEDS
from nearsight.study.results import read_description
from nearsight.study.statistics import by_condition

_RESPONSES = ("test_acc", "min_mad")


def described(folder: StudyFolder) -> dict[str, Any]:
    """All of it, for machines."""
    results, told = StudyResults.read(folder.path), read_description(folder.path)
    return {
        "name": results.name,
        "scale": results.scale,
        "design": told["design"],
        "conditions": _conditions(results),
        "cells": [_cell(state) for state in folder.states()],
        "settings": results.settings,
        "assumed": list(results.assumed),
    }


def _conditions(results: StudyResults) -> list[dict[str, Any]]:
    numbers = {response: by_condition(results.runs, response).set_index("condition") for response in _RESPONSES}
    return [
        {
            "condition": condition,
            "n": int(numbers["test_acc"].loc[condition, "n"]),
            **{
                response: {name: finite(frame.loc[condition, name]) for name in ("mean", "low", "high")}
                for response, frame in numbers.items()
            },
        }
        for condition in numbers["test_acc"].index
    ]


def finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _cell(state: CellState) -> dict[str, Any]:
    told: dict[str, Any] = {
        "run": state.run,
        "condition": state.condition,
        "seed": state.seed,
        "state": state.state,
        "epochs": state.epochs,
    }
    if state.state == "running" and state.holder is not None:
        told |= {"owner": state.holder.name, "age_seconds": round(state.holder.age, 1)}
    if state.problem:
        told["problem"] = state.problem
    return told


def table(folder: StudyFolder) -> str:
    """A row per condition with its means over seeds, and what is not done yet."""
    told = described(folder)
    counts = Counter(cell["state"] for cell in told["cells"])
    counted = ", ".join(f"{number} {state}" for state, number in counts.items())
    lines = [f"{told['name']} at {told['scale']} scale, {told['design']}: {len(told['cells'])} cells ({counted})", ""]
    if told["scale"] != "full":
        shrunk = f"a narrow model, few images, two epochs, at most {MOST_SEEDS} seeds"
        lines[1:1] = [f"Shrunk to test the path: {shrunk}. These numbers are no result."]
    lines += _rows(told["conditions"])
    for cell in told["cells"]:
        if cell["state"] == "running":
            where = f"{cell['epochs']} epochs on disk, {cell['owner']}, last sign {cell['age_seconds']:.0f} s ago"
            lines.append(f"  running: {cell['condition']}, seed {cell['seed']}: {where}")
        elif cell["state"] == "damaged":
            lines.append(f"  damaged: {cell['condition']}, seed {cell['seed']}: {cell['problem']}")
    assumed = ", ".join(
        f"{name} = {told['settings'][name]}" if name in told["settings"] else f"levels of {name}"
        for name in told["assumed"]
    )
    if assumed:
        lines += ["", f"Assumed, since the paper does not report it: {assumed}"]
    return "\n".join(lines)


def _rows(conditions: list[dict[str, Any]]) -> list[str]:
    if not conditions:
        return ["No run is complete yet."]
    width = max(len("condition"), *(len(row["condition"]) for row in conditions))
    head = f"  {'condition':<{width}}  {'n':>2}  {'test accuracy':>16}  {'min MAD':>16}"
    rows = [
        f"  {row['condition']:<{width}}  {row['n']:>2}  {_percent(row['test_acc']):>16}  {_plain(row['min_mad']):>16}"
        for row in conditions
    ]
    return [head, *rows, "  (mean ± half of the 95 % interval over seeds)"]


def _percent(interval: dict[str, float | None]) -> str:
    return with_half_width(interval, 100, 2) + " %"


def _plain(interval: dict[str, float | None]) -> str:
    return with_half_width(interval, 1, 3)


def with_half_width(interval: dict[str, float | None], scale: float, digits: int) -> str:
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    if mean is None:  # of networks without heads
        return "–"
    if low is None or high is None:  # one run has no spread
        return f"{scale * mean:.{digits}f}"
    return f"{scale * mean:.{digits}f} ± {scale * (high - low) / 2:.{digits}f}"
