"""What a fixed shuffling of tiles does to each network's accuracy, seed by seed and with intervals.

Of two seeds alone no interval is worth having. So the spread over seeds is taken to be the same in all conditions, and
learned from all of them: for accuracies the spread within conditions, for changes what is left of it within seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.least_squares import LeastSquares, condition_means, least_squares
from nearsight.report.study.positions import paper as s3
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval
from nearsight.study.statistics.intervals import LEVEL

POOLED = (
    "± is half the 95 % interval of the mean over seeds (Student's t). The spread over seeds is taken to be the same "
    "in all conditions and learned from all runs, for changes after taking out what a seed does to all of them; with "
    "one seed there is none."
)


def num_tiles(level: str) -> int:
    """Along a side: 4 of "4×4"."""
    return int(level.partition("×")[0])


def accuracy_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Of the seeds that have such a run."""
    runs = results.runs
    here = runs[(runs["model"] == network) & (runs["tiles"] == tiles)]
    return here.set_index("seed")["test_acc"].astype("float64")


def change_by_seed(results: StudyResults, network: str, tiles: str) -> "pd.Series[float]":
    """Accuracy with shuffled tiles minus that of the same seed without. No such seed is an `InputError`."""
    after, before = (accuracy_by_seed(results, network, level) for level in (tiles, s3.UNSHUFFLED))
    change = (after - before).dropna()
    if change.empty:
        raise InputError(f"no seed of {network} has a run with {tiles} tiles and one without shuffling")
    return change


def excess_by_seed(results: StudyResults, network: str, reference: str, tiles: str) -> "pd.Series[float]":
    """How much more a network changes than another, seed by seed. No such seed is an `InputError`."""
    excess = (change_by_seed(results, network, tiles) - change_by_seed(results, reference, tiles)).dropna()
    if excess.empty:
        raise InputError(f"no seed of which both {network} and {reference} have runs with {tiles} tiles and without")
    return excess


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of a run over seeds, as all conditions together tell it."""

    variance: float
    df: int

    def interval(self, values: "pd.Series[float]", *, runs_in_each: int) -> MeanInterval:
        """Of the mean of values, one per seed, that are each a sum or difference of so many runs."""
        from scipy import stats  # here, because it takes most of a second

        plain = mean_interval(values)
        if not self.df or not plain.n:
            return MeanInterval(n=plain.n, mean=plain.mean, std=plain.std, low=float("nan"), high=float("nan"))
        error = float(np.sqrt(runs_in_each * self.variance / plain.n))
        half = float(stats.t.ppf((1 + LEVEL) / 2, self.df)) * error
        return MeanInterval(n=plain.n, mean=plain.mean, std=plain.std, low=plain.mean - half, high=plain.mean + half)


def accuracy(results: StudyResults, network: str, tiles: str) -> MeanInterval:
    """The mean over seeds; of nothing where there is no such run."""
    return _spread(results, _within_conditions).interval(accuracy_by_seed(results, network, tiles), runs_in_each=1)


def change(results: StudyResults, network: str, tiles: str) -> MeanInterval:
    """What shuffling changes, within seeds. No such seed is an `InputError`."""
    return _spread(results, _within_seeds).interval(change_by_seed(results, network, tiles), runs_in_each=2)


def excess(results: StudyResults, network: str, reference: str, tiles: str) -> MeanInterval:
    """How much more it changes in one network than in another. No such seed is an `InputError`."""
    values = excess_by_seed(results, network, reference, tiles)
    return _spread(results, _within_seeds).interval(values, runs_in_each=4)


def _spread(results: StudyResults, fitted: Callable[[pd.DataFrame], LeastSquares]) -> Spread:
    try:
        fit = fitted(results.runs.astype({"test_acc": "float64"}))
    except InputError:  # seeds that have no condition in common tell nothing of what is left within them
        return Spread(variance=float("nan"), df=0)
    return Spread(variance=fit.noise, df=fit.residual_df)


def _within_conditions(runs: pd.DataFrame) -> LeastSquares:
    return least_squares(pd.get_dummies(runs["condition"], dtype=float), runs["test_acc"])


def _within_seeds(runs: pd.DataFrame) -> LeastSquares:
    return condition_means(runs, "test_acc")
