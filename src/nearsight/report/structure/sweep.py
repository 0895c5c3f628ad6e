"""The lines of a sweep: conditions that differ from the base in one setting."""

from dataclasses import dataclass

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.structure.numbers import conditions_of, runs_of
from nearsight.study.simulation_folder import SimulationResults

BASE = "base"
FACTORS = {
    "data.num_sets": "L",
    "data.set_size": "C",
    "data.probability": "q",
    "data.noise": "σ",
    "descent.num_samples": "N",
}
"""Setting → its letter in S3."""


@dataclass(frozen=True, kw_only=True)
class SweepLine:
    """One setting varied, all others at the base."""

    setting: str
    points: dict[float, pd.DataFrame]
    """Value → the rows of its condition, in rising order; the base's among them."""
    base: float


def sweep_line(results: SimulationResults, setting: str) -> SweepLine:
    if BASE not in conditions_of(results):
        raise InputError(f"no seed of {BASE} is done")
    base = results.levels[BASE]
    points = {}
    for condition in conditions_of(results):
        levels = results.levels[condition]
        if all(levels[name] == base[name] for name in levels if name != setting):
            points[float(str(levels[setting]))] = runs_of(results, condition)
    return SweepLine(setting=setting, points=dict(sorted(points.items())), base=float(str(base[setting])))
