"""Contrasts from all runs at once: the noise of one condition is learned from the seeds of every other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from nearsight.study.statistics.fits import LeastSquares, least_squares
from nearsight.study.statistics.intervals import LEVEL, Estimate, mean_interval

POOLED = (
    "Intervals (95 %) come from one fit to all runs, which takes the spread over seeds to be the same everywhere; runs "
    "of one seed share what the seed does."
)


def condition_means(runs: pd.DataFrame, response: str) -> LeastSquares:
    """A mean per condition, with the seeds' own effects (which sum to 0) taken out: the model of paired differences,
    with one noise for all pairs."""
    conditions = pd.get_dummies(runs["condition"], dtype=float)
    seeds = pd.get_dummies(runs["seed"].astype(str), prefix="seed", dtype=float)
    centred = seeds.iloc[:, 1:].sub(seeds.iloc[:, 0], axis=0)
    return least_squares(pd.concat([conditions, centred], axis=1), runs[response])


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A weighted sum of what a fit gives, and what is asked of it."""

    name: str
    text: str = ""
    """The question."""
    weights: Mapping[str, float]
    """By the names of the fit's columns."""
    words: str = ""
    """What is compared with what."""
    sign: int = -1
    """Of a yes."""


def between(
    name: str, text: str, with_it: Sequence[str], without_it: Sequence[str], *, sign: int = -1, of_sums: bool = False
) -> Contrast:
    """The mean of some conditions minus the mean of others, which lack one thing.

    `of_sums`: sums instead of means, which is the difference of two differences.
    """

    def weight(labels: Sequence[str], whole: float) -> dict[str, float]:
        return dict.fromkeys(labels, whole if of_sums else whole / len(labels))

    def joined(labels: Sequence[str]) -> str:
        return labels[0] if len(labels) == 1 else f"{'sum' if of_sums else 'mean'} of {' and '.join(labels)}"

    weights = weight(with_it, 1) | weight(without_it, -1)
    return Contrast(name=name, text=text, weights=weights, words=f"{joined(with_it)} − {joined(without_it)}", sign=sign)


def pooled_interval(values: "pd.Series[float]", fit: LeastSquares, *, num_runs: int) -> Estimate:
    """Of the mean of values, one per seed, that are each a sum or difference of so many runs.

    The noise of a run is the fit's, estimated from all conditions: two seeds of one condition are too few.
    """
    from scipy import stats  # here, because it takes most of a second

    plain, half = mean_interval(values), float("nan")
    if fit.residual_df and plain.n:
        error = float(np.sqrt(num_runs * fit.noise / plain.n))
        half = float(stats.t.ppf((1 + LEVEL) / 2, fit.residual_df)) * error
    return replace(plain, low=plain.value - half, high=plain.value + half)
