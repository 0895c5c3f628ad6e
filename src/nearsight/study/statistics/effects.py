"""Ordinary least squares: any fit to all runs at once, and main effects and interactions of two-level factors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.study.statistics.intervals import LEVEL, Estimate

Term = tuple[str, ...]
Array = NDArray[np.float64]
COLUMNS = ("term", "order", "coefficient", "effect", "standard_error", "t", "p", "low", "high")
# As a share of the largest value: far above what arithmetic leaves, far below what runs differ by.
ROUNDING = 1e-12
UNBALANCED = (
    "conditions have unequal numbers of runs: the fit makes up for it, so that its effects are not the differences "
    "between the plain means of the runs"
)


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
        return Estimate(value=value, low=value - half, high=value + half, error=float(error), df=self.residual_df, p=p)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Effects:
    """What each factor, and each combination of factors, does to one response."""

    response: str
    table: pd.DataFrame
    """A row per term. Levels are coded −1 and +1. `effect` is twice the coefficient: for a factor, the mean with it
    minus the mean without it; for an interaction, half of how much one factor changes the other's effect. Standard
    error, t, p and the interval belong to the effect; they are NaN where no run is left over to estimate the noise."""
    mean: float
    """The intercept: the mean over the design's cells."""
    num_runs: int
    residual_df: int
    """Runs left over to estimate the noise."""
    residuals: Array
    """What the fit leaves of each run."""
    notes: tuple[str, ...]
    """What was left out, and why; and where effects are no plain differences of means."""


def factorial_effects(
    runs: pd.DataFrame, factors: Mapping[str, Sequence[str]], response: str, level: float = LEVEL
) -> Effects:
    """Fit all main effects and interactions that the runs can distinguish, with seeds as replicates.

    Where there are too few runs for all terms and an estimate of the noise, or where terms are aliased (a fraction of
    the design, or missing runs), the highest orders are left out until the rest can be estimated; `notes` says so.
    """
    coded = {name: _coded(runs, name, levels) for name, levels in factors.items()}
    values = runs[response].to_numpy(dtype=np.float64)
    constant = [name for name, signs in coded.items() if np.unique(signs).size < 2]
    notes = [f"{name} does not vary among these runs and is left out" for name in constant]
    varying = [name for name in coded if name not in constant]
    for order in range(len(varying), 0, -1):
        terms = [term for size in range(1, order + 1) for term in combinations(varying, size)]
        design = np.column_stack([np.ones(len(values)), *(np.prod([coded[n] for n in term], axis=0) for term in terms)])
        problem = _problem(design, main_effects_only=order == 1)
        if problem is None:
            return _fit(response, values, terms, design, level, tuple(notes))
        words = "main effects" if order == 1 else f"interactions of {order} factors"
        notes.append(f"{words} are left out: {problem}")
    return _fit(response, values, [], np.ones((len(values), 1)), level, tuple(notes))


def _coded(runs: pd.DataFrame, name: str, levels: Sequence[str]) -> Array:
    if len(levels) != 2:
        raise InputError(f"factor {name!r} has {len(levels)} levels, but effects are coded for two")
    unknown = sorted(set(runs[name]) - set(levels))
    if unknown:
        raise InputError(f"factor {name!r} has the levels {', '.join(levels)}, but a run has {unknown[0]!r}")
    return np.where(runs[name].to_numpy() == levels[1], 1.0, -1.0)


def _problem(design: Array, *, main_effects_only: bool) -> str | None:
    """Why this model cannot be fitted, in words; None where it can."""
    num_runs, num_parameters = design.shape
    if num_runs < num_parameters:
        return f"{num_runs} runs cannot estimate {num_parameters} parameters"
    if np.linalg.matrix_rank(design) < num_parameters:
        return "with the conditions that were run they cannot be distinguished from other terms"
    # Without main effects nothing is left to say, so they stay even where their noise cannot be estimated.
    if num_runs == num_parameters and not main_effects_only:
        return f"{num_runs} runs for {num_parameters} parameters leave none to estimate the noise"
    return None


def _fit_without_rounding(design: Array, values: Array) -> tuple[Array, Array]:
    """Coefficients and residuals of least squares; what rounding leaves of either counts as nothing.

    Runs that agree to the last digit, as those of a factor that never acted, would otherwise have an effect of 1e-17
    with a noise of 1e-18, and a p-value of their own.
    """
    coefficients = np.asarray(np.linalg.lstsq(design, values)[0], dtype=np.float64)
    residuals: Array = values - design @ coefficients
    rounding = ROUNDING * float(np.abs(values).max(initial=0.0))
    coefficients[np.abs(coefficients) <= rounding] = 0.0
    residuals[np.abs(residuals) <= rounding] = 0.0
    return coefficients, residuals


def _are_plain_differences(terms: Sequence[Term], design: Array) -> bool:
    """Whether each factor's effect is the mean of the runs with it minus that of those without: then no other term
    differs between the two groups."""
    for place in (place for place, term in enumerate(terms, start=1) if len(term) == 1):
        has = design[:, place] > 0
        apart = design[has].mean(axis=0) - design[~has].mean(axis=0)
        if np.abs(np.delete(apart, place)).max() > ROUNDING:
            return False
    return True


def _fit(
    response: str,
    values: Array,
    terms: Sequence[Term],
    design: Array,
    level: float,
    notes: tuple[str, ...],
) -> Effects:
    if not _are_plain_differences(terms, design):
        notes = (*notes, UNBALANCED)
    coefficients, residuals = _fit_without_rounding(design, values)
    residual_df = len(values) - design.shape[1]
    if residual_df == 0:
        notes = (*notes, "no run is left over to estimate the noise: estimates without interval")
    noise = float(np.sum(residuals**2)) / residual_df if residual_df else float("nan")
    names = ("mean", *(" × ".join(term) for term in terms))
    covariance: Array = np.full((len(names), len(names)), np.nan)
    if residual_df:
        covariance = np.asarray(noise * np.linalg.inv(design.T @ design), dtype=np.float64)
    fit = LeastSquares(
        names=names, coefficients=coefficients, covariance=covariance, noise=noise, residual_df=residual_df
    )
    rows = []
    for name, term, coefficient in zip(names[1:], terms, coefficients[1:], strict=True):
        effect = fit.estimate({name: 2.0}, level)
        with np.errstate(divide="ignore", invalid="ignore"):  # runs without any noise
            t = np.float64(effect.value) / effect.error
        rows.append((name, len(term), coefficient, effect.value, effect.error, t, effect.p, effect.low, effect.high))
    return Effects(
        response=response,
        table=pd.DataFrame(rows, columns=list(COLUMNS)),
        mean=float(coefficients[0]),
        num_runs=len(values),
        residual_df=residual_df,
        residuals=residuals,
        notes=notes,
    )
