"""What one factor does where another already does it: the question that no paper asked of CutMix and LocAt."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.least_squares import LeastSquares, least_squares
from nearsight.report.study.rules import CLEARLY_LESS
from nearsight.report.study.table import share


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
    "replicates. Where one factor is asked after beside one, effects are means over the third; LocAt is GAug and PRR, "
    "which come and go together. The noise is that of all runs, so an effect that seeds agree on can be less than sure "
    "here; its differences within seeds are in the table. An effect is sure where its interval excludes 0; it "
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
    runs: pd.DataFrame,
    factors: dict[str, tuple[str, ...]],
    response: str,
    *,
    factor: tuple[str, ...],
    other: tuple[str, ...],
) -> Beside:
    """Differences of means of the factorial's cells, with the noise within all of them.

    Several factors come and go together; over those that are in neither, means are taken. An `InputError` says what
    the runs there are cannot tell.
    """
    if not np.isfinite(runs[response]).all():
        raise InputError(f"{response} is not known of every run")
    fitted = cell_means(runs, factors, response)

    def mean(*on: str) -> dict[str, float]:
        """The weights of cells in the mean with these factors on, and the others of the question off."""
        ends = {name: (levels[-1] if name in on else levels[0],) for name, levels in factors.items()}
        rest = {name: levels for name, levels in factors.items() if name not in (*factor, *other)}
        cells = [cell_name(levels) for levels in product(*(ends | rest).values())]
        return dict.fromkeys(cells, 1 / len(cells))

    without = _minus(mean(*factor), mean())
    with_other = _minus(mean(*factor, *other), mean(*other))
    change = fitted.estimate(_minus(with_other, without))
    told = [
        Effect(value=one.value, low=one.low, high=one.high, n=len(runs))
        for one in (fitted.estimate(without), fitted.estimate(with_other), change)
    ]
    return Beside(without=told[0], with_other=told[1], change=told[2], p=change.p)


def _minus(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {cell: one.get(cell, 0.0) - other.get(cell, 0.0) for cell in {**one, **other}}


def cell_name(levels: Iterable[str]) -> str:
    return ", ".join(levels)


def cell_means(runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], response: str) -> LeastSquares:
    """A mean per cell of the factorial, by `cell_name`, with one noise for all cells and seeds as replicates."""
    names = [cell_name(levels) for levels in runs[list(factors)].itertuples(index=False)]
    return least_squares(pd.get_dummies(pd.Series(names, index=runs.index), dtype=float), runs[response])
