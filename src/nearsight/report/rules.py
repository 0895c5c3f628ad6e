"""From numbers to a verdict: each rule is a function and the words that say what it does.

A claim is judged by what the paper says happened, in sign and in size. The paper trained every condition once, so the
spread of its numbers is unknown; ours have an interval over seeds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from nearsight.report.tables import difference_in_words, percent, rounded, share, with_interval
from nearsight.study.statistics import Estimate, Separation, mean_interval, paired_difference
from nearsight.study.statistics.intervals import ACCURACY_MARGIN

# How far a size may be from the paper's and still agree, as a share of the paper's.
SIZE_TOLERANCE = 0.10
# Shares of the key factor's effect: what does not matter even where its interval excludes 0, what counts as none where
# it contains 0, and what is clearly less than it.
NEGLIGIBLE, NO_EFFECT, CLEARLY_LESS = 0.10, 0.25, 0.50
# By how much two gains may differ and still be comparable, as a share of the larger.
COMPARABLE = 0.25
# The paper gives three decimals.
ROUNDING = 0.0005
INFINITE = float("inf")


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    IN_DIRECTION = "reproduced in direction"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What our runs say about a claim."""

    verdict: str
    """A `Verdict` on a claim of a paper; to a question of our own, the answer in a few words."""
    ours: str
    """Our numbers, with their interval, in words."""
    value: float
    """The number that is judged; `low` and `high` are the ends of its interval, NaN where it has none."""
    low: float = float("nan")
    high: float = float("nan")
    n: int
    """Seeds."""


SIZE = (
    "*Size.* Reproduced: the difference has the paper's sign, its 95 % interval excludes 0, and the paper's number "
    f"lies in that interval or ours is within {share(SIZE_TOLERANCE)} of it. In direction: sign and interval hold, but "
    "the size does not, or the paper's number is not known. Not reproduced: otherwise. With one seed there is no "
    "interval, and the sign alone is the direction."
)


def judge_size(ours: Estimate, paper: float | None, *, sign: int, words: str) -> Finding:
    """A difference with a known sign and, where the paper gives it, a known size."""
    verdict = Verdict.NOT_REPRODUCED
    if _has_sign(ours, sign):
        verdict = Verdict.IN_DIRECTION
        if paper is not None and (
            ours.contains(paper) or abs(ours.value - paper) <= SIZE_TOLERANCE * abs(paper) + ROUNDING
        ):
            verdict = Verdict.REPRODUCED
    return Finding(verdict=verdict, ours=words, value=ours.value, low=ours.low, high=ours.high, n=ours.n)


def _has_sign(ours: Estimate, sign: int) -> bool:
    return ours.value * sign > 0 and (ours.n == 1 or ours.excludes_zero)


NO_EFFECT_RULE = (
    "*No effect.* The change in min MAD is compared with the one that CutMix makes in the same place. Reproduced: the "
    f"whole 95 % interval is within {share(NEGLIGIBLE)} of CutMix's change; or the mean is within {share(NO_EFFECT)} "
    f"of it, and the interval contains 0 and is within {share(CLEARLY_LESS)}. In direction: the mean is within "
    f"{share(CLEARLY_LESS)}, clearly less than CutMix's, but not shown to be none. Not reproduced: it is more, or "
    "the interval of CutMix's own change contains 0, or that change has the opposite sign. With one seed only the "
    "means are compared."
)


def judge_no_effect(ours: Estimate, key: Estimate, *, key_sign: int) -> Finding:
    """A change that should be nothing compared with the one that the key factor makes."""
    unit = abs(key.value) if _has_sign(key, key_sign) else None
    ratio = INFINITE if unit is None else abs(ours.value) / unit
    reach = INFINITE if unit is None or not ours.has_interval else max(abs(ours.low), abs(ours.high)) / unit
    none = ours.n == 1 or (ours.contains(0.0) and reach <= CLEARLY_LESS)
    verdict = Verdict.IN_DIRECTION if ratio <= CLEARLY_LESS else Verdict.NOT_REPRODUCED
    if reach <= NEGLIGIBLE or (ratio <= NO_EFFECT and none):
        verdict = Verdict.REPRODUCED
    words = f"{with_interval(ours, signed=True)}, CutMix's {with_interval(key, signed=True)}"
    words += "" if unit is None else f" ({share(ratio)})"
    return Finding(verdict=verdict, ours=words, value=ours.value, low=ours.low, high=ours.high, n=ours.n)


GROUPS = (
    "*Two groups.* Reproduced: a clean gap; every run with CutMix is at or below the paper's bound for them and every "
    f"run without at or above the other, give or take {share(SIZE_TOLERANCE)} of the bound. In direction: a clean gap, "
    "with CutMix below, at other values, or where the paper gives no bounds. Not reproduced: the groups overlap, or "
    "CutMix is above."
)


def judge_groups(found: Separation, bounds: tuple[float, float] | None, *, n: int) -> Finding:
    """`bounds`: the paper's largest value with the factor, and its smallest without; None where it gives none."""
    below = found.clean and found.difference < 0
    within = (
        bounds is not None
        and found.highest_with <= bounds[0] * (1 + SIZE_TOLERANCE) + ROUNDING
        and found.lowest_without >= bounds[1] * (1 - SIZE_TOLERANCE) - ROUNDING
    )
    verdict = Verdict.IN_DIRECTION if below else Verdict.NOT_REPRODUCED
    if below and within:
        verdict = Verdict.REPRODUCED
    return Finding(verdict=verdict, ours=groups_in_words(found), value=found.margin, n=n)


def groups_in_words(found: Separation) -> str:
    return (
        f"with ≤ {rounded(found.highest_with)}, without ≥ {rounded(found.lowest_without)}; "
        f"margin {rounded(found.margin, signed=True)} "
        f"(p = {found.p:.2g}, {'exact, ' if found.exact else ''}within pairs)"
    )


EVERY_SEED = (
    "*Every seed.* For what the paper shows in a figure without a number. Each such claim has a strict reading and a "
    "weak one, below. Reproduced: the strict one holds in every seed. In direction: the weak one does. Not "
    "reproduced: otherwise."
)


def judge_every_seed(strict: Sequence[bool], weak: Sequence[bool], words: str) -> Finding:
    n = len(strict)
    verdict = Verdict.IN_DIRECTION if all(weak) else Verdict.NOT_REPRODUCED
    if all(strict):
        verdict = Verdict.REPRODUCED
    text = f"{words}; strict reading in {sum(strict)}, weak in {sum(weak)} of {n} {'seed' if n == 1 else 'seeds'}"
    return Finding(verdict=verdict, ours=text, value=sum(strict) / n, n=n)


DISSOCIATION = (
    "*Dissociation.* Reproduced: both raise accuracy (95 % intervals above 0), by amounts that differ by at most "
    f"{share(COMPARABLE)} of the larger; CutMix lowers min MAD (interval below 0), the other changes it by at most "
    f"{share(NO_EFFECT)} as much. In direction: by their means both raise accuracy; CutMix lowers min MAD "
    f"(interval below 0), the other changes it by at most {share(CLEARLY_LESS)} as much. Not "
    "reproduced: otherwise. With one seed only the means are compared."
)


def judge_dissociation(
    key_gain: Estimate, other_gain: Estimate, key_change: Estimate, other_change: Estimate
) -> Finding:
    """Two factors with similar gains in accuracy, of which only the key factor makes heads local."""
    ratio = abs(other_change.value) / abs(key_change.value) if key_change.value < 0 else INFINITE
    larger = max(key_gain.value, other_gain.value)
    apart = abs(key_gain.value - other_gain.value) / larger if larger > 0 else INFINITE
    all_shown = _has_sign(key_gain, 1) and _has_sign(other_gain, 1) and _has_sign(key_change, -1)
    verdict = Verdict.NOT_REPRODUCED
    if all_shown and apart <= COMPARABLE and ratio <= NO_EFFECT:
        verdict = Verdict.REPRODUCED
    elif min(key_gain.value, other_gain.value) > 0 and _has_sign(key_change, -1) and ratio <= CLEARLY_LESS:
        verdict = Verdict.IN_DIRECTION
    words = (
        f"accuracy {with_interval(key_gain, scale=100, digits=2, signed=True)} and "
        f"{with_interval(other_gain, scale=100, digits=2, signed=True)} points; min MAD "
        f"{with_interval(key_change, signed=True)} and {with_interval(other_change, signed=True)}"
    )
    return Finding(verdict=verdict, ours=words, value=ratio, n=key_gain.n)


def change_in_words(before: Estimate, after: Estimate, change: Estimate, *, accuracy: bool) -> str:
    """ "0.316 to 0.008: −0.308 ± 0.010"."""
    if accuracy:
        words = with_interval(change, scale=100, digits=2, signed=True)
        return f"{percent(before.value)} to {percent(after.value)} %: {words} points"
    return f"{rounded(before.value)} to {rounded(after.value)}: {with_interval(change, signed=True)}"


def paired_change(runs: pd.DataFrame, condition: str, reference: str, response: str) -> tuple[Estimate, str]:
    """What a condition changes within seeds, and in words, with the means of both."""
    ours = paired_difference(runs, condition, reference, response)
    before, after = (mean_interval(runs.loc[runs["condition"] == label, response]) for label in (reference, condition))
    return ours, change_in_words(before, after, ours, accuracy=response == "test_acc")


# How questions of our own are answered: the rules, stated before the runs were made.


YES, IN_PART, NO, OTHER_WAY = "yes", "in part", "no", "the other way round"
UNDECIDED, NOT_SHOWN = "undecided", "not shown"
SHORT = (YES, IN_PART, NO, OTHER_WAY, UNDECIDED, NOT_SHOWN)
"""Answers that can be counted; others are words of their own."""

PART_OF_WHOLE = (
    "*Part of the whole.* A contrast between conditions is compared with the whole effect of CutMix (CutMix minus "
    f"None, taken as it is). No: its 95 % interval lies within {share(NO_EFFECT)} of CutMix's either way; or the "
    f"contrast does, and the interval contains 0 and lies within {share(CLEARLY_LESS)}. Yes: it has CutMix's sign, "
    f"its interval excludes 0, and it is at least {share(CLEARLY_LESS)} of CutMix's. In part: the same, but less of "
    "it. The other way round: its interval lies on the other side of 0. Undecided: otherwise, or if the interval of "
    "CutMix's own effect contains 0. Without an interval the contrast alone is compared with these shares."
)


def judge_part(part: Estimate, whole: Estimate, *, n: int) -> Finding:
    """How much of the whole effect a part has by itself."""
    sign = -1 if whole.value < 0 else 1
    ratio = part.value / whole.value if whole.value else float("nan")
    unit = abs(whole.value)
    reach = max(abs(part.low), abs(part.high)) if part.has_interval else abs(part.value)
    is_none = reach <= NO_EFFECT * unit
    holds_zero = not part.has_sign(1) and not part.has_sign(-1)
    words = f"{difference_in_words(part)}, CutMix's {difference_in_words(whole)} ({rounded(100 * ratio, 0)} %)"
    answer = UNDECIDED
    if not whole.has_sign(sign):
        words = f"{difference_in_words(part)}; CutMix itself {difference_in_words(whole)}"
    elif is_none or (holds_zero and abs(part.value) <= NO_EFFECT * unit and reach <= CLEARLY_LESS * unit):
        answer = NO
    elif part.has_sign(sign):
        answer = YES if ratio >= CLEARLY_LESS else IN_PART
    elif part.has_sign(-sign):
        answer = OTHER_WAY
    return Finding(verdict=answer, ours=words, value=part.value, low=part.low, high=part.high, n=n)


SIGN = (
    "*Sign.* Yes: the estimate has the sign that the question asks for, and its 95 % interval excludes 0. The other "
    "way round: the interval lies on the other side of 0. Not shown: it contains 0. Without an interval the sign alone "
    "decides."
)


def judge_sign(estimate: Estimate, *, sign: int, words: str, n: int) -> Finding:
    """Whether a number and its interval lie on one side of 0."""
    answer = NOT_SHOWN
    if estimate.has_sign(sign):
        answer = YES
    elif estimate.has_sign(-sign):
        answer = OTHER_WAY
    return Finding(verdict=answer, ours=words, value=estimate.value, low=estimate.low, high=estimate.high, n=n)


# Where only the direction can be compared, or a margin was stated before.


def finding_of(verdict: str, ours: Estimate, words: str) -> Finding:
    return Finding(verdict=verdict, ours=words, value=ours.value, low=ours.low, high=ours.high, n=ours.n)


def order_rule(reason: str) -> str:
    """What `judge_order` does; `reason`: why sizes cannot be compared."""
    return (
        f"*Order.* {reason}, so the direction of a difference is compared, not its size. Reproduced: it has the "
        "paper's sign, and its 95 % interval excludes 0. In direction: it has that sign in every seed, but the "
        "interval contains 0 or, with one seed, there is none. Not reproduced: otherwise."
    )


def judge_order(values: Iterable[float], ours: Estimate, *, sign: int, words: str) -> Finding:
    """`values`: the difference in each seed; `ours`: their mean."""
    verdict = Verdict.IN_DIRECTION if all(value * sign > 0 for value in values) else Verdict.NOT_REPRODUCED
    if ours.value * sign > 0 and ours.excludes_zero:
        verdict = Verdict.REPRODUCED
    return finding_of(verdict, ours, words)


_POINT = f"{100 * ACCURACY_MARGIN:g} point"
COMPARABLE_RULE = (
    f"*Comparable.* Reproduced: the whole 95 % interval of the difference is within {_POINT} of accuracy on either "
    "side. In direction: its mean is. Not reproduced: otherwise. With one seed there is only the mean. In the paper "
    f"all that performs comparably is within {_POINT}."
)
NOT_WORSE = (
    "*Not worse.* The difference to the best of the others in each seed. Reproduced: the lower end of its 95 % "
    f"interval is above −{_POINT} of accuracy. In direction: its mean is. Not reproduced: otherwise. With one seed "
    "there is only the mean."
)


def judge_comparable(ours: Estimate, *, words: str) -> Finding:
    return judge_within(ours, -ACCURACY_MARGIN, ACCURACY_MARGIN, words=words)


def judge_not_worse(ours: Estimate, *, words: str) -> Finding:
    return judge_within(ours, -ACCURACY_MARGIN, INFINITE, words=words)


def judge_within(ours: Estimate, lowest: float, highest: float, *, words: str) -> Finding:
    """Whether a difference is between two margins: the whole interval or, which is less, its mean."""
    verdict = Verdict.IN_DIRECTION if lowest <= ours.value <= highest else Verdict.NOT_REPRODUCED
    if lowest <= ours.low and ours.high <= highest:  # false without an interval
        verdict = Verdict.REPRODUCED
    return finding_of(verdict, ours, words)


WHICH = (
    "*Which of the two.* The one that the sign of the difference points to, if its 95 % interval excludes 0. Not "
    "shown: it contains 0 or, with one seed, there is none."
)


def judge_which(ours: Estimate, *, larger: str, smaller: str, words: str) -> Finding:
    """`larger`: the answer if the difference is positive; `smaller`: if it is negative."""
    answer = NOT_SHOWN
    if ours.excludes_zero:
        answer = larger if ours.value > 0 else smaller
    return finding_of(answer, ours, words)
