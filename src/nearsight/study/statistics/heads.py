"""From a run's heads to numbers per layer and to profiles."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike


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
