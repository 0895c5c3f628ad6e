"""What one factor does where another already does it: the question that no paper asked of CutMix and LocAt."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.least_squares import LeastSquares, least_squares
from nearsight.report.study.rules import CLEARLY_LESS
from nearsight.report.study.table import share
from nearsight.study.statistics import Effects, factorial_effects


class Answer(StrEnum):
    """Does the factor still do it where the other already does?"""

    STILL = "yes, still"
    LESS = "yes, but less"
    NOT = "not any more"
    REVERSED = "reversed"
    UNDECIDED = "undecided"
    NOT_EVEN_ALONE = "not even alone"


ANSWERS = (
    "*Beside the other.* The factor's effect without the other, its effect with it, and their difference (the "
    "interaction), each with its 95 % interval: ordinary least squares over all runs of the factorial, seeds as "
    "replicates. Where the other is one factor, effects are means over the third; where it is two (LocAt is GAug and "
    "PRR), the models with neither and with both are compared. An effect is sure where its interval excludes 0; it "
    f"shrinks where the difference is sure and goes against the effect without. *{Answer.NOT_EVEN_ALONE}*: the "
    "effect without the other is not sure, or goes the other way, so that there is nothing to keep. "
    f"*{Answer.REVERSED}*: with the other it is "
    f"sure and goes the other way. *{Answer.NOT}*: it shrinks, and with the other its interval holds 0 and is within "
    f"{share(CLEARLY_LESS)} of the effect without. *{Answer.LESS}*: it shrinks, but is not shown to be gone. "
    f"*{Answer.STILL}*: with the other it is sure, and it does not surely shrink. *{Answer.UNDECIDED}*: neither that "
    "it is left nor that it shrinks is sure."
)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A difference with its interval, whose ends are NaN where no run is left over to estimate the noise."""

    value: float
    low: float
    high: float
    n: int
    """The runs, or pairs of runs, that it comes from."""

    def is_sure(self, sign: int) -> bool:
        return self.low > 0 if sign > 0 else self.high < 0

    @property
    def reach(self) -> float:
        """How large it may be, on either side."""
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What a factor does to a response without another factor and with it."""

    without: Effect
    with_other: Effect
    change: Effect
    """The second minus the first: the interaction."""
    p: float
    """Of the change."""

    def answer(self, sign: int) -> Answer:
        """`sign`: which way the factor is expected to move the response."""
        if not self.without.is_sure(sign):
            return Answer.NOT_EVEN_ALONE
        if self.with_other.is_sure(-sign):
            return Answer.REVERSED
        if self.change.is_sure(-sign):
            gone = not self.with_other.is_sure(sign)
            small = self.with_other.reach <= CLEARLY_LESS * abs(self.without.value)
            return Answer.NOT if gone and small else Answer.LESS
        return Answer.STILL if self.with_other.is_sure(sign) else Answer.UNDECIDED


def beside(
    runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], response: str, *, factor: str, other: str
) -> Beside:
    """Fitted to all runs with seeds as replicates; each effect of one level of the other to the runs of that level.

    An `InputError` says what cannot be told apart with the runs there are.
    """
    _check_known(runs, response)
    both = " × ".join(name for name in factors if name in (factor, other))
    fitted = factorial_effects(runs, factors, response)
    rest = {name: levels for name, levels in factors.items() if name != other}
    without, with_other = (
        _effect(factorial_effects(runs[runs[other] == level], rest, response), factor) for level in factors[other]
    )
    return Beside(
        without=without,
        with_other=with_other,
        # The table's effect of an interaction is half of what one factor changes in the other's.
        change=_effect(fitted, both, scale=2.0),
        p=float(_row(fitted, both)["p"]),
    )


def beside_together(
    runs: pd.DataFrame,
    factors: dict[str, tuple[str, ...]],
    response: str,
    *,
    factor: tuple[str, ...],
    other: tuple[str, ...],
) -> Beside:
    """The same of factors that come and go together, where each factor is one of these or of the others: four cells of
    the factorial, with the noise within all of its cells."""
    _check_known(runs, response)
    fitted = cell_means(runs, factors, response)

    def effect(*on: str) -> dict[str, float]:
        ends = {name: (levels[-1] if name in on else levels[0]) for name, levels in factors.items()}
        lasts = {name: factors[name][-1] for name in factor}
        return {cell_name({**ends, **lasts}.values()): 1.0, cell_name(ends.values()): -1.0}

    without, with_other = effect(), effect(*other)
    change = fitted.estimate({**with_other, **{cell: -weight for cell, weight in without.items()}})
    told = [
        Effect(value=one.value, low=one.low, high=one.high, n=len(runs))
        for one in (fitted.estimate(without), fitted.estimate(with_other), change)
    ]
    return Beside(without=told[0], with_other=told[1], change=told[2], p=change.p)


def cell_name(levels: Iterable[str]) -> str:
    return ", ".join(levels)


def cell_means(runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], response: str) -> LeastSquares:
    """A mean per cell of the factorial, by `cell_name`, with one noise for all cells and seeds as replicates."""
    names = [cell_name(levels) for levels in runs[list(factors)].itertuples(index=False)]
    return least_squares(pd.get_dummies(pd.Series(names, index=runs.index), dtype=float), runs[response])


def _check_known(runs: pd.DataFrame, response: str) -> None:
    if not np.isfinite(runs[response]).all():
        raise InputError(f"{response} is not known of every run")


def _effect(effects: Effects, term: str, scale: float = 1.0) -> Effect:
    row = _row(effects, term)
    value, low, high = (scale * float(row[column]) for column in ("effect", "low", "high"))
    return Effect(value=value, low=low, high=high, n=effects.num_runs)


def _row(effects: Effects, term: str) -> "pd.Series[float]":
    found = effects.table[effects.table["term"] == term]
    if found.empty:
        reasons = "; ".join(effects.notes)
        raise InputError(f"the effect of {term} cannot be estimated yet{f': {reasons}' if reasons else ''}")
    return found.iloc[0]
