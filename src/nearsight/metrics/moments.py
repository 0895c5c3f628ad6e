"""Mean and standard deviation over images, one batch at a time."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a stream of equally shaped arrays, in float64.

    Kept as deviations from the mean rather than as a sum of squares, which would cancel when all images agree. Merging
    (Chan, Golub and LeVeque 1979) gives the moments of all the data, whatever pieces they came in.
    """

    count: int
    mean: Array
    squared_deviations: Array

    @classmethod
    def of(cls, values: ArrayLike) -> Self:
        """The moments of `values` over their first axis."""
        array = np.asarray(values, dtype=np.float64)
        mean = array.mean(axis=0)
        return cls(array.shape[0], mean, ((array - mean) ** 2).sum(axis=0))

    def merge(self, other: Self) -> Self:
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        squares = self.squared_deviations + other.squared_deviations + delta**2 * (self.count * other.count / count)
        return type(self)(count, mean, squares)

    @property
    def std(self) -> Array:
        """Standard deviation of the images seen (divided by their number, not by one less)."""
        return np.sqrt(self.squared_deviations / self.count)
