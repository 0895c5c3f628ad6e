"""How questions of our own are answered: the rules, said before the runs were made."""

from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.rules import CLEARLY_LESS, NO_EFFECT, Finding
from nearsight.report.study.table import rounded, share

YES, IN_PART, NO, OTHER_WAY = "yes", "in part", "no", "the other way round"
UNDECIDED, NOT_SHOWN = "undecided", "not shown"
SHORT = (YES, IN_PART, NO, OTHER_WAY, UNDECIDED, NOT_SHOWN)
"""Answers that can be counted; others are words of their own."""

PART_OF_WHOLE = (
    "*Part of the whole.* A contrast between conditions is held against what CutMix does in all (CutMix minus None, "
    f"taken as it is). No: its 95 % interval lies within {share(NO_EFFECT)} of CutMix's either way; or the contrast "
    f"does, and the interval holds 0 and lies within {share(CLEARLY_LESS)}. Yes: it has CutMix's sign, its interval "
    f"excludes 0, and it is at least {share(CLEARLY_LESS)} of CutMix's. In part: the same, but less of it. The other "
    "way round: its interval lies on the other side of 0. Undecided: otherwise, or if CutMix itself makes no sure "
    "change. Without an interval the contrast alone is held against these shares."
)


def judge_part(part: Estimate, whole: Estimate, *, n: int) -> Finding:
    """How much of what the whole does a part does by itself."""
    sign = -1 if whole.value < 0 else 1
    ratio = part.value / whole.value if whole.value else float("nan")
    unit = abs(whole.value)
    reach = max(abs(part.low), abs(part.high)) if part.has_interval else abs(part.value)
    is_none = reach <= NO_EFFECT * unit
    holds_zero = not part.is_sure(1) and not part.is_sure(-1)
    told = f"{part.in_words()}, CutMix's {whole.in_words()} ({rounded(100 * ratio, 0)} %)"
    answer = UNDECIDED
    if not whole.is_sure(sign):
        told = f"{part.in_words()}; CutMix itself {whole.in_words()}"
    elif is_none or (holds_zero and abs(part.value) <= NO_EFFECT * unit and reach <= CLEARLY_LESS * unit):
        answer = NO
    elif part.is_sure(sign):
        answer = YES if ratio >= CLEARLY_LESS else IN_PART
    elif part.is_sure(-sign):
        answer = OTHER_WAY
    return Finding(verdict=answer, ours=told, value=part.value, low=part.low, high=part.high, n=n)


SIGN = (
    "*Sign.* Yes: the estimate has the sign that the question asks for, and its 95 % interval excludes 0. The other "
    "way round: the interval lies on the other side of 0. Not shown: it holds 0. Without an interval the sign alone "
    "decides."
)


def judge_sign(estimate: Estimate, *, sign: int, words: str, n: int) -> Finding:
    """Whether a number is surely on one side of 0."""
    answer = NOT_SHOWN
    if estimate.is_sure(sign):
        answer = YES
    elif estimate.is_sure(-sign):
        answer = OTHER_WAY
    return Finding(verdict=answer, ours=words, value=estimate.value, low=estimate.low, high=estimate.high, n=n)
