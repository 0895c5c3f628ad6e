"""Tables of S3's simulations."""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.structure.numbers import (
    conditions_of,
    median_or_none,
    notes_of,
    runs_of,
    share_in_words,
    share_interval,
)
from nearsight.report.structure.transfer import BESIDE, WAYS, accuracies, fewer_times, samples_needed, target_accuracy
from nearsight.report.study.table import MISSING, Table, percent, rounded, with_interval
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import MeanInterval, mean_interval

_OF_THE_MODEL = (
    *("exact", "associated", "rand_index", "test_acc", "test_risk"),
    *("exact_from", "phase_2", "phase_3", "best_acc", "best_risk"),
)
"""Columns of the runs of S3's model; a simulation of something else has others."""


def responses_table(results: SimulationResults) -> Table:
    """Every condition: the means of what the study says sums it up."""
    numbers, shown = [], []
    for condition in conditions_of(results):
        runs = runs_of(results, condition)
        means = {name: mean_interval(runs[name].dropna()) for name in results.responses}
        numbers.append({"condition": condition, **results.levels[condition], "n": len(runs), **_with_ends(means)})
        told = {results.responses[name]: with_interval(found) for name, found in means.items()}
        shown.append({"condition": condition, "seeds": str(len(runs)), **told})
    return Table(
        name="conditions",
        title=f"{results.name}: every condition",
        numbers=pd.DataFrame(numbers),
        shown=pd.DataFrame(shown),
        notes=("± is half the 95 % interval of the mean over seeds.", *notes_of(results)),
    )


def conditions_table(results: SimulationResults) -> Table:
    """Every condition: how many seeds associate all patches, when, and how well they classify."""
    numbers, shown = [], []
    for condition in conditions_of(results):
        runs = runs_of(results, condition)
        exact = share_interval(runs["exact"])
        means = {
            name: mean_interval(runs[name].dropna()) for name in ("associated", "rand_index", "test_acc", "test_risk")
        }
        steps = {name: median_or_none(runs[name]) for name in ("exact_from", "phase_2", "phase_3")}
        best = {name: float(runs[name].iloc[0]) for name in ("best_acc", "best_risk")}
        numbers.append(
            {
                "condition": condition,
                **results.levels[condition],
                "n": exact.n,
                "exact": exact.mean,
                "exact_low": exact.low,
                "exact_high": exact.high,
                **_with_ends(means),
                **steps,
                **best,
            }
        )
        shown.append(
            {
                "condition": condition,
                "all associated": share_in_words(exact),
                "patches associated": with_interval(means["associated"]),
                "Rand index": with_interval(means["rand_index"]),
                "associated from step": rounded(steps["exact_from"], 0),
                "II from": rounded(steps["phase_2"], 0),
                "III from": rounded(steps["phase_3"], 0),
                "test accuracy": with_interval(means["test_acc"], scale=100, digits=2),
                "best possible": percent(best["best_acc"]),
                "test risk": with_interval(means["test_risk"]),
                "least possible": rounded(best["best_risk"]),
            }
        )
    return Table(
        name="conditions",
        title=f"{results.name}: every condition",
        numbers=pd.DataFrame(numbers),
        shown=pd.DataFrame(shown),
        notes=(
            "Numbers of the last step. All associated: seeds, with Clopper and Pearson's 95 % interval. ± is half the "
            "95 % interval of the mean over seeds. Steps are medians over the seeds that get there. Accuracies in per "
            "cent.",
            *notes_of(results),
        ),
    )


def transfer_table(results: SimulationResults) -> Table:
    """Test accuracy by the number of samples, and how many the stated accuracy takes."""
    tables = {way: accuracies(results, way) for way in WAYS}
    target = target_accuracy(results)
    sizes = sorted({int(size) for table in tables.values() for size in table.index})
    numbers, shown = [], []
    for size in sizes:
        found = {way: mean_interval(table.loc[size].dropna()) for way, table in tables.items() if size in table.index}
        numbers += [
            {"way": way, "samples": size, "n": i.n, "test_acc": i.mean, "low": i.low, "high": i.high}
            for way, i in found.items()
        ]
        cells = {WAYS[way]: with_interval(found[way], scale=100, digits=2) if way in found else MISSING for way in WAYS}
        shown.append({"samples": f"{size:,}", **cells})
    needed = {way: samples_needed(results, way, target) for way in WAYS}
    shown.append({"samples": f"needed for {percent(target)} %", **{WAYS[w]: n.in_words() for w, n in needed.items()}})
    ratios = {way: fewer_times(results, way, target) for way in BESIDE}
    times = {WAYS[way]: times_in_words(r.mean, r.low, r.high) for way, r in ratios.items()}
    shown.append({"samples": "times fewer than from scratch", **dict.fromkeys(WAYS.values(), MISSING), **times})
    return Table(
        name="transfer",
        title=f"{results.name}: test accuracy on a new feature",
        numbers=pd.DataFrame(numbers),
        shown=pd.DataFrame(shown),
        notes=(
            "Accuracies in per cent; ± is half the 95 % interval of the mean over seeds. Needed: the least number that "
            "was tried which reaches the accuracy, a point below the best possible; geometric mean over seeds with its "
            "95 % interval.",
            *notes_of(results),
        ),
    )


def _with_ends(means: Mapping[str, MeanInterval]) -> dict[str, float]:
    """Means and the ends of their intervals, as columns."""
    ends = {name: {"": found.mean, "_low": found.low, "_high": found.high} for name, found in means.items()}
    return {f"{name}{end}": value for name, each in ends.items() for end, value in each.items()}


def times_in_words(mean: float, low: float, high: float) -> str:
    if not np.isfinite(mean):
        return MISSING
    return f"{mean:,.1f}" if not np.isfinite(low) else f"{mean:,.1f} ({low:,.1f} to {high:,.1f})"


def structure_tables(results: SimulationResults) -> list[Table]:
    if not set(_OF_THE_MODEL) <= set(results.runs.columns):
        return [responses_table(results)]
    tables = [conditions_table(results)]
    with suppress(InputError):  # another study
        tables.append(transfer_table(results))
    return tables
