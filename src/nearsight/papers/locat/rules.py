"""How S2's claims are judged: by which way a difference goes. Its models are larger, so sizes are not compared."""

from nearsight.report.rules import Finding, Verdict
from nearsight.study.statistics import MeanInterval
from nearsight.study.statistics.intervals import ACCURACY_MARGIN

_POINTS = f"{100 * ACCURACY_MARGIN:g} point"

ORDER = (
    "*Order.* The paper's models are larger and see larger images, so the direction of a difference is compared, not "
    "its size. Reproduced: it has the paper's sign, and its 95 % interval excludes 0. In direction: it has that sign "
    "in every seed, but the interval holds 0 or, with one seed, there is none. Not reproduced: otherwise."
)


def judge_order(values: list[float], ours: MeanInterval, *, sign: int, words: str) -> Finding:
    """`values`: the difference in each seed; `ours`: their mean."""
    verdict = Verdict.IN_DIRECTION if all(value * sign > 0 for value in values) else Verdict.NOT_REPRODUCED
    if ours.mean * sign > 0 and ours.excludes_zero:
        verdict = Verdict.REPRODUCED
    return _finding(verdict, ours, words)


COMPARABLE = (
    f"*Comparable.* Reproduced: the whole 95 % interval of the difference is within {_POINTS} of accuracy on either "
    "side. In direction: its mean is. Not reproduced: otherwise. With one seed there is only the mean. In the paper "
    f"all that performs comparably is within {_POINTS}."
)


def judge_comparable(ours: MeanInterval, *, words: str) -> Finding:
    return _within(ours, -ACCURACY_MARGIN, ACCURACY_MARGIN, words)


NOT_WORSE = (
    "*Not worse.* The difference to the best of the others in each seed. Reproduced: the lower end of its 95 % "
    f"interval is above −{_POINTS} of accuracy. In direction: its mean is. Not reproduced: otherwise. With one seed "
    "there is only the mean."
)


def judge_not_worse(ours: MeanInterval, *, words: str) -> Finding:
    return _within(ours, -ACCURACY_MARGIN, float("inf"), words)


def _within(ours: MeanInterval, lowest: float, highest: float, words: str) -> Finding:
    verdict = Verdict.IN_DIRECTION if lowest <= ours.mean <= highest else Verdict.NOT_REPRODUCED
    if lowest <= ours.low and ours.high <= highest:  # false without an interval
        verdict = Verdict.REPRODUCED
    return _finding(verdict, ours, words)


def _finding(verdict: Verdict, ours: MeanInterval, words: str) -> Finding:
    return Finding(verdict=verdict, ours=words, value=ours.mean, low=ours.low, high=ours.high, n=ours.n)
