"""Streaming mean and deviation against numpy on all the data at once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.metrics import Moments
from nearsight.metrics.moments import merged_means


@settings(max_examples=50)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any), st.integers(0, 2**32 - 1))
def test_any_grouping_gives_the_moments_of_all(sizes: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(5, 2, size=(sum(sizes), 2, 3))
    pieces = [Moments.of(part) for part in np.split(values, np.cumsum(sizes)[:-1])]
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = merged.merge(piece)
    at_once, backwards = pieces[0].merge(*pieces[1:]), pieces[-1].merge(*pieces[-2::-1])
    for found in (merged, at_once):
        assert found.count == len(values)
        np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-13)
        np.testing.assert_allclose(found.std, values.std(0), rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(at_once.mean, backwards.mean)
    np.testing.assert_array_equal(at_once.std, backwards.std)


def test_no_images_have_no_mean() -> None:
    nothing = Moments.of(np.empty((0, 2)))
    for moments in (nothing, nothing.merge(nothing)):
        assert moments.count == 0
        assert np.isnan(moments.mean).all()
        assert np.isnan(moments.std).all()
    np.testing.assert_array_equal(merged_means(np.array([[np.nan], [3.0], [5.0]]), [0, 3, 1]), [3.5])
    assert np.isnan(merged_means(np.array([[np.nan], [3.0]]), [0, 0])).all()


def test_a_tiny_deviation_on_a_large_mean_does_not_cancel() -> None:
    values = 1e6 + np.array([[0.0], [1e-4]]).repeat(500, 0)
    streamed = Moments.of(values[:300]).merge(Moments.of(values[300:]))
    np.testing.assert_allclose(streamed.std, values.std(0), rtol=1e-5)


def test_nan_padding_stays_nan_and_does_not_spread() -> None:
    values = np.array([[1.0, np.nan], [3.0, np.nan]])
    moments = Moments.of(values[:1]).merge(Moments.of(values[1:]))
    assert moments.mean[0] == 2
    assert moments.std[0] == 1
    assert np.isnan(moments.mean[1])
