"""Questions of our own beside S1's: what its most local heads look at, and whether its claims hold without them."""

from functools import partial

from nearsight.report.own_patch import OWN_PATCH
from nearsight.report.study import paper as s1
from nearsight.report.study.by_cutmix import CUTMIX, SURE
from nearsight.report.study.claim import OURS, Claim
from nearsight.report.study.conditions import pair_columns
from nearsight.report.study.judged import not_tested
from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.own_patch.heads import HEADS, OTHERS, with_own_patch
from nearsight.report.study.questions import NO, NOT_SHOWN, OTHER_WAY, SIGN, YES, judge_sign
from nearsight.report.study.rules import Finding, change_in_words, groups_in_words
from nearsight.report.study.table import probability, share
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval, paired_difference, separation

OFTEN = (
    f"*Own patch.* A head looks at its own patch where its distance is below {share(OWN_PATCH)} of that to the next "
    f"patch. Yes: more runs with CutMix have such a head than without, with p < {SURE:g} by permutation within pairs. "
    "The other way round: fewer, with such a p. Not shown: otherwise."
)
GAP = (
    "*Gap.* Yes: by the nearest of the heads that do not look at their own patch, every run with CutMix is below every "
    "run without. No: they overlap, or CutMix is above."
)
NONE = "no head of any run looks at its own patch"
_LEFT_OUT = "Leaving out heads that look at their own patch,"


def own_patch_questions(colour: str) -> tuple[Claim, ...]:
    """Of an ablation; `colour` is what its data set has for AutoAugment."""
    conditions = (*s1.with_cutmix(colour), *s1.without_cutmix(colour))
    both = (s1.BASELINE, s1.MODERN)
    return (
        Claim(
            id="own-patch-heads",
            text="Does CutMix turn heads to their own patch?",
            source=OURS,
            rule=OFTEN,
            needs=conditions,
            judge=_more_often,
        ),
        Claim(
            id="others-separated",
            text=f"{_LEFT_OUT} does CutMix still part the conditions?",
            source=OURS,
            rule=GAP,
            needs=conditions,
            judge=_gap,
        ),
        Claim(
            id="others-more-local",
            text=f"{_LEFT_OUT} does Modern's most local one still look nearer than Baseline's?",
            source=OURS,
            rule=SIGN,
            needs=both,
            judge=partial(_change, *both),
        ),
    )


def _more_often(results: StudyResults) -> Finding:
    runs = with_own_patch(results)
    runs = runs.assign(has_one=(runs[HEADS] > 0).astype(float))
    levels = results.factors[CUTMIX]
    found = separation(runs, CUTMIX, levels, "has_one", blocks=pair_columns(results, CUTMIX))
    numbers = {level: runs.loc[runs[CUTMIX] == level, "has_one"] for level in levels}
    with_it, without = (f"{int(numbers[level].sum())} of {len(numbers[level])} runs" for level in reversed(levels))
    words = f"{with_it} with CutMix, {without} without (p = {probability(found.p)}"
    words += f", {'exact, ' if found.exact else ''}within pairs)"
    answer = NOT_SHOWN
    if found.p < SURE:
        answer = YES if found.difference > 0 else OTHER_WAY
    return Finding(verdict=answer, ours=words, value=found.difference, n=int(runs["seed"].nunique()))


def _gap(results: StudyResults) -> Finding:
    runs = with_own_patch(results)
    if not runs[HEADS].any():
        return not_tested(NONE)
    found = separation(runs, CUTMIX, results.factors[CUTMIX], OTHERS, blocks=pair_columns(results, CUTMIX))
    answer = YES if found.clean and found.difference < 0 else NO
    return Finding(verdict=answer, ours=groups_in_words(found), value=found.margin, n=int(runs["seed"].nunique()))


def _change(reference: str, condition: str, results: StudyResults) -> Finding:
    runs = with_own_patch(results)
    if not runs.loc[runs["condition"].isin((reference, condition)), HEADS].any():
        return not_tested(NONE.replace("any run", f"{reference} or {condition}"))
    ours = paired_difference(runs, condition, reference, OTHERS)
    if not ours.n:
        return not_tested(f"no seed has such heads of both {reference} and {condition}")
    before, after = (mean_interval(runs.loc[runs["condition"] == label, OTHERS]) for label in (reference, condition))
    words = change_in_words(before, after, ours, accuracy=False)
    return judge_sign(Estimate.of(ours), sign=-1, words=words, n=ours.n)
