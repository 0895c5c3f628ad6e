"""What was found, in words: the headline of a page of results and the sentences under it."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.claims import Verdicts
from nearsight.report.conditions import FACTOR_NAMES, OFF, key_factor, level_in_words, with_attention
from nearsight.report.own_patch import HEADS, OTHERS, with_own_patch
from nearsight.report.probe_tables import OVER_IMAGES
from nearsight.report.probes import ProbeResults, main_measures, title_of
from nearsight.report.rules import Verdict
from nearsight.report.tables import OF_TWO, rounded, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, by_condition, mean_interval

_OVER_SEEDS = f"± is half the 95 % interval over seeds, of the mean of each seed's runs; {OF_TWO}."


@dataclass(frozen=True, kw_only=True)
class Words:
    headline: str
    sentences: tuple[str, ...]


def judged_in_words(verdicts: Verdicts) -> Words | None:
    """The first claim or question that the runs can judge, with its numbers; None where there is none."""
    for judgement in verdicts.judgements:
        text, finding = judgement.claim.text, judgement.finding
        if judgement.verdict is Verdict.NOT_TESTED:
            continue
        answer = judgement.words
        headline = f"{text} {answer[:1].upper()}{answer[1:]}." if judgement.claim.is_question else f"{text}: {answer}."
        seeds = "1 seed" if finding.n == 1 else f"{finding.n} seeds"
        return Words(headline=headline, sentences=(f"{finding.ours[:1].upper()}{finding.ours[1:]} ({seeds}).",))
    return None


def locality_in_words(results: StudyResults) -> Words:
    """How local the most local heads are, with the factor that moves them most and without it."""
    measured = with_attention(results)
    if measured.runs.empty:
        return _in_words(results, "test_acc", "The test accuracy is highest", scale=100, largest=True)
    key = key_factor(measured)
    levels = measured.factors.get(key, ()) if key else ()
    if key is None or len(levels) != 2 or set(measured.runs[key]) != set(levels):
        return _in_words(measured, "min_mad", "The most local head has the lowest MAD", scale=1, largest=False)
    runs = {level: measured.runs.loc[measured.runs[key] == level, "min_mad"] for level in levels}
    groups = {level: _over_seeds(measured.runs, key, level, "min_mad") for level in levels}
    near, far = sorted(levels, key=lambda level: groups[level].value)
    words = {level: _where(measured, key, level) for level in levels}
    return Words(
        headline=f"{words[near][:1].upper()}{words[near][1:]} the most local head has a mean attention distance of "
        f"{with_interval(groups[near])}, {words[far]} {with_interval(groups[far])}.",
        sentences=(
            " ".join([_counted(len(runs[near]), len(runs[far])), *_parted(runs[near], runs[far])]),
            *_own_patches(measured, key, {level: words[level] for level in (near, far)}),
            _OVER_SEEDS,
        ),
    )


def _over_seeds(runs: pd.DataFrame, key: str, level: str, response: str) -> Estimate:
    """Runs of one seed count once: they share its initial weights and the order of its images."""
    return mean_interval(runs[runs[key] == level].groupby("seed")[response].mean().dropna())


def _own_patches(results: StudyResults, key: str, words: Mapping[str, str]) -> tuple[str, ...]:
    """In how many runs the most local head is an own-patch head, and the distance of the others; `words` by level."""
    try:
        runs = with_own_patch(results)
    except InputError:  # the grid of patches is not known
        return ()
    number = int((runs[HEADS] > 0).sum())
    if not number or runs[OTHERS].isna().any():
        return ()
    others = (f"{with_interval(_over_seeds(runs, key, level, OTHERS))} {words[level]}" for level in words)
    return (
        f"In {number} of {len(runs)} runs that head attends to its own patch rather than to its neighbours. Of "
        f"all other heads the most local has {' and '.join(others)}.",
    )


def _where(results: StudyResults, key: str, level: str) -> str:
    """ "with CutMix", "in Modern", "at learning rate 0.001": before what holds there."""
    levels = results.factors[key]
    if levels[0] in OFF:
        return level_in_words(key, levels, level)
    is_condition = set(results.runs.loc[results.runs[key] == level, "condition"]) == {level}
    return f"in {level}" if is_condition else f"at {FACTOR_NAMES.get(key, key)} {level}"


def _counted(num_near: int, num_far: int) -> str:
    return "One run each." if num_near == num_far == 1 else f"Means over {num_near} and {num_far} runs."


def _parted(near: "pd.Series[float]", far: "pd.Series[float]") -> tuple[str, ...]:
    """Whether a gap separates the two groups. One run each is always separated, and that means nothing."""
    if min(len(near), len(far)) < 2:
        return ()
    gap = float(far.min() - near.max())
    if gap <= 0:
        return ("The runs of the two groups overlap.",)
    text = rounded(gap)
    return (f"No run bridges the gap of {text} between the two groups.",) if float(text) > 0 else ()


def _in_words(results: StudyResults, response: str, opening: str, *, scale: float, largest: bool) -> Words:
    """The condition at the end of the scale, and the one at the other end."""
    table = by_condition(results.runs, response).set_index("condition")
    order = table["mean"].sort_values(ascending=not largest).index
    digits, unit = (2, " %") if scale == 100 else (3, "")
    numbers = {
        label: with_interval(
            mean_interval(results.runs.loc[results.runs["condition"] == label, response]), scale=scale, digits=digits
        )
        for label in (order[0], order[-1])
    }
    other_end = "" if len(order) == 1 else f"; at the other end is “{order[-1]}” with {numbers[order[-1]]}{unit}"
    return Words(
        headline=f"{opening} in “{order[0]}”: {numbers[order[0]]}{unit}{other_end}.",
        sentences=(_OVER_SEEDS,),
    )


def best_in_words(results: ProbeResults) -> Words:
    """The model that does best in the first probe, and the one that does worst."""
    measure = main_measures(results.measures)[0]
    scores = sorted(results.scores(measure).items(), key=lambda item: -item[1].value)
    numbers = [
        f"“{model}” with {100 * score.value:.1f} %"
        + (f" ({100 * score.low:.1f} to {100 * score.high:.1f})" if score.has_interval else "")
        for model, score in scores
    ]
    other_end = f"; at the other end is {numbers[-1]}" if len(numbers) > 1 else ""
    title = title_of(measure)
    return Words(headline=f"{title[:1].upper()}{title[1:]}: best is {numbers[0]}{other_end}.", sentences=(OVER_IMAGES,))
