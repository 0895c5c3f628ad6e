"""The numbers that tables, figures and verdicts of S3's simulations have in common."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.configuration import decode
from nearsight.data.structured import PatchData
from nearsight.errors import InputError
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import MeanInterval
from nearsight.train.structure import StructureRun

PAPER = "S3 (arXiv 2210.09221)"
SMALL = "Small scale: few dimensions, samples and steps. This tests the path, not the paper's claims."


def share_interval(holds: Iterable[float]) -> MeanInterval:
    """How often something held, with Clopper and Pearson's interval: of seeds, ten of which are not a hundred."""
    from scipy import stats  # here, because it takes most of a second

    values = [bool(value) for value in holds]
    if not values:
        return MeanInterval(n=0, mean=np.nan, std=np.nan, low=np.nan, high=np.nan)
    found = stats.binomtest(sum(values), len(values)).proportion_ci()
    return MeanInterval(
        n=len(values), mean=sum(values) / len(values), std=np.nan, low=float(found.low), high=float(found.high)
    )


def share_in_words(interval: MeanInterval) -> str:
    """ "9 of 10 seeds (56 to 100 %)"."""
    if not interval.n:
        return "no seed"
    seeds = f"{round(interval.mean * interval.n)} of {interval.n} {'seed' if interval.n == 1 else 'seeds'}"
    return f"{seeds} ({100 * interval.low:.0f} to {100 * interval.high:.0f} %)"


def runs_of(results: SimulationResults, condition: str) -> pd.DataFrame:
    """The rows of a condition, by seed."""
    found = results.runs[results.runs["condition"] == condition]
    if found.empty:
        raise InputError(f"no seed of {condition} is done")
    return found.set_index("seed")


def by_seed(runs: pd.DataFrame, name: str) -> dict[int, float]:
    """A column of a condition's rows."""
    return {int(str(seed)): float(value) for seed, value in runs[name].items()}


def curves_of(results: SimulationResults, condition: str) -> dict[int, pd.DataFrame]:
    """Seed → its curve."""
    if "curves" not in results.tables:
        raise InputError(f"study {results.name!r} keeps no curves")
    curves = results.tables["curves"]
    found = {int(str(seed)): curve for seed, curve in curves[curves["condition"] == condition].groupby("seed")}
    if not found:
        raise InputError(f"no seed of {condition} is done")
    return found


def attention_of(results: SimulationResults, condition: str, seed: int) -> tuple[NDArray[np.float64], ...]:
    """A at the start and at the end."""
    if "attention" not in results.tables:
        raise InputError(f"study {results.name!r} keeps no attention")
    entries = results.tables["attention"]
    entries = entries[(entries["condition"] == condition) & (entries["seed"] == seed)]
    if entries.empty:
        raise InputError(f"seed {seed} of {condition} is not done")
    return tuple(
        entries[entries["step"] == step].pivot(index="row", columns="column", values="entry").to_numpy(dtype=np.float64)
        for step in (entries["step"].min(), entries["step"].max())
    )


def patches_of(results: SimulationResults, condition: str) -> PatchData:
    """What a condition's samples are."""
    return decode(StructureRun, results.configs[condition]).data


def conditions_of(results: SimulationResults) -> list[str]:
    """Those with a seed that is done, in the study's order."""
    return [str(label) for label in results.runs["condition"].unique()]


def notes_of(results: SimulationResults) -> tuple[str, ...]:
    """What has to be said beside every table: the scale, what is missing, what was assumed."""
    notes = [] if results.scale == "full" else [SMALL]
    done = set(results.runs["run"])
    missing = [cell for cell in results.cells if cell.run not in done]
    if missing:
        notes.append(f"{len(missing)} of {len(results.cells)} cells are not done yet.")
    has_accuracy = "test_acc" in results.runs  # a simulation of something else may have none
    diverged = results.runs[results.runs["test_acc"].isna()] if has_accuracy else results.runs.iloc[:0]
    if len(diverged):
        seeds = ", ".join(f"{row.condition} (seed {row.seed})" for row in diverged.itertuples())
        notes.append(f"Diverged, and left out of the means of accuracy and risk: {seeds}.")
    shown = [f"{name} = {results.settings[name]}" for name in results.assumed if results.settings.get(name) is not None]
    if shown:
        notes.append(f"*Assumed* (the paper does not report them): {', '.join(shown)}.")
    return tuple(notes)


def median_or_none(values: "Sequence[float] | pd.Series[float]") -> float:
    """The median of those that are numbers; NaN where none is."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    return float(np.median(numbers)) if numbers.size else float("nan")
