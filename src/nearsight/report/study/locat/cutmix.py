"""Does CutMix still make attention local where LocAt already does? And LocAt, where CutMix already does?"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from nearsight.report.study.claim import Claim
from nearsight.report.study.conditions import FACTOR_NAMES
from nearsight.report.study.locat.interaction import ANSWERS, Beside, Effect, beside
from nearsight.report.study.locat.measures import run_measures
from nearsight.report.study.rules import Finding
from nearsight.report.study.shares import known_shares
from nearsight.report.study.table import mean_and_ends, probability, rounded
from nearsight.study.results import StudyResults

CUTMIX, GAUG, PRR = "cutmix", "GAug", "PRR"
LOCAT = (GAUG, PRR)
SOURCE = "no paper asks it"


@dataclass(frozen=True, kw_only=True)
class Response:
    column: str
    title: str
    sign: int
    """Which way CutMix and LocAt are expected to move it."""
    tell: Callable[[Effect], str]


@dataclass(frozen=True)
class Way:
    """Whose effect is asked after, and beside which other. Those of several factors come and go together."""

    factor: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{'+'.join(self.factor)} beside {'+'.join(self.other)}"

    @property
    def is_over_models(self) -> bool:
        """Whether a third factor is left, over which means are taken."""
        return len(self.factor) == len(self.other) == 1

    def compare(self, runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], response: str) -> Beside:
        return beside(runs, factors, response, factor=self.factor, other=self.other)


WAYS = (
    Way((CUTMIX,), LOCAT),
    Way(LOCAT, (CUTMIX,)),
    Way((CUTMIX,), (GAUG,)),
    Way((GAUG,), (CUTMIX,)),
)


def spelt(*factors: str) -> str:
    return "LocAt" if factors == LOCAT else " and ".join(FACTOR_NAMES.get(factor, factor) for factor in factors)


def _plain(effect: Effect) -> str:
    return mean_and_ends(effect.value, effect.low, effect.high)


def _points(effect: Effect) -> str:
    return mean_and_ends(effect.value, effect.low, effect.high, scale=100, digits=2)


def _ratio(effect: Effect) -> str:
    """A difference of logarithms as a change in per cent, with the ends of its interval."""
    ends = [100 * float(np.expm1(end)) for end in (effect.value, effect.low, effect.high)]
    value, low, high = (rounded(end, 0, signed=True) for end in ends)
    return f"{value} %" if np.isnan(effect.low) else f"{value} % ({low} to {high})"


RESPONSES = (
    Response(column="min_mad", title="min MAD", sign=-1, tell=_plain),
    Response(column="mean_mad", title="mean MAD", sign=-1, tell=_plain),
    Response(column="log_min_mad", title="min MAD, relative", sign=-1, tell=_ratio),
    Response(column="test_acc", title="test accuracy, points", sign=1, tell=_points),
)


def responses_of(results: StudyResults) -> tuple[Response, ...]:
    """`RESPONSES`, with the shares of attention near a patch, where all runs have them, after the smallest distance."""
    shares = known_shares(results).items()
    told = (Response(column=name, title=f"{title}, points", sign=1, tell=_points) for name, title in shares)
    return (RESPONSES[0], *told, *RESPONSES[1:])


def cutmix_runs(results: StudyResults) -> pd.DataFrame:
    """The runs with every response; the logarithm is NaN of a distance of 0."""
    runs = run_measures(results)
    return runs.assign(log_min_mad=np.log(runs["min_mad"].where(runs["min_mad"] > 0)))


_QUESTIONS = {
    "min_mad": "Does {} still bring the most local head nearer where {} already does?",
    "mean_mad": "Does {} still make heads look nearer on average where {} already does?",
    "log_min_mad": "Does {} still bring the most local head nearer, relative to what {} leaves of its distance?",
    "test_acc": "Does {} still raise accuracy where {} already does?",
}


def cutmix_questions() -> tuple[Claim, ...]:
    return tuple(_question(response, way) for way in WAYS for response in RESPONSES)


def _question(response: Response, way: Way) -> Claim:
    factor, other = spelt(*way.factor), spelt(*way.other)

    def judge(results: StudyResults) -> Finding:
        found = way.compare(cutmix_runs(results), results.factors, response.column)
        tell, change = response.tell, found.change
        words = (
            f"without {other} {tell(found.without)}, with it {tell(found.with_other)}; "
            f"changed by {tell(change)} (p = {probability(found.p)})"
        )
        return Finding(
            verdict=found.answer(response.sign),
            ours=words,
            value=change.value,
            low=change.low,
            high=change.high,
            n=int(results.runs["seed"].nunique()),
        )

    text = _QUESTIONS[response.column].format(factor, other)
    return Claim(id=f"{way.name}-{response.column}", text=text, source=SOURCE, rule=ANSWERS, judge=judge)
