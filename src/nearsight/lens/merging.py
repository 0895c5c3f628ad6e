"""What parts of a measurement say together: the same bits in whatever order the parts come.

Shape suffixes: S parts.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearsight.metrics.moments import Moments, merged_means

__all__ = ["agreed", "merged_means", "merged_moments"]

Array = NDArray[np.float64]


def merged_moments(parts: Sequence[Moments]) -> Moments:
    """The moments of all the data, from those of disjoint parts of it, at least one."""
    first, *others = parts
    return first.merge(*others)


def agreed(values_S: Array) -> Array:
    """What all parts say of each layer, which is the first axis of a part; NaN for a layer of which they differ."""
    differs = (values_S != values_S[0]).any(0)
    common: Array = values_S[0].copy()
    common[differs.any(tuple(range(1, differs.ndim)))] = np.nan
    return common
