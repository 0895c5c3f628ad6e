"""Means over seeds with the interval that says how far to trust them, numbers of heads per layer, and whether accuracy
and locality go together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

LEVEL = 0.95
SAME_ACCURACY = "close accuracy, different locality"
SAME_LOCALITY = "close locality, different accuracy"
TOGETHER = "both differ"
ALIKE = "neither differs"
UNSURE = "not sure"
# In accuracy (a fraction) and in mean attention distance (a fraction of the grid's diagonal).
ACCURACY_MARGIN = 0.01
LOCALITY_MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number that runs give, and its confidence interval."""

    value: float
    low: float = float("nan")
    high: float = float("nan")
    """The ends of the interval; NaN where there is no spread to estimate it from, as for a single run."""
    n: int = 0
    """Of a mean: the number of runs, or of pairs of runs."""
    std: float = float("nan")
    """Of a mean: over the runs, with n − 1 in the denominator."""
    error: float = float("nan")
    """The standard error."""
    df: float = float("nan")
    """The degrees of freedom that it was estimated with."""
    p: float = float("nan")
    """Of its being 0, in a two-sided t test."""

    @property
    def has_interval(self) -> bool:
        return bool(np.isfinite(self.low))

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def contains(self, value: float) -> bool:
        """Whether the interval holds the value; never without an interval."""
        return self.low <= value <= self.high

    @property
    def excludes_zero(self) -> bool:
        return self.has_interval and not self.contains(0.0)

    def as_mean(self) -> dict[str, float]:
        """The columns of a mean over runs in a table."""
        return {"n": self.n, "mean": self.value, "std": self.std, "low": self.low, "high": self.high}


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Estimate:
    """The mean of independent values and Student's t interval around it."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    n = numbers.size
    mean = float(numbers.mean()) if n else float("nan")
    std = float(numbers.std(ddof=1)) if n > 1 else float("nan")
    if n < 2:
        return Estimate(n=n, value=mean)
    from scipy.special import stdtr

    error = std / n**0.5
    half = _quantile((1 + level) / 2, n - 1) * std / n**0.5  # in this order, to the last digit
    with np.errstate(divide="ignore", invalid="ignore"):  # values without any spread
        p = 2 * float(stdtr(n - 1, -np.abs(np.float64(mean) / error)))
    return Estimate(n=n, value=mean, std=std, low=mean - half, high=mean + half, error=error, df=n - 1, p=p)


@lru_cache(maxsize=256)  # it takes longer than the rest of a mean
def _quantile(probability: float, df: int) -> float:
    """Of Student's t."""
    from scipy import stats  # here, because it takes most of a second

    return float(stats.t.ppf(probability, df))


def by_condition(runs: pd.DataFrame, response: str, level: float = LEVEL) -> pd.DataFrame:
    """Per condition, in the order of first appearance: n, mean, std and the ends of the interval of a column."""
    rows = {
        condition: mean_interval(group[response], level).as_mean()
        for condition, group in runs.groupby("condition", sort=False)
    }
    columns = ["n", "mean", "std", "low", "high"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("condition").reset_index()


def paired_difference(
    runs: pd.DataFrame, condition: str, reference: str, response: str, level: float = LEVEL
) -> Estimate:
    """`condition` minus `reference`, over the seeds both have.

    A seed fixes the initial weights and the order of the images, so runs of one seed belong together: the differences
    are taken within seeds, and their spread is the spread of the effect.
    """
    # Only the two that are asked for: made-up studies are compared by the thousand.
    return difference_of(
        by_seed(runs[runs["condition"].isin((condition, reference))], response), condition, reference, level
    )


def by_seed(runs: pd.DataFrame, response: str) -> pd.DataFrame:
    """A row per seed, a column per condition."""
    places = runs.set_index(["seed", "condition"])[response]
    if places.index.has_duplicates:
        return runs.pivot_table(index="seed", columns="condition", values=response)
    return places.unstack("condition").dropna(how="all").dropna(axis="columns", how="all")


def difference_of(values: pd.DataFrame, condition: str, reference: str, level: float = LEVEL) -> Estimate:
    """As `paired_difference`, from what `by_seed` gives: where many pairs are asked for, once for all of them."""
    if condition not in values or reference not in values:
        return mean_interval([], level)
    return mean_interval((values[condition] - values[reference]).dropna(), level)


def layer_responses(heads: pd.DataFrame) -> pd.DataFrame:
    """Per run and layer: mean and smallest distance, mean and smallest entropy over the layer's heads."""
    groups = heads.groupby(["run", "layer"], sort=False)
    columns = {"mean_mad": ("mad", "mean"), "min_mad": ("mad", "min"), "max_mad": ("mad", "max")}
    columns |= {"mean_entropy": ("entropy", "mean"), "min_entropy": ("entropy", "min")}
    return groups.agg(**columns).reset_index()


def sorted_heads(heads: pd.DataFrame, column: str) -> pd.DataFrame:
    """The heads with their `rank` in their layer, from 0 for the smallest value of the column.

    Heads have no order of their own: the first head of one seed has nothing to do with the first of another. Their
    ranks can be compared (S1 sorts so in its Figure 1).
    """
    ordered = heads.dropna(subset=[column]).sort_values(["run", "layer", column], kind="stable")
    return ordered.assign(rank=ordered.groupby(["run", "layer"]).cumcount())


def energy_distance(a: ArrayLike, b: ArrayLike) -> float:
    """How different two clouds of points are: twice their mean distance minus the mean distances within each.

    0 for equal clouds, and only for these (Székely and Rizzo, 2013). Rows are points, columns coordinates.
    """
    from scipy.spatial.distance import cdist  # here, because it takes half a second

    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    between, within_a, within_b = (cdist(x, y).mean() for x, y in ((first, second), (first, first), (second, second)))
    return float(2 * between - within_a - within_b)


def dissociations(
    runs: pd.DataFrame, *, accuracy_margin: float = ACCURACY_MARGIN, locality_margin: float = LOCALITY_MARGIN
) -> pd.DataFrame:
    """Every pair of conditions: how far they differ in test accuracy and in their smallest distance, and which differ.

    Two conditions are close where their mean difference over the seeds they share is at most the margin, and they
    differ where it is more and its interval excludes 0. The ends of the interval stand beside it (NaN with one seed,
    which has to do without): with few seeds "close" is not "shown to be equal".
    """
    rows = []
    kinds = {
        ("close", "different"): SAME_ACCURACY,
        ("different", "close"): SAME_LOCALITY,
        ("different", "different"): TOGETHER,
        ("close", "close"): ALIKE,
    }
    accuracies, distances = by_seed(runs, "test_acc"), by_seed(runs, "min_mad")
    for first, second in combinations(dict.fromkeys(runs["condition"]), 2):
        accuracy, locality = (difference_of(values, second, first) for values in (accuracies, distances))
        if accuracy.n == 0:
            continue
        found = (_distance(accuracy, accuracy_margin), _distance(locality, locality_margin))
        rows.append(
            {
                "first": first,
                "second": second,
                "n": accuracy.n,
                "test_acc_difference": accuracy.value,
                "test_acc_low": accuracy.low,
                "test_acc_high": accuracy.high,
                "min_mad_difference": locality.value,
                "min_mad_low": locality.low,
                "min_mad_high": locality.high,
                "kind": kinds.get(found, UNSURE),
            }
        )
    return pd.DataFrame(rows)


def _distance(difference: Estimate, margin: float) -> str:
    if abs(difference.value) <= margin:
        return "close"
    is_sure = difference.excludes_zero if difference.has_interval else np.isfinite(difference.value)
    return "different" if is_sure else "unsure"


def correlations(runs: pd.DataFrame, factor: str, levels: Sequence[str]) -> pd.DataFrame:
    """Test accuracy against the smallest distance over runs: all of them, then those at each level of the factor.

    A factor that moves both makes them correlate over all runs; what is left within a level is the link itself.
    """
    from scipy import stats  # here, because it takes most of a second

    groups = {"all runs": runs} | {f"{factor}: {level}": runs[runs[factor] == level] for level in levels}
    rows = []
    for name, group in groups.items():
        known = len(group) > 2 and all(np.ptp(group[column]) > 0 for column in ("test_acc", "min_mad"))
        pearson = stats.pearsonr(group["test_acc"], group["min_mad"]) if known else (np.nan, np.nan)
        spearman = stats.spearmanr(group["test_acc"], group["min_mad"]) if known else (np.nan, np.nan)
        rows.append((name, len(group), *map(float, pearson), *map(float, spearman)))
    return pd.DataFrame(rows, columns=["group", "n", "pearson", "pearson_p", "spearman", "spearman_p"])
