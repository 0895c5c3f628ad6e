"""Spearman's rank correlation of a few runs, with a p-value that needs no large numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from nearsight.study.statistics.intervals import LEVEL

# All orders are counted where they are no more than this: of up to 7 runs. Else so many are drawn.
NUM_ORDERS = 9999
_NUMBERS_AT_ONCE = 2**18
FEWEST = 3
"""Runs: of two, one is always the larger."""
METHOD = (
    "Rank correlation: Spearman's. Its p-value is two-sided, from permutations of the pairing: all of them for up to 7 "
    f"runs, else {NUM_ORDERS:,} drawn at random with a fixed seed; n runs can give no p below 2/n!. Its 95 % interval "
    "is that of Fisher's z with the variance of Bonett and Wright (2000), which is rough for so few runs."
)


WITHIN = (
    "Within conditions: both numbers minus their mean over the runs of the condition, and permutations only among the "
    "runs of a condition, so that what distinguishes the conditions makes no link."
)


@dataclass(frozen=True, kw_only=True)
class RankCorrelation:
    """NaN where it is not defined: of too few runs, of values that are all equal, or where one is no number."""

    value: float
    low: float
    high: float
    p: float
    n: int
    exact: bool
    """All orders were counted."""


def rank_correlation(first: ArrayLike, second: ArrayLike, level: float = LEVEL) -> RankCorrelation:
    from scipy import stats  # here, because it takes most of a second

    one, other = (stats.rankdata(values) for values in (first, second))
    n = one.size
    # A value that is no number leaves all ranks without one.
    if n < FEWEST or not np.ptp(one) > 0 or not np.ptp(other) > 0:
        return RankCorrelation(value=math.nan, low=math.nan, high=math.nan, p=math.nan, n=n, exact=False)

    def products(ranks: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        """Another order of the ranks changes nothing else in the correlation. Half ranks have exact sums."""
        sums: NDArray[np.float64] = (ranks * other).sum(axis=axis)
        return sums

    test = stats.permutation_test(
        (one,),
        products,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=NUM_ORDERS,
        batch=max(1, _NUMBERS_AT_ONCE // n),
        random_state=np.random.default_rng(0),
    )
    value = float(np.corrcoef(one, other)[0, 1])
    low, high = _interval(value, n, level)
    exact = math.factorial(n) <= NUM_ORDERS
    return RankCorrelation(value=value, low=low, high=high, p=float(test.pvalue), n=n, exact=exact)


def _interval(value: float, n: int, level: float) -> tuple[float, float]:
    """None of a perfect order, or of fewer than four runs."""
    from scipy import stats  # here, because it takes most of a second

    if n < 4 or abs(value) > 1 - 1e-12:
        return math.nan, math.nan
    half = float(stats.norm.ppf((1 + level) / 2)) * math.sqrt((1 + value**2 / 2) / (n - 3))
    return math.tanh(math.atanh(value) - half), math.tanh(math.atanh(value) + half)


def rank_correlation_within(first: ArrayLike, second: ArrayLike, blocks: Sequence[str]) -> RankCorrelation:
    """What is left of a rank correlation among runs that agree in their block, such as their condition; no interval."""
    from scipy import stats  # here, because it takes most of a second

    table = pd.DataFrame(
        {"first": np.asarray(first, float), "second": np.asarray(second, float), "block": list(blocks)}
    )
    centred = table[["first", "second"]] - table.groupby("block")[["first", "second"]].transform("mean")
    # What is left of equal numbers is rounding, which has no order.
    one, other = (stats.rankdata(np.round(centred[name] / (np.abs(table[name]).max() or 1.0), 12)) for name in centred)
    n, members = len(table), [np.asarray(block) for block in table.groupby("block").indices.values()]
    if n < FEWEST or not np.ptp(one) > 0 or not np.ptp(other) > 0:
        return RankCorrelation(value=math.nan, low=math.nan, high=math.nan, p=math.nan, n=n, exact=False)
    value = float(np.corrcoef(one, other)[0, 1])
    num_orders = math.prod(math.factorial(len(block)) for block in members)
    exact = num_orders <= NUM_ORDERS
    orders = _all_orders(members) if exact else islice(_drawn_orders(members), NUM_ORDERS)
    found = [abs(float(np.corrcoef(one, other[order])[0, 1])) >= abs(value) - 1e-12 for order in orders]
    p = sum(found) / num_orders if exact else (1 + sum(found)) / (1 + NUM_ORDERS)
    return RankCorrelation(value=value, low=math.nan, high=math.nan, p=p, n=n, exact=exact)


Order = NDArray[np.intp]


def _all_orders(members: Sequence[Order]) -> Iterator[Order]:
    order = np.arange(sum(map(len, members)))
    for parts in product(*(permutations(block) for block in members)):
        for block, part in zip(members, parts, strict=True):
            order[block] = part
        yield order


def _drawn_orders(members: Sequence[Order]) -> Iterator[Order]:
    random, order = np.random.default_rng(0), np.arange(sum(map(len, members)))
    while True:
        for block in members:
            order[block] = random.permutation(block)
        yield order
