"""What moves the most local head of `unreported-cifar100`: main effects of the settings, with and without CutMix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.claim import Claim
from nearsight.report.study.conditions import FACTOR_NAMES
from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.paper import ONLY_CUTMIX, PUBLISHED, with_cutmix
from nearsight.report.study.questions import NO, SIGN, YES, judge_sign
from nearsight.report.study.responses import responses_of, with_early_layers
from nearsight.report.study.rules import ROUNDING, SIZE_TOLERANCE, Finding
from nearsight.report.study.shares import share_notes
from nearsight.report.study.table import Table, probability, records, rounded, share
from nearsight.report.study.unreported.fit import CUTMIX, best_fitting_levels, fits, levels_in_words, settings_of
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Effects, factorial_effects

# The largest of the paper's smallest distances with CutMix.
PAPERS_BOUND = max(float(PUBLISHED["ablation-cifar100"].conditions[label].min_mad or 0.0) for label in with_cutmix())
GROUPS = {"with CutMix": True, "without CutMix": False}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A factor's effect on one response: what going from the first of two levels to the second changes."""

    factor: str
    levels: tuple[str, str]
    estimate: Estimate
    p: float

    @property
    def in_words(self) -> str:
        """ "weight decay 0.05 → 0"."""
        return f"{FACTOR_NAMES.get(self.factor, self.factor)} {self.levels[0]} → {self.levels[1]}"


def fitted(results: StudyResults, response: str, *, has_cutmix: bool) -> tuple[Effects, dict[str, Sequence[str]]]:
    """The settings' effects among the runs with CutMix (then its probability is a factor too) or without."""
    runs, levels = with_early_layers(results), results.factors.get(CUTMIX, ())
    chosen = runs[(runs[CUTMIX] != levels[0]) == has_cutmix] if levels else runs
    if chosen.empty:
        raise InputError(f"no run {'with' if has_cutmix else 'without'} CutMix yet")
    factors: dict[str, Sequence[str]] = {name: results.factors[name] for name in settings_of(results)}
    if has_cutmix:
        factors[CUTMIX] = levels[1:]
    return factorial_effects(chosen, factors, response), factors


def changes(results: StudyResults, response: str = "min_mad", *, has_cutmix: bool = True) -> list[Change]:
    """Main effects, those that make heads most local first."""
    effects, factors = fitted(results, response, has_cutmix=has_cutmix)
    found = [
        Change(
            factor=row["term"],
            levels=(str(factors[row["term"]][0]), str(factors[row["term"]][1])),
            estimate=Estimate(value=row["effect"], low=row["low"], high=row["high"]),
            p=row["p"],
        )
        for row in records(effects.table)
        if row["order"] == 1
    ]
    return sorted(found, key=lambda change: change.estimate.value)


def settings_table(results: StudyResults) -> Table:
    """Main effects on locality, focus and accuracy, among the runs with CutMix and among those without."""
    rows, shown, notes = [], [], []
    responses = responses_of(results)
    for group, has_cutmix in GROUPS.items():
        try:
            found = {
                response: {change.factor: change for change in changes(results, response, has_cutmix=has_cutmix)}
                for response in responses
            }
        except InputError:
            continue
        effects, _ = fitted(results, "min_mad", has_cutmix=has_cutmix)
        notes.append(f"Runs {group}: {effects.num_runs}, {effects.residual_df} of them left over to learn the noise.")
        for factor, change in found["min_mad"].items():
            cells = {
                title: found[response][factor].estimate.in_words(scale=scale, digits=digits)
                for response, (title, scale, digits) in responses.items()
            }
            shown.append({"runs": group, "change": change.in_words, **cells, "p, min MAD": probability(change.p)})
            rows += [_row(results, group, response, found[response][factor]) for response in responses]
    if not rows:
        raise InputError("no effect can be estimated yet")
    return Table(
        name="settings",
        title=f"{results.name}: what each setting changes",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(
            "Main effects by ordinary least squares: the mean at the second level minus that at the first, over all "
            "other settings; ± is half the 95 % interval. p-values are not corrected for their number.",
            what_moves_it(results),
            *share_notes(results),
            *notes,
        ),
    )


def _row(results: StudyResults, group: str, response: str, change: Change) -> dict[str, object]:
    first, second = change.levels
    numbers = {"effect": change.estimate.value, "low": change.estimate.low, "high": change.estimate.high, "p": change.p}
    return {
        **{"runs": group, "factor": change.factor, "from": first, "to": second, "response": response},
        **numbers,
        "scale": results.scale,
    }


def what_moves_it(results: StudyResults) -> str:
    """In a sentence: what makes the most local head of runs with CutMix look nearer, what does not."""
    found = changes(results)
    sure = {sign: [change for change in found if change.estimate.is_sure(sign)] for sign in (-1, 1)}
    told = [
        f"{words}: {'; '.join(f'{change.in_words} ({change.estimate.in_words()})' for change in some)}"
        for words, some in (("Nearer", sure[-1]), ("farther", sure[1][::-1]))
        if some
    ]
    rest = [change.in_words for change in found if change not in (*sure[-1], *sure[1])]
    told += [f"not shown to move it: {', '.join(rest)}"] if rest else []
    sentence = ". ".join(part[0].upper() + part[1:] for part in told)
    return f"What moves the smallest distance of runs with CutMix. {sentence}."


_ASKED: Mapping[str, str] = {
    "lr": "With CutMix, does a lower learning rate make the most local head look nearer?",
    "weight_decay": "With CutMix, does it look nearer without weight decay?",
    "init": "With CutMix, does it look nearer from PyTorch's own initialisation?",
    "position_std": "With CutMix, does it look nearer from positions drawn from N(0, 1)?",
    CUTMIX: "Does it look nearer with CutMix in every batch rather than in half of them?",
}


def _judge_factor(factor: str, results: StudyResults) -> Finding:
    found = [change for change in changes(results) if change.factor == factor]
    if not found:
        raise InputError(f"{factor} does not vary among the runs with CutMix")
    words = f"{found[0].in_words}: {found[0].estimate.in_words()}"
    return judge_sign(found[0].estimate, sign=-1, words=words, n=_num_seeds(results))


def _num_seeds(results: StudyResults) -> int:
    return int(results.runs["seed"].nunique())


REACHED = (
    "*Reached.* Yes: some setting's smallest distance with CutMix is at or below the paper's largest "
    f"({rounded(PAPERS_BOUND)}), give or take {share(SIZE_TOLERANCE)} of it. No: otherwise."
)
NEAREST = (
    "*Nearest.* The answer is the setting with the smallest distance to the paper's numbers (tables/fit-to-paper)."
)


def _judge_reached(results: StudyResults) -> Finding:
    column = f"min_mad_{ONLY_CUTMIX}"
    lowest = min(records(fits(results)), key=lambda row: float(row[column]))
    value = float(lowest[column])
    reached = value <= PAPERS_BOUND * (1 + SIZE_TOLERANCE) + ROUNDING
    words = f"{rounded(value)} at {levels_in_words({name: str(lowest[name]) for name in results.factors})}"
    return Finding(verdict=YES if reached else NO, ours=words, value=value, n=_num_seeds(results))


def _judge_nearest(results: StudyResults) -> Finding:
    table = fits(results)
    distances = table["distance"]
    others = f"the others {rounded(distances.iloc[1], 2)} and more" if len(table) > 1 else "no other has runs yet"
    words = f"distance {rounded(distances.iloc[0], 2)}; {others}"
    answer = levels_in_words(best_fitting_levels(results))
    return Finding(verdict=answer, ours=words, value=float(distances.iloc[0]), n=_num_seeds(results))


UNREPORTED_QUESTIONS = (
    Claim(
        id="nearest-setting",
        text="Which setting gives the paper's accuracies and distances?",
        source="S1, Table 2",
        rule=NEAREST,
        judge=_judge_nearest,
    ),
    Claim(
        id="reached",
        text="Does any setting bring the smallest distance down to the paper's?",
        source="S1 abstract",
        rule=REACHED,
        judge=_judge_reached,
    ),
    *(
        Claim(
            id=factor,
            text=question,
            source="min MAD, main effect",
            rule=SIGN,
            judge=partial(_judge_factor, factor),
        )
        for factor, question in _ASKED.items()
    ),
)
