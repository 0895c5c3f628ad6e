"""What the course of training answers: when heads become local, and by what."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from nearsight.errors import InputError
from nearsight.metrics import next_patch_distance
from nearsight.report.own_patch import OWN_PATCH
from nearsight.report.study.claim import Claim
from nearsight.report.study.emergence.course import GLOBAL_AGAIN, LASTING, LOCAL, Course, conditions_of, courses
from nearsight.report.study.emergence.tables import NEVER
from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.own_patch.heads import grid_of
from nearsight.report.study.paper import BASELINE, MODERN, ONLY_CUTMIX, WITHOUT_CUTMIX
from nearsight.report.study.questions import NO, SIGN, UNDECIDED, YES, judge_sign
from nearsight.report.study.rules import Finding, change_in_words
from nearsight.report.study.table import layers_in_words, rounded, share, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

LESS_CUTMIX = {ONLY_CUTMIX: BASELINE, MODERN: WITHOUT_CUTMIX}
"""Of conditions with CutMix, what differs from each by CutMix alone."""
WITH_CUTMIX = tuple(LESS_CUTMIX)


def _several(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _of(results: StudyResults, *conditions: str) -> list[Course]:
    found = [course for course in courses(results) if course.condition in conditions]
    absent = [label for label in conditions if label not in conditions_of(found)]
    if absent:
        raise InputError(f"no run of {', '.join(absent)} was measured while it trained")
    return found


def _without_cutmix(results: StudyResults) -> list[str]:
    return [
        label for label in dict.fromkeys((*results.planned, *results.runs["condition"])) if label not in WITH_CUTMIX
    ]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _num_seeds(found: Sequence[Course]) -> int:
    return len({course.seed for course in found})


WHERE = (
    "*First local head.* The answer is the range, over all runs with CutMix, of the epoch at which a first head is "
    f"local (below {rounded(LOCAL)} for {LASTING} measurements in a row), and its layers, with the number of "
    "these runs, where not all have one; never, where none has."
)
OWN = (
    "*To its own patch.* The answer is the range, over all runs with CutMix, of the epoch at which a first head is "
    f"below {share(OWN_PATCH)} of the distance to the next patch, {LASTING} measurements in a row, and its layers, "
    "with the number of these runs, where not all have one; never, where none has. Beside it: for how many epochs it "
    "had then been nearer than the next patch."
)
ONLY_WITH = (
    "*In every run.* Yes: every run with CutMix has a local head at some time, and no run without it has one. No: no "
    "run with CutMix has one, or every run without it does. Undecided: otherwise."
)
LEADS = (
    "*Who leads.* The lag is the epoch at which the smallest distance is half way minus that of validation accuracy. "
    "Accuracy leads: the lag is above 1 epoch in every run with CutMix. Locality leads: below −1 in every one. "
    "Undecided: otherwise, as where a run's heads do not become more local at all."
)
INTERVALS = (
    "± is half the 95 % interval of the mean over all runs with CutMix (Student's t), or over their differences from "
    "those without, which takes the runs of both conditions for draws of one kind."
)
TURNS = (
    "*Turning back.* Yes: some head of some run was local, and later, for "
    f"{LASTING} measurements in a row, at {rounded(GLOBAL_AGAIN)} or more. No: none did. Undecided: none was local."
)


def _judge_only_with(results: StudyResults) -> Finding:
    with_it, others = _of(results, *WITH_CUTMIX), _of(results, *_without_cutmix(results))
    has, others_have = ([course.first_local() is not None for course in some] for some in (with_it, others))
    words = f"{sum(has)} of {len(has)} runs with CutMix, {sum(others_have)} of {len(others_have)} without"
    answer = YES if all(has) and not any(others_have) else NO if not any(has) or all(others_have) else UNDECIDED
    return Finding(verdict=answer, ours=words, value=float(np.mean(has)), n=_num_seeds(with_it))


def _judge_equally_long(results: StudyResults) -> Finding:
    found = {(course.condition, course.seed): course for course in courses(results)}
    pairs = [
        (less, course)
        for (condition, seed), course in found.items()
        if condition in WITH_CUTMIX and (less := found.get((LESS_CUTMIX[condition], seed))) is not None
    ]
    if not pairs:
        raise InputError("no two runs that differ in CutMix alone were measured while they trained")
    epoch = min(course.epochs_E[-1] for pair in pairs for course in pair)
    without, with_it = ([pair[place].smallest[pair[place].epochs_E <= epoch][-1] for pair in pairs] for place in (0, 1))
    ours = mean_interval(np.subtract(with_it, without))
    change = change_in_words(mean_interval(without), mean_interval(with_it), ours, accuracy=False)
    words = f"{change} at epoch {epoch:g}, {_several(len(pairs), 'pair')} of runs"
    return judge_sign(Estimate.of(ours), sign=-1, words=words, n=_num_seeds([course for _, course in pairs]))


def _judge_first(results: StudyResults) -> Finding:
    return _first_of_each({course: course.first_local() for course in _of(results, *WITH_CUTMIX)})


def _judge_own_patch(results: StudyResults) -> Finding:
    step = next_patch_distance(grid_of(results))
    turns = {course: course.first_own_patch(step) for course in _of(results, *WITH_CUTMIX)}
    how_fast = {
        course: f", within {_several(turn.lasted, 'epoch')}"
        for course, turn in turns.items()
        if turn and turn.lasted > 0
    }
    firsts = {course: (turn.epoch, turn.layer) if turn else None for course, turn in turns.items()}
    return _first_of_each(firsts, how_fast)


def _first_of_each(
    firsts: Mapping[Course, tuple[int, int] | None], more: Mapping[Course, str] = MappingProxyType({})
) -> Finding:
    """From the epoch and layer at which something first is so, run by run; `more` is said of a run besides."""
    known = [place for place in firsts.values() if place is not None]
    words = "; ".join(
        f"{course.condition} {course.seed}: "
        + (NEVER if place is None else f"epoch {place[0]}, L{place[1] + 1}{more.get(course, '')}")
        for course, place in firsts.items()
    )
    answer, value = NEVER, float("nan")
    if known:
        epochs = [epoch for epoch, _ in known]
        answer = f"epoch {_range(epochs)}, {layers_in_words(layer for _, layer in known)}"
        if len(known) < len(firsts):
            answer += f", in {len(known)} of {len(firsts)} runs"
        value = float(np.mean(epochs))
    return Finding(verdict=answer, ours=words, value=value, n=_num_seeds(list(firsts)))


def _judge_lead(results: StudyResults) -> Finding:
    found = _of(results, *WITH_CUTMIX)
    lags = [course.locality_half() - course.accuracy_half() for course in found]
    known = [lag for lag in lags if not np.isnan(lag)]
    interval = mean_interval(known)
    words = f"lag {with_interval(interval, digits=1, signed=True)} epochs, in {len(known)} of {len(lags)} runs"
    answer = UNDECIDED
    if all(lag > 1 for lag in lags):
        answer = "accuracy leads"
    elif all(lag < -1 for lag in lags):
        answer = "locality leads"
    return Finding(
        verdict=answer, ours=words, value=interval.mean, low=interval.low, high=interval.high, n=_num_seeds(found)
    )


def _judge_turns(results: StudyResults) -> Finding:
    found = courses(results)
    counts = [course.turned() for course in found]
    became, again = (sum(count[place] for count in counts) for place in (0, 1))
    words = f"{again} of {became} heads that were ever local, in {len(found)} runs"
    answer = YES if again else NO if became else UNDECIDED
    return Finding(verdict=answer, ours=words, value=float(again), n=_num_seeds(found))


EMERGENCE_QUESTIONS = (
    Claim(
        id="only-with-cutmix",
        text="Do local heads appear with CutMix, and only with it?",
        source="S1 §7, limitations",
        rule=ONLY_WITH,
        judge=_judge_only_with,
    ),
    Claim(
        id="equally-many-epochs",
        text="After equally many epochs, does the most local head look nearer with CutMix?",
        source="S1 §7, limitations; asked of these runs afterwards",
        rule=SIGN,
        judge=_judge_equally_long,
    ),
    Claim(
        id="first-local-head",
        text="When does the first local head appear, and in which layer?",
        source="S1 §7, future work iv",
        rule=WHERE,
        judge=_judge_first,
    ),
    Claim(
        id="accuracy-leads",
        text="Does accuracy lead locality, or follow it?",
        source="S1 §7, future work iv",
        rule=LEADS,
        judge=_judge_lead,
    ),
    Claim(
        id="turns-global",
        text="Does a local head ever become global again?",
        source="S1 §7, limitations",
        rule=TURNS,
        judge=_judge_turns,
    ),
    Claim(
        id="turns-to-own-patch",
        text="When does a head turn to its own patch, and how fast?",
        source="after ablation-fitted-cifar100",
        rule=OWN,
        judge=_judge_own_patch,
    ),
)
