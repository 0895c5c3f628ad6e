"""Scores of models side by side, means of conditions over seeds, and differences within seeds."""

import pandas as pd

from nearsight.report.probes.differences import IMAGES, OF_ONE_SEED, SEEDS, differences, reference_of
from nearsight.report.probes.measures import main_measures, title_of
from nearsight.report.probes.results import ProbeResults
from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.table import MISSING, Table, percent, span, with_interval
from nearsight.study.statistics import MeanInterval, mean_interval

OVER_IMAGES = (
    "Intervals (95 %) are over test images (bootstrap): they say how a model would do on other images like these, not "
    "how another training of it would."
)
_COLUMNS = ("condition", "measure", "n", "mean", "std", "low", "high")
OVER_SEEDS = "± is half the 95 % interval of the mean over seeds (Student's t)."


def models_table(results: ProbeResults) -> Table:
    """A row per model, a column per probe."""
    scores = {name: results.scores(name) for name in main_measures(results.measures)}
    shown = [
        {"model": model.model, **{title_of(name): _score(found.get(model.model)) for name, found in scores.items()}}
        for model in results.models
    ]
    sets = dict.fromkeys(zip(results.rows["probe"], results.rows["data"], strict=True))
    return Table(
        name="probes",
        title=f"{results.name}: what the features are worth, in per cent",
        numbers=results.rows,
        shown=pd.DataFrame(shown),
        notes=(*results.scale_notes, f"{', '.join(f'{probe} on {data}' for probe, data in sets)}.", OVER_IMAGES),
    )


def _score(score: Estimate | None) -> str:
    if score is None:
        return MISSING
    ends = f" ({span(percent(score.low), percent(score.high))})" if score.has_interval else ""
    return percent(score.value) + ends


def conditions_table(results: ProbeResults) -> Table:
    """A row per condition: the mean of every score over its seeds."""
    study = results.as_study()
    rows, shown = [], []
    for condition, runs in study.runs.groupby("condition", sort=False):
        means = {name: mean_interval(runs[name].dropna()) for name in results.measures}
        rows += [_row({"condition": condition}, name, interval) for name, interval in means.items()]
        cells = {title_of(name): _told(means[name]) for name in main_measures(means)}
        shown.append({"condition": str(condition), "seeds": str(len(runs)), **cells})
    explained = [OVER_SEEDS] if study.runs["condition"].duplicated().any() else []
    return Table(
        name="conditions",
        title=f"{results.name}: scores by condition, in per cent",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(*results.scale_notes, *explained, *missing_notes(study)),
    )


def differences_table(results: ProbeResults) -> Table:
    """A row per condition but the first: the difference to it in every score."""
    study = results.as_study()
    rows: list[dict[str, object]] = []
    cells: dict[str, dict[str, str]] = {condition: {} for condition in study.factors["model"][1:]}
    for name in results.measures:
        found = differences(results, name)
        rows += [
            _row({"condition": label}, name, difference) | {"interval_over": difference.interval_over}
            for label, difference in found.items()
        ]
        if name in main_measures(results.measures):
            for condition, shown in cells.items():
                shown[title_of(name)] = found[condition].in_words() if condition in found else MISSING
    over = {row["interval_over"] for row in rows}
    explained = (words for kind, words in ((SEEDS, OVER_SEEDS), (IMAGES, OF_ONE_SEED)) if kind in over)
    return Table(
        name="differences",
        title=f"{results.name}: differences to {reference_of(study)}, in points",
        numbers=pd.DataFrame(rows, columns=[*_COLUMNS, "interval_over"]),
        shown=pd.DataFrame([{"condition": condition, **shown} for condition, shown in cells.items()]),
        notes=(*results.scale_notes, "Taken within seeds.", *explained, *missing_notes(study)),
    )


def _told(interval: MeanInterval) -> str:
    return with_interval(interval, scale=100, digits=2) if interval.n else MISSING


def _row(of: dict[str, object], measure: str, interval: MeanInterval) -> dict[str, object]:
    numbers = {"n": interval.n, "mean": interval.mean, "std": interval.std, "low": interval.low, "high": interval.high}
    return {**of, "measure": measure, **numbers}
