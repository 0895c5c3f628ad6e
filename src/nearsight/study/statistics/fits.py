"""Ordinary least squares: estimates from all runs at once, with one noise for all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.study.statistics.intervals import LEVEL, Estimate


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastSquares:
    """Ordinary least squares of one response on columns of numbers."""

    names: tuple[str, ...]
    coefficients: NDArray[np.float64]
    covariance: NDArray[np.float64]
    """Of the coefficients; NaN where no run is left over to estimate the noise from."""
    noise: float
    """Variance of a run about the fit; NaN in the same case."""
    residual_df: int

    def estimate(self, weights: Mapping[str, float], level: float = LEVEL) -> Estimate:
        """A weighted sum of coefficients."""
        from scipy import stats  # here, because it takes most of a second

        for name in weights:
            if name not in self.names:
                raise InputError(f"no run has {name}")
        weight = np.array([weights.get(name, 0.0) for name in self.names])
        value = float(weight @ self.coefficients)
        if self.residual_df == 0:
            return Estimate(value=value)
        error = np.sqrt(weight @ self.covariance @ weight)
        with np.errstate(divide="ignore", invalid="ignore"):  # runs without any noise
            p = 2 * float(stats.t.sf(np.abs(value / error), self.residual_df))
        half = float(stats.t.ppf((1 + level) / 2, self.residual_df)) * float(error)
        return Estimate(value=value, low=value - half, high=value + half, error=float(error), p=p)


def least_squares(columns: pd.DataFrame, values: Sequence[float] | pd.Series) -> LeastSquares:
    """Fit the values (a row per run) by the columns. Columns whose effects cannot be separated are an `InputError`."""
    design, response = columns.to_numpy(dtype=np.float64), np.asarray(values, dtype=np.float64)
    num_runs, num_columns = design.shape
    if np.linalg.matrix_rank(design) < num_columns:
        raise InputError("its effects cannot be separated by these runs")
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ response
    residual_df = num_runs - num_columns
    noise = float(np.sum((response - design @ coefficients) ** 2)) / residual_df if residual_df else float("nan")
    names = tuple(map(str, columns.columns))
    return LeastSquares(
        names=names, coefficients=coefficients, covariance=noise * inverse, noise=noise, residual_df=residual_df
    )
