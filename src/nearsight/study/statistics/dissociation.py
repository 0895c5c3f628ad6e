"""Accuracy and locality: do they go together?"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from nearsight.study.statistics.intervals import MeanInterval, by_seed, difference_of

SAME_ACCURACY = "close accuracy, different locality"
SAME_LOCALITY = "close locality, different accuracy"
TOGETHER = "both differ"
ALIKE = "neither differs"
UNSURE = "not sure"
# In accuracy (a fraction) and in mean attention distance (a fraction of the grid's diagonal).
ACCURACY_MARGIN = 0.01
LOCALITY_MARGIN = 0.05


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
                "test_acc_difference": accuracy.mean,
                "test_acc_low": accuracy.low,
                "test_acc_high": accuracy.high,
                "min_mad_difference": locality.mean,
                "min_mad_low": locality.low,
                "min_mad_high": locality.high,
                "kind": kinds.get(found, UNSURE),
            }
        )
    return pd.DataFrame(rows)


def _distance(difference: MeanInterval, margin: float) -> str:
    if abs(difference.mean) <= margin:
        return "close"
    is_sure = difference.excludes_zero if difference.has_interval else np.isfinite(difference.mean)
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
