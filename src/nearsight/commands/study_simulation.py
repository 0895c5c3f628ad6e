"""`nearsight study` for simulations: running them, how that goes, and what their folders say."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nearsight.commands.progress import SECONDS_BETWEEN_LINES
from nearsight.commands.study_progress import StudyBar
from nearsight.commands.study_tables import finite, with_half_width
from nearsight.study import Simulation, SimulationCell, SimulationListener, SimulationResults, run_simulation
from nearsight.study.design import MOST_SEEDS
from nearsight.study.statistics import MeanInterval, mean_interval
from nearsight.train import Stop


def run_and_report(simulation: Simulation, out: Path, device: torch.device, stop: Stop, *, as_json: bool) -> int:
    with SimulationProgress(simulation.name, simulation.responses) as progress:
        folder = run_simulation(simulation, out, device=device, listener=progress, stop=stop)
    from nearsight.report.page.folders import write_folder_page
    from nearsight.report.structure import write_structure_report

    results = SimulationResults.read(folder.path)
    write_structure_report(results, out)
    write_folder_page(out)
    if as_json:
        print(json.dumps({"folder": str(out), **described(results)}, ensure_ascii=False))
    else:
        print(table(results))
        print(f"\nTables, figures, verdict and page: {out}")
    sys.stdout.flush()
    return 0


def described(results: SimulationResults) -> dict[str, Any]:
    """All of it, for machines."""
    done = set(results.runs["run"])
    return {
        "name": results.name,
        "scale": results.scale,
        "conditions": _conditions(results),
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


def _conditions(results: SimulationResults) -> list[dict[str, Any]]:
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


def _interval(found: MeanInterval) -> dict[str, Any]:
    """Seeds that have diverged are none of its n."""
    return {"n": found.n, "mean": finite(found.mean), "low": finite(found.low), "high": finite(found.high)}


def table(results: SimulationResults) -> str:
    """A row per condition with its means over seeds."""
    told = described(results)
    done = sum(cell["state"] == "done" for cell in told["cells"])
    lines = [f"{results.name} at {results.scale} scale: {len(told['cells'])} cells ({done} done)", ""]
    if results.scale != "full":
        shrunk = f"few dimensions, samples and steps, at most {MOST_SEEDS} seeds"
        lines[1:1] = [f"Shrunk to test the path: {shrunk}. These numbers are no result."]
    if not told["conditions"]:
        return "\n".join([*lines, "No cell is done yet."])
    width = max(len("condition"), *(len(row["condition"]) for row in told["conditions"]))
    heads = "  ".join(f"{title:>16}" for title in results.responses.values())
    lines.append(f"  {'condition':<{width}}  {'n':>2}  {heads}")
    for row in told["conditions"]:
        cells = "  ".join(f"{with_half_width(row[name], 1, 3):>16}" for name in results.responses)
        fewer = [
            f"{title} of {_seeds(row[name]['n'])}"
            for name, title in results.responses.items()
            if row[name]["n"] < row["n"]
        ]
        lines.append(f"  {row['condition']:<{width}}  {row['n']:>2}  {'  '.join([cells, *fewer])}")
    lines.append("  (mean ± half of the 95 % interval over seeds)")
    shown = ", ".join(
        f"{name} = {results.settings[name]}" for name in results.assumed if results.settings.get(name) is not None
    )
    return "\n".join([*lines, "", f"Assumed, since the paper does not report it: {shown}"] if shown else lines)


def _seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"


class SimulationProgress(StudyBar, SimulationListener):
    """Shows how many conditions are done; use it as a context manager."""

    def __init__(self, label: str, responses: Mapping[str, str]) -> None:
        super().__init__(label)
        self._responses = responses
        self._num_conditions = self._num_done = 0

    def planned(self, cells: Sequence[SimulationCell], missing: Sequence[SimulationCell]) -> None:
        self._num_conditions = len({cell.condition for cell in missing})
        self._say(f"{len(cells) - len(missing)} of {len(cells)} cells done")
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=max(1, self._num_conditions), status="")

    def started(self, condition: str, cells: Sequence[SimulationCell]) -> None:
        self._began = self._said = time.perf_counter()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, status=f"{condition}, {len(cells)} seeds")

    def heard(self, condition: str, share: float) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._num_done + share)
        elif time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._say(f"{condition}: {share:.0%}")

    def finished(self, condition: str, runs: pd.DataFrame) -> None:
        self._num_done += 1
        told = ", ".join(f"{title} {runs[name].mean():.3f}" for name, title in self._responses.items())
        seconds = time.perf_counter() - self._began
        self._say(f"{condition}: {_seeds(len(runs))} in {seconds:.0f} s: {told}")
