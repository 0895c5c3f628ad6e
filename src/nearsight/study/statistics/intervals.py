"""Means over seeds, with the interval that says how far to trust them."""

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class MeanInterval:
    """The mean of a few runs and its confidence interval."""

    n: int
    mean: float
    std: float
    """Over the runs, with n − 1 in the denominator; NaN for a single run."""
    low: float
    high: float
    """The ends of Student's t interval; NaN for a single run, which has no spread to learn from."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def has_interval(self) -> bool:
        return bool(np.isfinite(self.low))

    def contains(self, value: float) -> bool:
        """Whether the interval holds the value; never without an interval."""
        return self.low <= value <= self.high

    @property
    def excludes_zero(self) -> bool:
        return self.has_interval and not self.contains(0.0)


def mean_interval(values: ArrayLike, level: float = LEVEL) -> MeanInterval:
    """The mean of independent values and Student's t interval around it."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    n = numbers.size
    mean = float(numbers.mean()) if n else float("nan")
    std = float(numbers.std(ddof=1)) if n > 1 else float("nan")
    half = float("nan")
    if n > 1:
        from scipy import stats  # here, because it takes most of a second

        half = float(stats.t.ppf((1 + level) / 2, n - 1)) * std / n**0.5
    return MeanInterval(n=n, mean=mean, std=std, low=mean - half, high=mean + half)


def by_condition(runs: pd.DataFrame, response: str, level: float = LEVEL) -> pd.DataFrame:
    """Per condition, in the order of first appearance: n, mean, std and the ends of the interval of a column."""
    rows = {
        condition: asdict(mean_interval(group[response], level))
        for condition, group in runs.groupby("condition", sort=False)
    }
    columns = [*MeanInterval.__dataclass_fields__]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("condition").reset_index()


def paired_difference(
    runs: pd.DataFrame, condition: str, reference: str, response: str, level: float = LEVEL
) -> MeanInterval:
    """`condition` minus `reference`, over the seeds both have.

    A seed fixes the initial weights and the order of the images, so runs of one seed belong together: the differences
    are taken within seeds, and their spread is the spread of the effect.
    """
    return difference_of(by_seed(runs, response), condition, reference, level)


def by_seed(runs: pd.DataFrame, response: str) -> pd.DataFrame:
    """A row per seed, a column per condition."""
    return runs.pivot_table(index="seed", columns="condition", values=response)


def difference_of(values: pd.DataFrame, condition: str, reference: str, level: float = LEVEL) -> MeanInterval:
    """As `paired_difference`, from what `by_seed` gives: where many pairs are asked for, once for all of them."""
    if condition not in values or reference not in values:
        return mean_interval([], level)
    return mean_interval((values[condition] - values[reference]).dropna(), level)
