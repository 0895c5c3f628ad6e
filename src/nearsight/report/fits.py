"""Contrasts from all runs at once: the noise of one condition is learned from the seeds of every other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.report.tables import mean_and_ends
from nearsight.study.statistics.intervals import LEVEL, MeanInterval, mean_interval

POOLED = (
    "Intervals (95 %) come from one fit to all runs, which takes the spread over seeds to be the same everywhere; runs "
    "of one seed share what the seed does."
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number that a fit gives, and its confidence interval."""

    value: float
    low: float
    high: float
    """The ends of Student's t interval; NaN where no run is left over to estimate the noise from."""
    p: float = float("nan")
    """Of its being 0, in a two-sided t test, where the fit gives it."""

    @classmethod
    def of(cls, interval: MeanInterval) -> Self:
        return cls(value=interval.mean, low=interval.low, high=interval.high)

    @property
    def has_interval(self) -> bool:
        return bool(np.isfinite(self.low))

    def has_sign(self, sign: int) -> bool:
        """Whether it has this sign: by its whole interval or, where there is none, by itself."""
        end = min(sign * self.low, sign * self.high) if self.has_interval else sign * self.value
        return end > 0

    def in_words(self, *, scale: float = 1.0, digits: int = 3) -> str:
        return mean_and_ends(self.value, self.low, self.high, scale=scale, digits=digits)


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastSquares:
    """Ordinary least squares of one response on columns of numbers."""

    names: tuple[str, ...]
    coefficients: NDArray[np.float64]
    covariance: NDArray[np.float64]
    """Of the coefficients; NaN where no run is left over to estimate the noise from."""
    noise: float
    """Variance of a run about the fit; NaN in the same case."""
    residual_df: int

    def estimate(self, weights: Mapping[str, float]) -> Estimate:
        """A weighted sum of coefficients."""
        from scipy import stats  # here, because it takes most of a second

        for name in weights:
            if name not in self.names:
                raise InputError(f"no run has {name}")
        weight = np.array([weights.get(name, 0.0) for name in self.names])
        value = float(weight @ self.coefficients)
        if self.residual_df == 0:
            return Estimate(value=value, low=float("nan"), high=float("nan"))
        error = float(np.sqrt(weight @ self.covariance @ weight))
        half = float(stats.t.ppf((1 + LEVEL) / 2, self.residual_df)) * error
        p = 2 * float(stats.t.sf(abs(value) / error, self.residual_df)) if error else float("nan")
        return Estimate(value=value, low=value - half, high=value + half, p=p)


def least_squares(columns: pd.DataFrame, values: Sequence[float] | pd.Series) -> LeastSquares:
    """Fit the values (a row per run) by the columns. Columns whose effects cannot be separated are an `InputError`."""
    design, response = columns.to_numpy(dtype=np.float64), np.asarray(values, dtype=np.float64)
    num_runs, num_columns = design.shape
    if np.linalg.matrix_rank(design) < num_columns:
        raise InputError("its effects cannot be separated by these runs")
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ response
    residual_df = num_runs - num_columns
    noise = float(np.sum((response - design @ coefficients) ** 2)) / residual_df if residual_df else float("nan")
    names = tuple(map(str, columns.columns))
    return LeastSquares(
        names=names, coefficients=coefficients, covariance=noise * inverse, noise=noise, residual_df=residual_df
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


def pooled_interval(values: "pd.Series[float]", fit: LeastSquares, *, num_runs: int) -> MeanInterval:
    """Of the mean of values, one per seed, that are each a sum or difference of so many runs.

    The noise of a run is the fit's, estimated from all conditions: two seeds of one condition are too few.
    """
    from scipy import stats  # here, because it takes most of a second

    plain, half = mean_interval(values), float("nan")
    if fit.residual_df and plain.n:
        error = float(np.sqrt(num_runs * fit.noise / plain.n))
        half = float(stats.t.ppf((1 + LEVEL) / 2, fit.residual_df)) * error
    return replace(plain, low=plain.mean - half, high=plain.mean + half)
