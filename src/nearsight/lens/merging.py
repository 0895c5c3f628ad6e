"""Means and deviations of parts together: the same bits in whatever order the parts come.

Shape suffixes: S parts.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearsight.metrics.moments import Moments

Array = NDArray[np.float64]


def merged_moments(parts: Sequence[Moments]) -> Moments:
    """The moments of all the data, from those of disjoint parts of it (Chan, Golub and LeVeque 1979)."""
    counts = [part.count for part in parts]
    means_S = np.stack([part.mean for part in parts])
    mean = merged_means(means_S, counts)
    between_S = (means_S - mean) ** 2 * _along(counts, means_S)
    within_S = np.stack([part.squared_deviations for part in parts])
    return Moments(sum(counts), mean, _sums(np.concatenate([within_S, between_S])))


def merged_means(means_S: Array, counts: Sequence[int]) -> Array:
    """Means over all the data, from those of parts with so many members; what all parts agree on stays as it is."""
    least = means_S.min(0)
    mean: Array = least + _sums((means_S - least) * _along(counts, means_S)) / sum(counts)
    return mean


def agreed(values_S: Array) -> Array:
    """What all parts say of each layer, which is the first axis of a part; NaN for a layer of which they differ."""
    differs = (values_S != values_S[0]).any(0)
    common: Array = values_S[0].copy()
    common[differs.any(tuple(range(1, differs.ndim)))] = np.nan
    return common


def _along(counts: Sequence[int], values_S: Array) -> Array:
    """One for each part, to multiply with."""
    return np.array(counts, dtype=np.float64).reshape(-1, *[1] * (values_S.ndim - 1))


def _sums(terms_S: Array) -> Array:
    """Over the parts, each sum rounded once: so it does not depend on the order of its terms."""
    if len(terms_S) <= 2:
        return np.asarray(terms_S.sum(0))
    rows = terms_S.reshape(len(terms_S), -1).T.tolist()
    return np.array([math.fsum(row) for row in rows]).reshape(terms_S.shape[1:])
