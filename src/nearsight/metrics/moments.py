"""Mean and standard deviation over images, one batch at a time.

Shape suffixes: S parts of the data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a stream of equally shaped arrays, in float64.

    Kept as deviations from the mean rather than as a sum of squares, which would cancel when all images agree. Of no
    arrays at all, mean and standard deviation are NaN.
    """

    count: int
    mean: Array
    squared_deviations: Array

    @classmethod
    def of(cls, values: ArrayLike) -> Self:
        """The moments of `values` over their first axis."""
        array = np.asarray(values, dtype=np.float64)
        mean = array.mean(axis=0) if len(array) else np.full(array.shape[1:], np.nan)
        return cls(array.shape[0], mean, ((array - mean) ** 2).sum(axis=0))

    def merge(self, *others: Self) -> Self:
        """The moments of all the data, from those of disjoint parts of it (Chan, Golub and LeVeque 1979).

        The same bits in whatever order the parts are given at once; those that are empty change nothing.
        """
        parts = [part for part in (self, *others) if part.count]
        if not parts:
            return self
        counts = [part.count for part in parts]
        means_S = np.stack([part.mean for part in parts])
        mean = merged_means(means_S, counts)
        between_S = (means_S - mean) ** 2 * _along(counts, means_S)
        within_S = np.stack([part.squared_deviations for part in parts])
        return type(self)(sum(counts), mean, _sums(np.concatenate([within_S, between_S])))

    @property
    def std(self) -> Array:
        """Standard deviation of the images seen (divided by their number, not by one less)."""
        return np.sqrt(self.squared_deviations / (self.count or np.nan))


def merged_means(means_S: Array, counts: Sequence[int]) -> Array:
    """Means over all the data, from those of parts with so many members; what all parts agree on stays as it is."""
    filled = np.array(counts) > 0
    if not filled.any():
        return np.full(means_S.shape[1:], np.nan)
    means_S, counts = means_S[filled], [count for count in counts if count]
    least = means_S.min(0)
    mean: Array = least + _sums((means_S - least) * _along(counts, means_S)) / sum(counts)
    return mean


def _along(counts: Sequence[int], values_S: Array) -> Array:
    """One for each part, to multiply with."""
    return np.array(counts, dtype=np.float64).reshape(-1, *[1] * (values_S.ndim - 1))


def _sums(terms_S: Array) -> Array:
    """Over the parts, each sum rounded once: so it does not depend on the order of its terms."""
    if len(terms_S) <= 2:
        return np.asarray(terms_S.sum(0))
    rows = terms_S.reshape(len(terms_S), -1).T.tolist()
    return np.array([math.fsum(row) for row in rows]).reshape(terms_S.shape[1:])
