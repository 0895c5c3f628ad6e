"""The report of a simulation: a table of its conditions, and what is declared for it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.configuration import decode
from nearsight.data.structured import PatchData
from nearsight.errors import InputError
from nearsight.report.claims import Verdicts
from nearsight.report.reports import Report
from nearsight.report.studies import report_of
from nearsight.report.tables import OF_TWO, Row, Table, percent, rounded, with_interval
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.study.statistics.significance import share_interval
from nearsight.train.structure import StructureRun

SMALL = "Small scale: few dimensions, samples and steps. This tests the path, not the paper's claims."


def share_in_words(interval: Estimate) -> str:
    """ "9 of 10 seeds (56 to 100 %)"."""
    if not interval.n:
        return "no seed"
    seeds = f"{round(interval.value * interval.n)} of {interval.n} {'seed' if interval.n == 1 else 'seeds'}"
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
    """What has to be said with every table: the scale, what is missing, what was assumed."""
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


def conditions_table(results: SimulationResults) -> Table:
    """Every condition: the means of what the study says sums it up."""
    rows = []
    for condition in conditions_of(results):
        runs = runs_of(results, condition)
        row = Row(condition=condition).keep(**results.levels[condition]).both("n", len(runs), "seeds")
        for name, title in results.responses.items():
            found = mean_interval(runs[name].dropna())
            row.keep(**_ends(name, found)).show(title, with_interval(found))
        rows.append(row)
    return _table_of(results, rows, f"± is half the 95 % interval of the mean over seeds; {OF_TWO}.")


def association_table(results: SimulationResults) -> Table:
    """Every condition of S3's model: how many seeds associate all patches, when, and how well they classify."""
    rows = []
    for condition in conditions_of(results):
        runs = runs_of(results, condition)
        exact = share_interval(runs["exact"])
        row = Row(condition=condition).keep(**results.levels[condition], n=exact.n, **_ends("exact", exact))
        means = {name: mean_interval(runs[name].dropna()) for name in _MEANS}
        for name, found in means.items():
            row.keep(**_ends(name, found))
        steps = {name: median_or_none(runs[name]) for name in _STEPS}
        best_accuracy, best_risk = (float(runs[name].iloc[0]) for name in _BEST)
        row.keep(**steps, best_acc=best_accuracy, best_risk=best_risk)
        row.show("all associated", share_in_words(exact))
        row.show("patches associated", with_interval(means["associated"]))
        row.show("Rand index", with_interval(means["rand_index"]))
        for name, title in _STEPS.items():
            row.show(title, rounded(steps[name], 0))
        row.show("test accuracy", with_interval(means["test_acc"], scale=100, digits=2))
        row.show("best possible", percent(best_accuracy))
        row.show("test risk", with_interval(means["test_risk"])).show("least possible", rounded(best_risk))
        rows.append(row)
    note = (
        "Numbers of the last step. All associated: seeds, with Clopper and Pearson's 95 % interval. ± is half the 95 % "
        "interval of the mean over seeds. Steps are medians over the seeds that get there. Accuracies in per cent."
    )
    return _table_of(results, rows, note)


_MEANS = ("associated", "rand_index", "test_acc", "test_risk")
_STEPS = {"exact_from": "associated from step", "phase_2": "II from", "phase_3": "III from"}
_BEST = ("best_acc", "best_risk")
_OF_THE_MODEL = {"exact", *_MEANS, *_STEPS, *_BEST}
"""Columns of the runs of S3's model; a simulation of something else has others."""


def _ends(name: str, found: Estimate) -> dict[str, float]:
    """A mean and the ends of its interval, as columns."""
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _table_of(results: SimulationResults, rows: list[Row], note: str) -> Table:
    return Table.of("conditions", f"{results.name}: every condition", rows, notes=(note, *notes_of(results)))


def simulation_tables(results: SimulationResults) -> list[Table]:
    is_of_the_model = set(results.runs.columns) >= _OF_THE_MODEL
    conditions = association_table(results) if is_of_the_model else conditions_table(results)
    return [conditions, *report_of(results.name).tables_of(results)]


def simulation_verdicts(results: SimulationResults) -> Verdicts | None:
    """Every claim that the simulation is about, judged; None where nothing is declared under its name."""
    intervals = "± is half the 95 % interval of the mean over seeds; ranges in brackets are 95 % intervals."
    return report_of(results.name).verdicts_on(results, units="cells", intervals=intervals, notes=notes_of(results))


def simulation_report(results: SimulationResults) -> Report:
    if results.runs.empty:
        raise InputError(f"study {results.name!r} has no cell that is done, so there is nothing to report")
    return Report(
        title=results.name,
        tables=simulation_tables(results),
        figures={name: partial(draw, results) for name, draw in report_of(results.name).figures.items()},
        verdicts=simulation_verdicts(results),
        notes=notes_of(results),
    )


def write_simulation_report(results: SimulationResults, folder: Path) -> tuple[Path, ...]:
    """Write the report on a simulation's results; the files written."""
    return simulation_report(results).write(folder)
