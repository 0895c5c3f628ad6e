"""How S3's claims about real images are judged: by which way accuracy goes, and by margins that are stated."""

from nearsight.report.rules import NO, NOT_SHOWN, UNDECIDED, YES, Finding, Verdict
from nearsight.study.statistics import MeanInterval

# A loss of accuracy, as a fraction, that does not count: a choice, less than a tenth of what the paper's ResNet loses.
KEPT_MARGIN = 0.02
_POINTS = f"{100 * KEPT_MARGIN:g} points"

ORDER = (
    "*Order.* Networks here train for few epochs, so the direction of a difference is compared, not "
    "its size. Reproduced: it has the paper's sign, and its 95 % interval excludes 0. In direction: it has that sign "
    "in every seed, but the interval holds 0 or, with one seed, there is none. Not reproduced: otherwise."
)
KEEPS = (
    f"*Keeps.* Up to {_POINTS} of accuracy may be lost: a margin of our choice, less than a tenth of what the paper's "
    f"ResNet loses. Reproduced: the lower end of the change's 95 % interval is at or above −{_POINTS}. In direction: "
    "its mean is. Not reproduced: otherwise. With one seed there is only the mean."
)


def judge_keeps(ours: MeanInterval, *, words: str) -> Finding:
    """A change of accuracy that should be no loss."""
    verdict = Verdict.IN_DIRECTION if ours.mean >= -KEPT_MARGIN else Verdict.NOT_REPRODUCED
    if ours.low >= -KEPT_MARGIN:  # false without an interval
        verdict = Verdict.REPRODUCED
    return Finding(verdict=verdict, ours=words, value=ours.mean, low=ours.low, high=ours.high, n=ours.n)


AS_LITTLE = (
    f"*As little.* Up to {_POINTS} may be lost beyond the other network's loss. Yes: the whole 95 % interval of the "
    f"difference is at or above −{_POINTS}. No: the whole interval is below. Undecided: otherwise. With one seed there "
    "is only the difference itself."
)


def judge_as_little(ours: MeanInterval, *, words: str) -> Finding:
    """How much more, as a negative number, one network loses than another."""
    low, high = (ours.low, ours.high) if ours.has_interval else (ours.mean, ours.mean)
    answer = UNDECIDED
    if low >= -KEPT_MARGIN:
        answer = YES
    elif high < -KEPT_MARGIN:
        answer = NO
    return Finding(verdict=answer, ours=words, value=ours.mean, low=ours.low, high=ours.high, n=ours.n)


WHICH = (
    "*Which of the two.* The one that the difference speaks for, if its 95 % interval excludes 0. Not shown: it holds "
    "0 or, with one seed, there is none."
)


def judge_which(ours: MeanInterval, *, larger: str, smaller: str, words: str) -> Finding:
    """`larger`: whom a positive difference speaks for; `smaller`: whom a negative one does."""
    answer = NOT_SHOWN
    if ours.excludes_zero:
        answer = larger if ours.mean > 0 else smaller
    return Finding(verdict=answer, ours=words, value=ours.mean, low=ours.low, high=ours.high, n=ours.n)
