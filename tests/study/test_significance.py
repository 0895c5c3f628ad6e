"""Tests and corrections, against scipy's and against their definitions."""

import math
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nearsight.study.statistics import mean_interval
from nearsight.study.statistics.rank_correlation import rank_correlation, rank_correlation_within
from nearsight.study.statistics.significance import (
    MOST_SEEDS,
    holm,
    p_above,
    p_below,
    p_of_most,
    p_of_rates,
    p_of_sign,
    p_outside,
    p_within,
    seeds_to_show,
    share_interval,
    with_seeds,
)

VALUES = st.lists(st.floats(-3, 3).map(lambda value: round(value, 3)), min_size=2, max_size=8).filter(
    lambda values: np.std(values) > 1e-3
)
PS = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6)


@given(VALUES)
def test_a_mean_has_students_p(values: list[float]) -> None:
    found = mean_interval(values)
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-9)
    assert found.error == pytest.approx(stats.sem(values))
    assert found.df == len(values) - 1


@given(VALUES, st.floats(-2, 2))
def test_one_sided_tests_are_those_of_scipy(values: list[float], bound: float) -> None:
    found = mean_interval(values)
    for ours, side in ((p_above, "greater"), (p_below, "less")):
        assert ours(found, bound) == pytest.approx(stats.ttest_1samp(values, bound, alternative=side).pvalue, rel=1e-9)


@given(VALUES, st.floats(0.01, 3))
def test_equivalence_agrees_with_the_interval_of_twice_the_level(values: list[float], margin: float) -> None:
    """TOST at 5 % shows it exactly where the 90 % interval lies within the margins."""
    inner = mean_interval(values, level=0.9)
    if min(abs(abs(end) - margin) for end in (inner.low, inner.high)) > 1e-6:
        assert (p_within(inner, -margin, margin) <= 0.05) == (-margin < inner.low and inner.high < margin)
        outside = inner.high < -margin or inner.low > margin
        assert (p_outside(inner, -margin, margin) <= 0.05) == outside


@given(VALUES)
def test_without_one_margin_the_other_decides(values: list[float]) -> None:
    found = mean_interval(values)
    assert p_within(found, -1.0, math.inf) == p_above(found, -1.0)
    assert p_outside(found, -math.inf, 1.0) == p_above(found, 1.0)


@given(VALUES)
def test_a_sign_is_tested_on_both_sides(values: list[float]) -> None:
    found = mean_interval(values)
    right, wrong = sorted(p_of_sign(found, sign) for sign in (1, -1))
    assert wrong == 1.0
    assert right == pytest.approx(min(1.0, found.p))


def test_one_seed_shows_nothing_and_seeds_without_spread_show_all() -> None:
    one, equal = mean_interval([5.0]), mean_interval([5.0, 5.0, 5.0])
    assert p_of_sign(one, 1) == p_within(one, 4.0, 6.0) == 1.0
    assert p_of_sign(equal, 1) == 0.0
    assert p_of_sign(equal, -1) == p_above(equal, 6.0) == 1.0


@given(PS)
def test_holm_is_the_closed_test_of_bonferroni(ps: list[float]) -> None:
    """By definition: a claim is shown where every set of claims that it is in is, the least p times their number."""

    def closed(place: int) -> float:
        others = [each for each in range(len(ps)) if each != place]
        subsets = chain.from_iterable(combinations(others, size) for size in range(len(ps)))
        return max(min(1.0, (len(some) + 1) * min(ps[each] for each in (place, *some))) for some in subsets)

    assert holm(ps) == pytest.approx([closed(place) for place in range(len(ps))])


def test_what_was_not_tested_does_not_count() -> None:
    corrected = holm([0.01, math.nan, 0.03])
    assert corrected[0] == pytest.approx(0.02)
    assert math.isnan(corrected[1])
    assert corrected[2] == pytest.approx(0.03)


@given(st.integers(1, 20), st.data())
def test_most_seeds_by_the_sign_test(n: int, data: st.DataObject) -> None:
    holding = data.draw(st.integers(0, n))
    assert p_of_most(holding, n) == pytest.approx(stats.binomtest(holding, n, 0.5, alternative="greater").pvalue)


def test_five_of_five_seeds_are_the_fewest_that_show_something() -> None:
    assert p_of_most(4, 4) > 0.05 > p_of_most(5, 5)
    assert p_of_most(0, 0) == 1.0


@given(st.integers(0, 6), st.integers(0, 6), st.floats(1, 100), st.floats(1, 100))
def test_rates_given_their_number(events: int, others: int, time: float, other_time: float) -> None:
    expected = 1.0
    if events + others:
        share = time / (time + other_time)
        expected = stats.binomtest(events, events + others, share, alternative="greater").pvalue
    assert p_of_rates(events, time, others, other_time) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_shares_have_clopper_and_pearsons_interval(holds: list[bool]) -> None:
    found, successes, n = share_interval(holds), sum(holds), len(holds)
    low = 0.0 if successes == 0 else stats.beta.ppf(0.025, successes, n - successes + 1)
    high = 1.0 if successes == n else stats.beta.ppf(0.975, successes + 1, n - successes)
    assert (found.low, found.high) == pytest.approx((low, high))


@settings(max_examples=20, deadline=None)
@given(VALUES)
def test_seeds_that_would_show_it_are_the_first_that_do(values: list[float]) -> None:
    found = mean_interval(values)

    def is_shown(n: int) -> bool:
        """From the definition: Student's t of a mean with this spread."""
        return bool(2 * stats.t.sf(abs(found.value) / (found.std / n**0.5), n - 1) <= 0.05)

    needed = seeds_to_show(lambda n: with_seeds(found, n).value != 0 and is_shown(n), found.n)
    by_estimates = seeds_to_show(
        lambda n: min(p_of_sign(with_seeds(found, n), sign) for sign in (1, -1)) <= 0.05, found.n
    )
    assert needed == by_estimates
    if needed is None:
        assert not is_shown(MOST_SEEDS)
    else:
        assert is_shown(needed)
        assert needed == found.n or not is_shown(needed - 1)


def test_conditions_alone_make_no_link_within_them() -> None:
    """Two conditions far apart, and no order within either."""
    first, second = [1, 2, 3, 11, 12, 13], [10, 30, 20, 110, 130, 120]
    blocks = list("aaabbb")
    assert rank_correlation(first, second).value == pytest.approx(stats.spearmanr(first, second).statistic)
    within = rank_correlation_within(first, second, blocks)
    assert within.exact
    assert within.value == pytest.approx(0.5)
    assert within.p > 0.3


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from("ab")), min_size=4, max_size=6))
def test_within_blocks_by_loops(rows: list[tuple[int, int, str]]) -> None:
    first, second, blocks = (list(column) for column in zip(*rows, strict=True))

    def centred(values: list[int]) -> list[float]:
        means = {b: np.mean([v for v, c in zip(values, blocks, strict=True) if c == b]) for b in blocks}
        return [round(float(v - means[b]), 9) for v, b in zip(values, blocks, strict=True)]

    found = rank_correlation_within(first, second, blocks)
    one, other = centred(first), centred(second)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        assert math.isnan(found.value)
    else:
        assert found.value == pytest.approx(stats.spearmanr(one, other).statistic)
        assert 0 < found.p <= 1


def test_many_runs_are_drawn_from() -> None:
    random = np.random.default_rng(0)
    first = random.normal(size=30)
    found = rank_correlation_within(first, first + random.normal(size=30) / 10, ["a"] * 15 + ["b"] * 15)
    assert not found.exact
    assert found.p < 0.01
