"""From numbers to a verdict: what runs say about a claim, and when that decides it.

A rule turns numbers into a `Finding`: a p-value for the claim, one for its opposite, and whether the size is the
paper's. `weigh` turns a finding into a verdict, in the same way whatever the rule: by p-values that are corrected for
the other claims of the family. So a verdict never becomes weaker by a seed that agrees with the mean of the others.

Seeds are clusters: a contrast is taken within each seed first, and Student's t is over seeds. The paper trained every
condition once, so the spread of its numbers is not known.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import pandas as pd

from nearsight.report.tables import difference_in_words, percent, rounded, share, with_interval
from nearsight.study.statistics import Estimate, mean_interval, paired_difference
from nearsight.study.statistics.intervals import ACCURACY_MARGIN
from nearsight.study.statistics.significance import (
    ALPHA,
    p_of_most,
    p_of_rates,
    p_of_sign,
    p_outside,
    p_within,
    seeds_to_show,
    with_seeds,
)

# By which factor a size may differ from the paper's and still be the paper's.
SIZE_FACTOR = 2.0
# A share of the key factor's effect: what counts as none beside it, and of the larger gain: what counts as comparable.
NO_EFFECT, COMPARABLE = 0.25, 0.25
# Of the pairs of a run with the key factor and one without, in a seed: how many are in order where it separates them.
SEPARATED = 0.95
# One-sided, before any correction: odds of three to one that the sign is right.
LEANING = 0.25
INFINITE = float("inf")


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    IN_DIRECTION = "in direction"
    INCONCLUSIVE = "inconclusive"
    CONTRADICTED = "contradicted"
    NOT_TESTED = "not tested"


YES, LEANING_YES, NO, OTHER_WAY = "yes", "leaning yes", "no", "the other way round"
ANSWERS = {Verdict.REPRODUCED: YES, Verdict.IN_DIRECTION: LEANING_YES, Verdict.CONTRADICTED: OTHER_WAY}
"""What a verdict is called where it answers a question of our own; the others keep their names."""
VERDICTS = (
    "A claim, or its opposite, is *shown* where p ≤ 0.05 after Holm's correction for all claims of its family.\n\n"
    "- **reproduced** (to a question of our own: *yes*): shown and, where the paper gives a size, between half and "
    "twice that size.\n"
    "- **in direction** (*leaning yes*): shown, but with another size; or not shown, with odds of three to one for it "
    "(one-sided p ≤ 0.25, not corrected).\n"
    "- **contradicted** (*no*, *the other way round*): the opposite is shown.\n"
    "- **inconclusive**: none of these, as always with one seed. Only a fit to all runs, which learns the noise from "
    "all conditions, can do with one.\n\n"
    "*To decide* is how many seeds would decide it, if the mean and the spread over seeds stay as they are."
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What our runs say about a claim."""

    ours: str
    """Our numbers, with their interval, in words."""
    value: float
    """The number that is judged; `low` and `high` are the ends of its interval, NaN where it has none."""
    low: float = float("nan")
    high: float = float("nan")
    n: int
    """Seeds."""
    p: float = float("nan")
    """Small where the claim holds. NaN: nothing is tested."""
    p_against: float = float("nan")
    """Small where its opposite holds."""
    leans: bool = False
    """The odds are for it."""
    fits: bool = True
    """Its size is the paper's."""
    opposite: str = OTHER_WAY
    """What a question is answered by where the opposite is shown."""
    decides: Callable[[int, float], bool] | None = None
    """Whether so many seeds with this mean and spread would decide it either way, at this level."""
    answer: str = ""
    """In words, where a question asks for a description and nothing is tested."""


def weigh(finding: Finding, p: float, p_against: float) -> Verdict:
    """The verdict, by p-values that are corrected for the family."""
    if p_against <= ALPHA:
        return Verdict.CONTRADICTED
    if p <= ALPHA:
        return Verdict.REPRODUCED if finding.fits else Verdict.IN_DIRECTION
    return Verdict.IN_DIRECTION if finding.leans else Verdict.INCONCLUSIVE


def seeds_to_decide(finding: Finding, correction: float = 1.0) -> int | None:
    """How many seeds would decide it, more than there are; None: not known, or too many. `correction`: how often its
    p-value counts."""
    if finding.decides is None or finding.n < 2:
        return None
    decides = finding.decides
    return seeds_to_show(lambda n: decides(n, ALPHA / correction), finding.n + 1)


def finding_of(ours: Estimate, words: str, **evidence: object) -> Finding:
    found = Finding(ours=words, value=ours.value, low=ours.low, high=ours.high, n=ours.n)
    return replace(found, **evidence)  # type: ignore[arg-type]


def described(answer: str, words: str, *, value: float, n: int) -> Finding:
    """The answer to a question that asks when, where or which: nothing is tested."""
    return Finding(ours=words, value=value, n=n, answer=answer)


SIGN = (
    "*Sign.* The difference is taken within every seed and tested over seeds (Student's t, two-sided): it has the sign "
    "that is claimed or asked for, or the opposite one."
)
SIGN_OF_FIT = (
    "*Sign.* The contrast is estimated by one fit to all runs, which takes their noise to be the same everywhere, and "
    "tested by Student's t with the runs left over (two-sided): it has the sign that is asked for, or the opposite one."
)
SIZE = (
    f"{SIGN} Its size is the paper's where it is between {1 / SIZE_FACTOR:g} and {SIZE_FACTOR:g} times the paper's "
    "number; where the paper gives none, the sign is all that is claimed."
)


def judge_sign(ours: Estimate, *, sign: int, words: str, paper: float | None = None) -> Finding:
    """Whether a difference has a sign, and the paper's size where there is one."""
    p = p_of_sign(ours, sign)
    return finding_of(
        ours,
        words,
        p=p,
        p_against=p_of_sign(ours, -sign),
        leans=ours.df > 0 and p <= 2 * LEANING,
        fits=paper is None or 1 / SIZE_FACTOR <= ours.value / paper <= SIZE_FACTOR,
        decides=lambda n, alpha: min(p_of_sign(with_seeds(ours, n), side) for side in (1, -1)) <= alpha,
    )


def within_rule(margin: str) -> str:
    """What `judge_within` does; `margin`: in words."""
    return (
        f"*Equivalence.* Shown: the difference is within {margin}, by two one-sided t tests over seeds (TOST). "
        "Contradicted: it is shown to lie outside."
    )


def judge_within(ours: Estimate, lowest: float, highest: float, *, words: str) -> Finding:
    """Whether a difference lies between two margins. No effect is shown by this, never by a wide interval."""

    def decides(n: int, alpha: float) -> bool:
        then = with_seeds(ours, n)
        return min(p_within(then, lowest, highest), p_outside(then, lowest, highest)) <= alpha

    p = p_within(ours, lowest, highest)
    return finding_of(
        ours,
        words,
        p=p,
        p_against=p_outside(ours, lowest, highest),
        leans=p <= LEANING,
        opposite=NO,
        decides=decides,
    )


NO_EFFECT_RULE = (
    f"{within_rule(f'{share(NO_EFFECT)} of the change that CutMix makes in the same place, up or down')} Where "
    "CutMix's own change does not have its sign with p ≤ 0.05, there is nothing to compare with: inconclusive."
)


def judge_no_effect(ours: Estimate, key: Estimate, *, key_sign: int) -> Finding:
    """A change that should be nothing beside the one that the key factor makes."""
    margin = NO_EFFECT * abs(key.value)
    words = f"{with_interval(ours, signed=True)}, CutMix's {with_interval(key, signed=True)}"
    if p_of_sign(key, key_sign) > ALPHA:
        return finding_of(ours, words, p=1.0, p_against=1.0)
    words += f" ({share(abs(ours.value / key.value))}; p = {p_within(ours, -margin, margin):.2g} for none)"
    return judge_within(ours, -margin, margin, words=words)


GROUPS = (
    "*Two groups.* The mean of a seed's runs with CutMix minus that of its runs without is tested over seeds, as a "
    f"sign. Reproduced also takes that at least {share(SEPARATED)} of the pairs of a run with CutMix and one without "
    "are in order (on average over seeds, within each), and, where the paper gives numbers, "
    f"{1 / SIZE_FACTOR:g} to {SIZE_FACTOR:g} times its difference."
)


def judge_groups(runs: pd.DataFrame, factor: str, levels: Sequence[str], response: str, paper: float | None) -> Finding:
    """Whether all runs with a factor (its last level) lie below all without; `paper`: its difference of the means."""
    differences, in_order = [], []
    known = runs.dropna(subset=[response])
    for _, seed in known.groupby("seed"):
        near, far = (seed.loc[seed[factor] == level, response].to_numpy() for level in (levels[-1], levels[0]))
        if near.size and far.size:
            differences.append(float(near.mean() - far.mean()))
            in_order.append(float((near[:, None] < far).mean()))
    ours, ordered = mean_interval(differences), mean_interval(in_order)
    highest, lowest = (
        known.loc[known[factor] == level, response].agg(end) for level, end in ((levels[-1], "max"), (levels[0], "min"))
    )
    words = (
        f"{with_interval(ours, signed=True)}, {share(ordered.value)} of pairs in order; with ≤ {rounded(highest)}, "
        f"without ≥ {rounded(lowest)}"
    )
    found = judge_sign(ours, sign=-1, words=words, paper=paper)
    return replace(found, fits=found.fits and ordered.value >= SEPARATED)


EVERY_SEED = (
    "*Most seeds.* For what the paper shows in a figure, or proves, without a number to compare. Each such claim has a "
    "strict reading and a weak one, below, true or false in a seed. Shown: the strict one holds in more seeds than "
    "half of all would by chance (exact sign test: five of five, seven of eight). It leans that way where the weak one "
    "does with p ≤ 0.25 (two of two, four of five); its opposite is shown where the weak one fails in so many."
)


def judge_every_seed(strict: Sequence[bool], weak: Sequence[bool], words: str) -> Finding:
    n, num_strict = len(strict), sum(map(bool, strict))
    # What holds strictly counts as holding weakly, too: else both the claim and its opposite could be shown.
    num_weak = sum(bool(one or other) for one, other in zip(strict, weak, strict=True))

    def decides(number: int, alpha: float) -> bool:
        holds, fails = (round(share_of / n * number) for share_of in (num_strict, n - num_weak))
        return min(p_of_most(holds, number), p_of_most(fails, number)) <= alpha

    return Finding(
        ours=f"{words}; strict reading in {num_strict}, weak in {num_weak} of {n} {'seed' if n == 1 else 'seeds'}",
        value=num_strict / n,
        n=n,
        p=p_of_most(num_strict, n),
        p_against=p_of_most(n - num_weak, n),
        leans=p_of_most(num_weak, n) <= LEANING,
        opposite=NO,
        decides=decides,
    )


RATES = (
    "*Rates.* Runs either come to have something or not, and they train for different numbers of epochs. Given how "
    "many have it, each of them falls to either side by that side's share of all epochs (exact, one-sided; runs count "
    "as independent, those of a seed too, and all epochs as alike). Shown: it comes more often per epoch; its "
    "opposite: less often; one seed shows neither. It leans that way where p ≤ 0.25. Shares of runs, with Clopper and "
    "Pearson's 95 % intervals, judge nothing."
)


def judge_rates(
    events: int, exposure: float, other_events: int, other_exposure: float, *, words: str, value: float, n: int
) -> Finding:
    """Whether something comes more often, in the time there was for it, than in the other runs."""

    def ps(number: int) -> tuple[float, float]:
        """Of more often, and of less often, from so many seeds of this kind."""
        times = number / n
        ours, others = (round(events * times), exposure * times), (round(other_events * times), other_exposure * times)
        return p_of_rates(*ours, *others), p_of_rates(*others, *ours)

    p, p_against = ps(n) if n > 1 else (1.0, 1.0)  # runs of one seed may all do what the seed does
    return Finding(
        ours=words,
        value=value,
        n=n,
        p=p,
        p_against=p_against,
        leans=n > 1 and p <= LEANING,
        decides=lambda number, alpha: min(ps(number)) <= alpha,
    )


ALL_OF = (
    "*All of it.* A claim with several parts is as strong as the weakest of them: shown where every part is (the "
    "largest p-value counts), in direction where every part is at least that, contradicted where the opposite of one "
    "is shown (by a p-value that counts as often as there are parts)."
)


def all_of(parts: Iterable[Finding], words: str, *, value: float) -> Finding:
    found = list(parts)
    tested = [part.decides for part in found]
    return Finding(
        ours=words,
        value=value,
        n=min(part.n for part in found),
        p=max(part.p for part in found),
        p_against=min(1.0, len(found) * min(part.p_against for part in found)),
        leans=all(part.leans for part in found),
        fits=all(part.fits for part in found),
        decides=lambda n, alpha: all(each is not None and each(n, alpha) for each in tested),
    )


DISSOCIATION = (
    f"{ALL_OF} Here: both raise accuracy; their gains differ by at most {share(COMPARABLE)} of the larger (TOST); "
    f"CutMix lowers min MAD; the other changes it by at most {share(NO_EFFECT)} as much (TOST)."
)


def judge_dissociation(
    key_gain: Estimate, other_gain: Estimate, apart: Estimate, key_change: Estimate, other_change: Estimate
) -> Finding:
    """Two factors with similar gains in accuracy, `apart` from each other, of which only the key factor makes heads
    local."""
    margin = COMPARABLE * max(key_gain.value, other_gain.value, 0.0)
    words = (
        f"accuracy {with_interval(key_gain, scale=100, digits=2, signed=True)} and "
        f"{with_interval(other_gain, scale=100, digits=2, signed=True)} points; min MAD "
        f"{with_interval(key_change, signed=True)} and {with_interval(other_change, signed=True)}"
    )
    parts = (
        judge_sign(key_gain, sign=1, words=""),
        judge_sign(other_gain, sign=1, words=""),
        judge_within(apart, -margin, margin, words=""),
        judge_sign(key_change, sign=-1, words=""),
        judge_no_effect(other_change, key_change, key_sign=-1),
    )
    return all_of(parts, words, value=other_change.value / key_change.value if key_change.value else INFINITE)


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


PART_OF_WHOLE = (
    "*Part of the whole.* A contrast between conditions, by one fit to all runs (the noise of a run is the same "
    "everywhere; seeds have effects of their own). Yes: it is more than "
    f"{share(NO_EFFECT)} of CutMix's whole effect (CutMix minus None) and is shown to have its sign. The other way "
    "round: the same, with the opposite sign. No: it is shown to be less than that share, up or down (TOST). Where "
    "CutMix's own effect is not shown with p ≤ 0.05, there is nothing to compare with: inconclusive."
)


def judge_part(part: Estimate, whole: Estimate, *, n: int) -> Finding:
    """Whether a part of the whole effect is there by itself, or none of it is."""
    margin, ratio = NO_EFFECT * abs(whole.value), part.value / whole.value if whole.value else math.nan
    words = f"{difference_in_words(part)}, CutMix's {difference_in_words(whole)} ({rounded(100 * ratio, 0)} %)"
    found, sign = replace(part, n=n), -1 if whole.value < 0 else 1
    if p_of_sign(whole, sign) > ALPHA:
        return finding_of(found, words, p=1.0, p_against=1.0)
    if abs(part.value) > margin:
        return judge_sign(found, sign=sign, words=words)
    none = judge_within(found, -margin, margin, words=words)
    return replace(none, p=1.0, p_against=none.p, leans=False)


# Where a margin was stated before.


def order_rule(reason: str) -> str:
    """What judges a difference whose size cannot be compared; `reason`: why."""
    return f"{SIGN} {reason}, so its size is not compared."


_POINT = f"{100 * ACCURACY_MARGIN:g} point"
COMPARABLE_RULE = (
    f"{within_rule(f'{_POINT} of accuracy on either side')} In the paper all that performs comparably is within that."
)
NOT_WORSE = (
    f"*Not worse.* Shown: the difference is above −{_POINT} of accuracy, by a one-sided t test over seeds. "
    "Contradicted: it is shown to be below."
)


def judge_comparable(ours: Estimate, *, words: str) -> Finding:
    return judge_within(ours, -ACCURACY_MARGIN, ACCURACY_MARGIN, words=words)


def judge_not_worse(ours: Estimate, *, words: str) -> Finding:
    return judge_within(ours, -ACCURACY_MARGIN, INFINITE, words=words)
