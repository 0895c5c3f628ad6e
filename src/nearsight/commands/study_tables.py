"""What `nearsight study` says about the folder of a study or of a simulation."""

import math
from collections import Counter
from typing import Any

from nearsight.study import CellState, SimulationResults, StudyFolder, StudyResults
from nearsight.study.design import MOST_SEEDS
from nearsight.study.results import read_description
from nearsight.study.statistics import Estimate, by_condition, mean_interval

_RESPONSES = ("test_acc", "min_mad")


def described(folder: StudyFolder) -> dict[str, Any]:
    """All of it, for machines."""
    results, about = StudyResults.read(folder.path), read_description(folder.path)
    return {
        "name": results.name,
        "scale": results.scale,
        "design": about["design"],
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
                response: {name: _finite(frame.loc[condition, name]) for name in ("mean", "low", "high")}
                for response, frame in numbers.items()
            },
        }
        for condition in numbers["test_acc"].index
    ]


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _cell(state: CellState) -> dict[str, Any]:
    about: dict[str, Any] = {
        "run": state.run,
        "condition": state.condition,
        "seed": state.seed,
        "state": state.state,
        "epochs": state.epochs,
    }
    if state.state == "running" and state.holder is not None:
        about |= {"owner": state.holder.name, "age_seconds": round(state.holder.age, 1)}
    if state.problem:
        about["problem"] = state.problem
    return about


def table(folder: StudyFolder) -> str:
    """A row per condition with its means over seeds, and what is not done yet."""
    about = described(folder)
    counts = Counter(cell["state"] for cell in about["cells"])
    counted = ", ".join(f"{number} {state}" for state, number in counts.items())
    lines = [
        f"{about['name']} at {about['scale']} scale, {about['design']}: {len(about['cells'])} cells ({counted})",
        "",
    ]
    if about["scale"] != "full":
        lines.insert(1, _shrunk("a narrow model, few images, two epochs"))
    lines += _rows(about["conditions"])
    for cell in about["cells"]:
        if cell["state"] == "running":
            where = f"{cell['epochs']} epochs on disk, {cell['owner']}, last sign {cell['age_seconds']:.0f} s ago"
            lines.append(f"  running: {cell['condition']}, seed {cell['seed']}: {where}")
        elif cell["state"] == "damaged":
            lines.append(f"  damaged: {cell['condition']}, seed {cell['seed']}: {cell['problem']}")
    assumed = ", ".join(
        f"{name} = {about['settings'][name]}" if name in about["settings"] else f"levels of {name}"
        for name in about["assumed"]
    )
    return "\n".join([*lines, *_assumed(assumed)])


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
    return _with_half_width(interval, 100, 2) + " %"


def _plain(interval: dict[str, float | None]) -> str:
    return _with_half_width(interval, 1, 3)


def _with_half_width(interval: dict[str, float | None], scale: float, digits: int) -> str:
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    if mean is None:  # of networks without heads
        return "–"
    if low is None or high is None:  # one run has no spread
        return f"{scale * mean:.{digits}f}"
    return f"{scale * mean:.{digits}f} ± {scale * (high - low) / 2:.{digits}f}"


def described_simulation(results: SimulationResults) -> dict[str, Any]:
    """All of it, for machines."""
    done = set(results.runs["run"])
    return {
        "name": results.name,
        "scale": results.scale,
        "conditions": _simulated_conditions(results),
        "cells": [
            {
                "run": cell.run,
                "condition": cell.condition,
                "seed": cell.seed,
                "state": "done" if cell.run in done else "missing",
            }
            for cell in results.cells
        ],
        "settings": results.settings,
        "assumed": list(results.assumed),
    }


def _simulated_conditions(results: SimulationResults) -> list[dict[str, Any]]:
    if results.runs.empty:
        return []
    return [
        {
            "condition": condition,
            "n": len(runs),
            **{name: _interval(mean_interval(runs[name].dropna())) for name in results.responses},
        }
        for condition, runs in results.runs.groupby("condition", sort=False)
    ]


def _interval(found: Estimate) -> dict[str, Any]:
    """Seeds that have diverged are none of its n."""
    return {"n": found.n, "mean": _finite(found.value), "low": _finite(found.low), "high": _finite(found.high)}


def simulation_table(results: SimulationResults) -> str:
    """A row per condition with its means over seeds."""
    about = described_simulation(results)
    done = sum(cell["state"] == "done" for cell in about["cells"])
    lines = [f"{results.name} at {results.scale} scale: {len(about['cells'])} cells ({done} done)", ""]
    if results.scale != "full":
        lines.insert(1, _shrunk("few dimensions, samples and steps"))
    if not about["conditions"]:
        return "\n".join([*lines, "No cell is done yet."])
    width = max(len("condition"), *(len(row["condition"]) for row in about["conditions"]))
    heads = "  ".join(f"{title:>16}" for title in results.responses.values())
    lines.append(f"  {'condition':<{width}}  {'n':>2}  {heads}")
    for row in about["conditions"]:
        cells = "  ".join(f"{_with_half_width(row[name], 1, 3):>16}" for name in results.responses)
        fewer = [
            f"{title} of {counted_seeds(row[name]['n'])}"
            for name, title in results.responses.items()
            if row[name]["n"] < row["n"]
        ]
        lines.append(f"  {row['condition']:<{width}}  {row['n']:>2}  {'  '.join([cells, *fewer])}")
    lines.append("  (mean ± half of the 95 % interval over seeds)")
    shown = ", ".join(
        f"{name} = {results.settings[name]}" for name in results.assumed if results.settings.get(name) is not None
    )
    return "\n".join([*lines, *_assumed(shown)])


def _shrunk(how: str) -> str:
    return f"Shrunk to test the path: {how}, at most {MOST_SEEDS} seeds. These numbers are no result."


def _assumed(words: str) -> list[str]:
    return ["", f"Assumed, since the paper does not report it: {words}"] if words else []


def counted_seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"
