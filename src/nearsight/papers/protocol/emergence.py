"""When heads become local: all of them, measured while they train."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from nearsight.augment import CutMix
from nearsight.errors import InputError
from nearsight.metrics import next_patch_distance
from nearsight.papers.protocol.course import GLOBAL_AGAIN, LASTING, LOCAL, Course, Turn, conditions_of, courses
from nearsight.papers.protocol.emergence_figures import (
    heads_in_motion,
    layers_by_epoch,
    layers_over_epochs,
    over_epochs,
)
from nearsight.papers.protocol.numbers import BASELINE, MODERN, ONLY_CUTMIX, WITHOUT_CUTMIX
from nearsight.papers.protocol.unreported import ablation_fitted_cifar100
from nearsight.report.claims import asked
from nearsight.report.findings import Section
from nearsight.report.own_patch import OWN_PATCH, grid_of
from nearsight.report.rules import NO, SIGN, UNDECIDED, YES, Finding, change_in_words, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import MISSING, Row, Table, layers_in_words, rounded, share, with_interval
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

    Early stopping lets runs with CutMix train several times as long as those without, so that ablations cannot separate
    the two; here all train equally long, with and without the rest of Modern, under the settings of
    ablation-fitted-cifar100. Every head is measured on 512 test images at the start and after every third epoch.

    Run     nearsight study run emergence-fitted-cifar100
    Cost    8 cells of 300 epochs of 40,000 images (96 M), and 0.4 M measured; needs a GPU
    Result  it is CutMix: local heads in all runs with it and in none without, see results/emergence-fitted-cifar100
    """
    fitted = {cell.condition: cell.config for cell in ablation_fitted_cifar100(seeds=1).cells}
    runs = {label: trained_for(fitted[label], _MANY_EPOCHS) for label in ("Baseline", "−CutMix", "+CutMix", "Modern")}
    base = dataclasses.replace(runs["Baseline"], measure_every=_EPOCHS_BETWEEN)
    return Study(base, factors={"protocol": {label: run.protocol for label, run in runs.items()}}, seeds=seeds)


_LESS_CUTMIX = {ONLY_CUTMIX: BASELINE, MODERN: WITHOUT_CUTMIX}
"""Of conditions with CutMix, what differs from each by CutMix alone."""
_WITH_CUTMIX = tuple(_LESS_CUTMIX)
_NEVER = "never"


def _of(results: StudyResults, *conditions: str) -> list[Course]:
    found = [course for course in courses(results) if course.condition in conditions]
    absent = [label for label in conditions if label not in conditions_of(found)]
    if absent:
        raise InputError(f"no run of {', '.join(absent)} was measured while it trained")
    return found


def _several(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _num_seeds(found: Iterable[Course]) -> int:
    return len({course.seed for course in found})


@asked(
    "only-with-cutmix",
    "Do local heads appear with CutMix, and only with it?",
    source="S1 §7, limitations",
    rule="*In every run.* Yes: every run with CutMix has a local head at some time, and no run without it has one. No: "
    "no run with CutMix has one, or every run without it does. Undecided: otherwise.",
)
def _only_with(results: StudyResults) -> Finding:
    labels = dict.fromkeys((*results.planned, *results.runs["condition"]))
    with_it = _of(results, *_WITH_CUTMIX)
    others = _of(results, *(label for label in labels if label not in _WITH_CUTMIX))
    has, others_have = ([course.first_local() is not None for course in some] for some in (with_it, others))
    words = f"{sum(has)} of {len(has)} runs with CutMix, {sum(others_have)} of {len(others_have)} without"
    answer = YES if all(has) and not any(others_have) else NO if not any(has) or all(others_have) else UNDECIDED
    return Finding(verdict=answer, ours=words, value=float(np.mean(has)), n=_num_seeds(with_it))


@asked(
    "equally-many-epochs",
    "After equally many epochs, is the most local head more local with CutMix?",
    source="S1 §7, limitations",
    rule=SIGN,
)
def _equally_long(results: StudyResults) -> Finding:
    found = {(course.condition, course.seed): course for course in courses(results)}
    pairs = [
        (less, course)
        for (condition, seed), course in found.items()
        if condition in _LESS_CUTMIX and (less := found.get((_LESS_CUTMIX[condition], seed))) is not None
    ]
    if not pairs:
        raise InputError("no two runs that differ in CutMix alone were measured while they trained")
    epoch = min(course.epochs_E[-1] for pair in pairs for course in pair)
    without, with_it = ([pair[place].smallest[pair[place].epochs_E <= epoch][-1] for pair in pairs] for place in (0, 1))
    ours = mean_interval(np.subtract(with_it, without))
    change = change_in_words(mean_interval(without), mean_interval(with_it), ours, accuracy=False)
    words = f"{change} at epoch {epoch:g}, {_several(len(pairs), 'pair')} of runs"
    return judge_sign(ours, sign=-1, words=words, n=_num_seeds([course for _, course in pairs]))


@asked(
    "first-local-head",
    "When does the first local head appear, and in which layer?",
    source="S1 §7, future work iv",
    rule="*First local head.* The answer is the range, over all runs with CutMix, of the epoch at which a first head "
    f"is local (below {rounded(LOCAL)} for {LASTING} measurements in a row), and its layers, with the number of these "
    "runs, where not all have one; never, where none has.",
)
def _first(results: StudyResults) -> Finding:
    return _first_of_each({course: course.first_local() for course in _of(results, *_WITH_CUTMIX)})


@asked(
    "turns-to-own-patch",
    "When does a head turn to its own patch, and how fast?",
    source="after ablation-fitted-cifar100",
    rule="*To its own patch.* The answer is the range, over all runs with CutMix, of the epoch at which a first head "
    f"is below {share(OWN_PATCH)} of the distance to the next patch, {LASTING} measurements in a row, and its layers, "
    "with the number of these runs, where not all have one; never, where none has. With it: for how many epochs its "
    "distance had by then been below that of the next patch.",
)
def _own_patch(results: StudyResults) -> Finding:
    step = next_patch_distance(grid_of(results))
    turns = {course: course.first_own_patch(step) for course in _of(results, *_WITH_CUTMIX)}
    return _first_of_each(turns, how_fast=True)


def _first_of_each(turns: Mapping[Course, Turn | None], *, how_fast: bool = False) -> Finding:
    """From the epoch and layer at which something first is so, run by run."""
    words = []
    for course, turn in turns.items():
        within = f", within {_several(turn.lasted, 'epoch')}" if turn and how_fast and turn.lasted > 0 else ""
        words.append(f"{course.condition} {course.seed}: {turn or _NEVER}{within}")
    known = [turn for turn in turns.values() if turn is not None]
    answer, value = _NEVER, float("nan")
    if known:
        epochs = [turn.epoch for turn in known]
        first, last = min(epochs), max(epochs)
        answer = f"epoch {first if first == last else f'{first} to {last}'}, "
        answer += layers_in_words(turn.layer for turn in known)
        if len(known) < len(turns):
            answer += f", in {len(known)} of {len(turns)} runs"
        value = float(np.mean(epochs))
    return Finding(verdict=answer, ours="; ".join(words), value=value, n=_num_seeds(turns))


@asked(
    "accuracy-leads",
    "Does accuracy lead locality, or follow it?",
    source="S1 §7, future work iv",
    rule="*Who leads.* The lag is the epoch at which the smallest distance is half way minus that of validation "
    "accuracy. Accuracy leads: the lag is above 1 epoch in every run with CutMix. Locality leads: below −1 in every "
    "one. Undecided: otherwise, as where a run's heads do not become more local at all.",
)
def _lead(results: StudyResults) -> Finding:
    found = _of(results, *_WITH_CUTMIX)
    lags = [course.locality_half() - course.accuracy_half() for course in found]
    known = [lag for lag in lags if not np.isnan(lag)]
    interval = mean_interval(known)
    words = f"lag {with_interval(interval, digits=1, signed=True)} epochs, in {len(known)} of {len(lags)} runs"
    leads = all(lag > 1 for lag in lags), all(lag < -1 for lag in lags)
    answer = "accuracy leads" if leads[0] else "locality leads" if leads[1] else UNDECIDED
    return Finding(
        verdict=answer, ours=words, value=interval.value, low=interval.low, high=interval.high, n=_num_seeds(found)
    )


@asked(
    "turns-global",
    "Does a local head ever become global again?",
    source="S1 §7, limitations",
    rule=f"*Turning back.* Yes: some head of some run was local, and later, for {LASTING} measurements in a row, at "
    f"{rounded(GLOBAL_AGAIN)} or more. No: none did. Undecided: none was local.",
)
def _turns(results: StudyResults) -> Finding:
    found = courses(results)
    counts = [course.turned() for course in found]
    became, again = (sum(count[place] for count in counts) for place in (0, 1))
    words = f"{again} of {became} heads that were ever local, in {len(found)} runs"
    answer = YES if again else NO if became else UNDECIDED
    return Finding(verdict=answer, ours=words, value=float(again), n=_num_seeds(found))


def course_table(results: StudyResults) -> Table:
    """A row per run: its first local head, its half-way epochs, its heads that turned back."""
    rows, step = [], next_patch_distance(grid_of(results))
    for course in courses(results):
        became, again = course.turned()
        locality, accuracy = course.locality_half(), course.accuracy_half()
        row = Row(condition=course.condition, seed=course.seed).keep(threshold=LOCAL, scale=results.scale)
        for name, title, turn in (
            ("first", "first local head", course.first_local()),
            ("own_patch", "to its own patch", course.first_own_patch(step)),
        ):
            epoch, layer = (turn.epoch, turn.layer) if turn else (pd.NA, pd.NA)
            row.keep(**{f"{name}_epoch": epoch, f"{name}_layer": layer}).show(title, str(turn) if turn else _NEVER)
        start, end = course.smallest[0], course.smallest[-1]
        row.keep(smallest_at_start=start, smallest_at_end=end)
        row.show("smallest MAD, start to end", f"{rounded(start)} to {rounded(end)}")
        row.both("num_local_at_end", course.num_local(), "local heads at the end")
        row.keep(num_ever_local=became, num_global_again=again).show("ever local, global again", f"{became}, {again}")
        row.keep(locality_half_epoch=locality, accuracy_half_epoch=accuracy)
        row.show("half way: MAD, accuracy", f"{_epoch(locality)}, {_epoch(accuracy)}")
        lag = locality - accuracy
        rows.append(row.both("lag", lag, "lag, epochs", rounded(lag, 1, signed=True)))
    notes = (
        f"Local: a distance below {rounded(LOCAL)}, the paper's smallest without CutMix, {LASTING} measurements in a "
        f"row; global again: at least {rounded(GLOBAL_AGAIN)} for as many. Epoch 0 are the initial weights.",
        f"To its own patch: below {share(OWN_PATCH)} of the distance to the next patch ({rounded(step)}), {LASTING} "
        "measurements in a row.",
        "Half way: the epoch at which the smallest distance, or the validation accuracy, has made half of its change "
        "from start to end (accuracy from 0). Lag: the former minus the latter; positive: accuracy leads.",
    )
    return Table.of("emergence", f"{results.name}: when heads become local", rows, notes=notes)


def _epoch(value: float) -> str:
    return MISSING if np.isnan(value) else f"epoch {rounded(value, 1)}"


_INTERVALS = (
    "± is half the 95 % interval of the mean over all runs with CutMix (Student's t), or over their differences from "
    "those without, which takes the runs of both conditions for draws of one kind."
)
report_on(
    "emergence-cifar100",
    "emergence-fitted-cifar100",
    claims=(_only_with, _equally_long, _first, _lead, _turns, _own_patch),
    intervals=_INTERVALS,
    tables=(course_table,),
    figures={
        "emergence-course": over_epochs,
        "emergence-layers": layers_over_epochs,
        "emergence-layers-by-epoch": layers_by_epoch,
    },
    animations={"emergence-heads": heads_in_motion},
)

FINDING = Section(
    title="When do heads become local?",
    claim="S1 measures trained models only, and asks at which epoch the pattern appears.",
    answers={
        "emergence-cifar100": (),
        "emergence-fitted-cifar100": ("first-local-head", "accuracy-leads", "turns-global", "turns-to-own-patch"),
    },
    in_short=("first-local-head", "accuracy-leads"),
    figures=(
        ("emergence-cifar100", "emergence-course.png"),
        ("emergence-fitted-cifar100", "emergence-layers-by-epoch.png"),
        ("emergence-fitted-cifar100", "emergence-heads.gif"),
    ),
    change_our_mind="Another schedule under which locality comes first, or seeds whose local heads do not last.",
)
