"""Which settings of `unreported-cifar100` give the paper's numbers, and how far the others are from them."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.conditions import FACTOR_NAMES
from nearsight.report.study.paper import BASELINE, ONLY_CUTMIX, PUBLISHED
from nearsight.report.study.table import Table, percent, records, rounded
from nearsight.study.results import StudyResults

CUTMIX = "cutmix"
COMPARED = ("test_acc", "min_mad", "max_mad")
FITTED = (BASELINE, ONLY_CUTMIX)
_PAPER = PUBLISHED["ablation-cifar100"]


def paper_value(condition: str, response: str) -> float:
    return float(getattr(_PAPER.conditions[condition], response))


def scale_of(response: str) -> float:
    """As far as CutMix moved the paper's own number: what counts as one unit of distance."""
    return abs(paper_value(ONLY_CUTMIX, response) - paper_value(BASELINE, response))


def settings_of(results: StudyResults) -> list[str]:
    """The factors but CutMix."""
    return [name for name in results.factors if name != CUTMIX]


def fits(results: StudyResults) -> pd.DataFrame:
    """A row per setting and probability of CutMix, the nearest to the paper first: its runs' means without and with
    CutMix, and the distance of both from the paper's Baseline and +CutMix."""
    if CUTMIX not in results.factors:
        raise InputError("the study does not vary CutMix")
    settings = settings_of(results)
    off = results.factors[CUTMIX][0]
    means = results.runs.groupby([*settings, CUTMIX], sort=False)[list(COMPARED)].mean().reset_index()
    without = means[means[CUTMIX] == off].drop(columns=CUTMIX)
    both = means[means[CUTMIX] != off].merge(without, on=settings, suffixes=(f"_{ONLY_CUTMIX}", f"_{BASELINE}"))
    if both.empty:
        raise InputError("no setting has a run both with and without CutMix yet")
    apart = [
        (both[f"{response}_{condition}"] - paper_value(condition, response)) / scale_of(response)
        for condition in FITTED
        for response in COMPARED
    ]
    both["distance"] = np.sqrt(np.mean(np.square(apart), axis=0))
    return both.sort_values("distance", kind="stable", ignore_index=True)


def best_fitting_levels(results: StudyResults) -> dict[str, str]:
    """The levels of the setting that is nearest to the paper, by factor: what `ablation_under` of the recipes takes."""
    (best,) = records(fits(results).iloc[:1])
    return {name: str(best[name]) for name in results.factors}


def levels_in_words(levels: Mapping[str, str]) -> str:
    return ", ".join(f"{FACTOR_NAMES.get(name, name)} {level}" for name, level in levels.items())


def fit_table(results: StudyResults) -> Table:
    """The settings, sorted by their distance to the paper's numbers, which are the first row."""
    table = fits(results)
    names = {name: FACTOR_NAMES.get(name, name) for name in results.factors}
    paper = dict.fromkeys(names.values(), "paper")
    paper |= {title: _both(*values) for title, values in _cells(None).items()} | {"distance": rounded(0.0, 2)}
    shown = [paper]
    for row in records(table):
        levels = {title: str(row[name]) for name, title in names.items()}
        numbers = {title: _both(*values) for title, values in _cells(row).items()}
        shown.append({**levels, **numbers, "distance": rounded(row["distance"], 2)})
    scales = ", ".join(
        f"{scale_of(response):.4g} in {name}"
        for response, name in zip(COMPARED, ("accuracy", "min MAD", "max MAD"), strict=True)
    )
    return Table(
        name="fit-to-paper",
        title=f"{results.name}: which settings give the paper's numbers",
        numbers=table.assign(scale=results.scale),
        shown=pd.DataFrame(shown),
        notes=(
            f"Numbers are those without CutMix, then with it; the paper's are its {BASELINE} and {ONLY_CUTMIX} "
            f"({_PAPER.source}, one seed).",
            "Distance: the root of the mean square, over these six numbers, of ours minus the paper's, each in units "
            f"of what CutMix changes in the paper ({scales}). 1 is as far off as the paper's two conditions are apart.",
            "All runs here have the same number of epochs; the paper stopped early.",
        ),
    )


def _cells(row: Mapping[str, float] | None) -> dict[str, tuple[str, str]]:
    """Title → the numbers without and with CutMix; the paper's where there is no row."""

    def value(condition: str, response: str) -> float:
        return paper_value(condition, response) if row is None else row[f"{response}_{condition}"]

    def both(response: str) -> list[float]:
        return [value(condition, response) for condition in FITTED]

    first, second = (percent(accuracy) for accuracy in both("test_acc"))
    cells = {"accuracy, %": (first, second)}
    for response, title in (("min_mad", "min MAD"), ("max_mad", "max MAD")):
        low, high = (rounded(distance) for distance in both(response))
        cells[title] = (low, high)
    return cells


def _both(without: str, with_it: str) -> str:
    return f"{without}, {with_it}"
