"""When heads become local: all of them, measured while they train."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd

from nearsight.augment import CutMix
from nearsight.errors import InputError
from nearsight.metrics import next_patch_distance
from nearsight.papers.protocol.course import GLOBAL_AGAIN, LASTING, LOCAL, Course, conditions_of, courses
from nearsight.papers.protocol.emergence_figures import (
    heads_in_motion,
    layers_by_epoch,
    layers_over_epochs,
    over_epochs,
)
from nearsight.papers.protocol.numbers import BASELINE, MODERN, ONLY_CUTMIX, WITHOUT_CUTMIX
from nearsight.papers.protocol.unreported import ablation_fitted_cifar100
from nearsight.report.claims import Claim
from nearsight.report.fits import Estimate
from nearsight.report.own_patch import OWN_PATCH, grid_of
from nearsight.report.rules import NO, SIGN, UNDECIDED, YES, Finding, change_in_words, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import MISSING, Table, layers_in_words, rounded, share, with_interval
from nearsight.study import Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 100
# About as long as early stopping lets Modern train under the settings that fit the paper best.
_MANY_EPOCHS = 300
_EPOCHS_BETWEEN = 3


@recipe("emergence-cifar100")
def emergence_cifar100(*, seeds: int = 2) -> Study:
    """When does the first local head appear, where, and does accuracy lead or follow? (S1 §7, future work iv)

    Every head is measured on 512 test images at the start and after every epoch.

    Run     nearsight study run emergence-cifar100
    Cost    6 cells of 100 epochs of 40,000 images (24 M), and 0.3 M measured; needs a GPU
    Result  see results/emergence-cifar100
    """
    base = dataclasses.replace(trained_for(compact_cifar100("baseline"), _EPOCHS), measure_every=1)
    protocols = {
        "Baseline": base.protocol,
        "+CutMix": base.protocol.with_(CutMix(p=0.5)),
        "Modern": trained_for(compact_cifar100("modern"), _EPOCHS).protocol,
    }
    return Study(base, factors={"protocol": protocols}, seeds=seeds)


@recipe("emergence-fitted-cifar100")
def emergence_fitted_cifar100(*, seeds: int = 2) -> Study:
    """Is it CutMix, or that runs with it train longer? 300 epochs for all, CutMix in every batch (S1 §7, limitations)

    Early stopping lets runs with CutMix train several times as long as those without, so that ablations cannot tell the
    two apart; here all train equally long, with and without the rest of Modern, under the settings of
    ablation-fitted-cifar100. Every head is measured on 512 test images at the start and after every third epoch.

    Run     nearsight study run emergence-fitted-cifar100
    Cost    8 cells of 300 epochs of 40,000 images (96 M), and 0.4 M measured; needs a GPU
    Result  it is CutMix: local heads in all runs with it and in none without, see results/emergence-fitted-cifar100
    """
    fitted = {cell.condition: cell.config for cell in ablation_fitted_cifar100(seeds=1).cells}
    runs = {label: trained_for(fitted[label], _MANY_EPOCHS) for label in ("Baseline", "−CutMix", "+CutMix", "Modern")}
    base = dataclasses.replace(runs["Baseline"], measure_every=_EPOCHS_BETWEEN)
    return Study(base, factors={"protocol": {label: run.protocol for label, run in runs.items()}}, seeds=seeds)


# The course of the studies of emergence as a table.


NEVER = "never"
_WHOLE_OR_NONE = ("first_epoch", "first_layer", "own_patch_epoch", "own_patch_layer")


def course_table(results: StudyResults) -> Table:
    """A row per run: its first local head, its half-way epochs, its heads that turned back."""
    rows, shown = [], []
    step = next_patch_distance(grid_of(results))
    for course in courses(results):
        first = course.first_local()
        became, again = course.turned()
        locality, accuracy = course.locality_half(), course.accuracy_half()
        turn = course.first_own_patch(step)
        rows.append(
            {
                **{"condition": course.condition, "seed": course.seed, "threshold": LOCAL, "scale": results.scale},
                **{"first_epoch": first[0] if first else None, "first_layer": first[1] if first else None},
                **{"own_patch_epoch": turn.epoch if turn else None, "own_patch_layer": turn.layer if turn else None},
                **{"smallest_at_start": course.smallest[0], "smallest_at_end": course.smallest[-1]},
                **{"num_local_at_end": course.num_local(), "num_ever_local": became, "num_global_again": again},
                **{"locality_half_epoch": locality, "accuracy_half_epoch": accuracy, "lag": locality - accuracy},
            }
        )
        shown.append(
            {
                "condition": course.condition,
                "seed": str(course.seed),
                "first local head": f"epoch {first[0]}, L{first[1] + 1}" if first else NEVER,
                "to its own patch": f"epoch {turn.epoch}, L{turn.layer + 1}" if turn else NEVER,
                "smallest MAD, start to end": f"{rounded(course.smallest[0])} to {rounded(course.smallest[-1])}",
                "local heads at the end": str(course.num_local()),
                "ever local, global again": f"{became}, {again}",
                "half way: MAD, accuracy": f"{_epoch(locality)}, {_epoch(accuracy)}",
                "lag, epochs": rounded(locality - accuracy, 1, signed=True),
            }
        )
    numbers = pd.DataFrame(rows)
    return Table(
        name="emergence",
        title=f"{results.name}: when heads become local",
        numbers=numbers.astype(dict.fromkeys(_WHOLE_OR_NONE, "Int64")),
        shown=pd.DataFrame(shown),
        notes=(
            f"Local: a distance below {rounded(LOCAL)}, the paper's smallest without CutMix, {LASTING} measurements "
            f"in a row; global again: at least {rounded(GLOBAL_AGAIN)} for as many. Epoch 0 are the initial weights.",
            f"To its own patch: below {share(OWN_PATCH)} of the distance to the next patch ({rounded(step)}), "
            f"{LASTING} measurements in a row.",
            "Half way: the epoch at which the smallest distance, or the validation accuracy, has made half of its "
            "change from start to end (accuracy from 0). Lag: the former minus the latter; positive: accuracy leads.",
        ),
    )


def _epoch(value: float) -> str:
    return MISSING if np.isnan(value) else f"epoch {rounded(value, 1)}"


# What the course of training answers: when heads become local, and by what.


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


report_on(
    "emergence-cifar100",
    "emergence-fitted-cifar100",
    claims=EMERGENCE_QUESTIONS,
    intervals=INTERVALS,
    tables=(course_table,),
    figures={
        "emergence-course": over_epochs,
        "emergence-layers": layers_over_epochs,
        "emergence-layers-by-epoch": layers_by_epoch,
    },
    animations={"emergence-heads": heads_in_motion},
)
