"""What is shown, and how many seeds would show it: tests that respect how few seeds there are.

Seeds are clusters: whatever is compared is first taken within each seed, and a seed counts once, however many runs it
has. Small p-values speak for a statement; `holm` corrects those of a family of statements.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from nearsight.study.statistics.intervals import LEVEL, Estimate

ALPHA = 1 - LEVEL
MOST_SEEDS = 100
"""More are not looked for: a question that takes more seeds than this is another question."""


def holm(ps: Sequence[float]) -> list[float]:
    """Each p-value corrected for all of them (Holm, 1979): the probability of any false discovery stays below it.

    The smallest counts as often as there are p-values, the next one time less, and none becomes smaller than one before
    it. What is no number is no test, and stays what it is.
    """
    tested = sorted((p, place) for place, p in enumerate(ps) if not math.isnan(p))
    corrected, so_far = list(ps), 0.0
    for rank, (p, place) in enumerate(tested):
        so_far = max(so_far, min(1.0, p * (len(tested) - rank)))
        corrected[place] = so_far
    return corrected


def p_above(estimate: Estimate, bound: float) -> float:
    """One-sided: small where the true value is above the bound; 1 without a spread, as for a single seed."""
    from scipy.special import stdtr  # the t distribution, a hundred times as fast as that of scipy.stats

    if not estimate.df > 0:
        return 1.0
    apart = estimate.value - bound
    if estimate.error == 0:  # seeds without any spread
        return 0.0 if apart > 0 else 1.0
    return float(stdtr(estimate.df, -apart / estimate.error))


def p_below(estimate: Estimate, bound: float) -> float:
    return p_above(replace(estimate, value=-estimate.value), -bound)


def p_within(estimate: Estimate, lowest: float, highest: float) -> float:
    """Small where the true value is shown to lie between two margins, either of which may be infinite: two one-sided
    tests (TOST; Schuirmann, 1987)."""
    sides = [p_above(estimate, lowest)] if math.isfinite(lowest) else []
    return max([*sides, *([p_below(estimate, highest)] if math.isfinite(highest) else [])])


def p_outside(estimate: Estimate, lowest: float, highest: float) -> float:
    """Small where it is shown to lie outside of them."""
    sides = [p_below(estimate, lowest)] if math.isfinite(lowest) else []
    return min([*sides, *([p_above(estimate, highest)] if math.isfinite(highest) else [])])


def p_of_sign(estimate: Estimate, sign: int) -> float:
    """Two-sided, of a value with this sign; 1 where it has the other one."""
    one_sided = p_above(estimate, 0.0) if sign > 0 else p_below(estimate, 0.0)
    return 1.0 if estimate.value * sign <= 0 else min(1.0, 2 * one_sided)


def p_of_most(num_holding: int, n: int) -> float:
    """Of something that holds in so many of n seeds, small where it holds in more than half of all seeds: the exact
    sign test. Five seeds of five give 0.03, and fewer can show nothing."""
    from scipy import stats  # here, because it takes most of a second

    return float(stats.binom.sf(num_holding - 1, n, 0.5)) if n else 1.0


def share_interval(holds: Iterable[float]) -> Estimate:
    """How often something held, with Clopper and Pearson's interval: of seeds, ten of which are not a hundred."""
    from scipy import stats  # here, because it takes most of a second

    values = [bool(value) for value in holds]
    if not values:
        return Estimate(value=np.nan)
    found = stats.binomtest(sum(values), len(values)).proportion_ci()
    return Estimate(n=len(values), value=sum(values) / len(values), low=float(found.low), high=float(found.high))


def p_of_rates(events: int, exposure: float, other_events: int, other_exposure: float) -> float:
    """Of events that happen at any time of training, small where they come more often, in the time there was for them
    (epochs), than in the other runs: given how many there are, each falls to either side by its share of the time
    (Przyborowski and Wilenski, 1940). One-sided and exact for events that come independently at a constant rate."""
    from scipy import stats  # here, because it takes most of a second

    total = events + other_events
    if not total or exposure + other_exposure <= 0:
        return 1.0
    return float(stats.binom.sf(events - 1, total, exposure / (exposure + other_exposure)))


def with_seeds(estimate: Estimate, n: int) -> Estimate:
    """The same value and spread from n seeds."""
    error = estimate.error * math.sqrt(estimate.n / n)
    # The noise of a fit is learned from all its runs, of which every further seed brings as many.
    df = estimate.df * (n - 1) / (estimate.n - 1) if estimate.n > 1 else float("nan")
    return Estimate(value=estimate.value, n=n, std=estimate.std, error=error, df=df)


def seeds_to_show(is_shown: Callable[[int], bool], n: int) -> int | None:
    """The least number of seeds, from n on, with which something would be shown; None: more than are looked for."""
    return next((number for number in range(max(n, 2), MOST_SEEDS + 1) if is_shown(number)), None)
