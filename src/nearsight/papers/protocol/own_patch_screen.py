"""What makes a head turn to its own patch: a screen of what S1 does not report, with that event as the response.

S1 has such heads in all four conditions with CutMix; ours have them in a few runs, all with CutMix and AutoAugment, and
learning rate, weight decay, positions and smoothing have been tried without finding what makes the difference. Here are
eleven settings that have not been. When labels are smoothed, before or after mixing, is no setting: it is the same.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import pandas as pd

from nearsight.augment import AutoAugment, CutMix
from nearsight.errors import InputError
from nearsight.papers.protocol import numbers as s1
from nearsight.papers.protocol.course import LASTING
from nearsight.papers.protocol.factorial import at_risk
from nearsight.papers.protocol.own_patch import own_patch_table
from nearsight.report.claims import OURS, Claim, asked
from nearsight.report.conditions import FACTOR_NAMES, missing_notes, noted
from nearsight.report.marks import Drawing, ForestRow, forest
from nearsight.report.own_patch import HEADS, OWN_PATCH
from nearsight.report.rules import LEANING, NO, SIGN_OF_FIT, YES, Finding, described, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import Row, Table, difference_in_words, probability, records, rounded, share
from nearsight.study import OFF, Study
from nearsight.study.factors import Levels
from nearsight.study.fractions import folded_plackett_burman
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, factorial_effects, separation
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS, _EPOCHS_BETWEEN = 100, 5
COLOUR: Final = "autoaugment"
"""Crossed with all settings: each is trained with CutMix alone, and with CutMix and AutoAugment."""
SETTINGS: Mapping[str, Levels] = {
    "qkv_bias": (True, False),
    "embed_norm": (False, True),
    "head_size": (24, 64),
    "qk_std": (0.02, 0.005),
    "final_norm": (True, False),
    "activation": ("gelu", "relu"),
    "precision": ("bf16", "fp32", "fp16"),
    "batch_size": (64, 256),
    "dropout": (0.0, 0.1),
    "cutmix.per_sample": (False, True),
    "cutmix.alpha": (1.0, 0.2),
}
"""Setting → its levels; the first is that of all other studies (whose batch of 128 lies between the two here)."""
_PRECISIONS = {"bf16": "bf16", "fp32": "finer", "fp16": "finer"}
_DESIGN = (
    "24 settings, Plackett and Burman's 12 rows of 11 factors and their mirror images (resolution IV: a main effect is "
    "apart from all others and from all interactions of two; an interaction of two is mixed with a third of some "
    "others), each with CutMix alone and with AutoAugment. Precision finer than bf16 is fp32 in the first 12 rows and "
    "fp16 in their images"
)


@recipe("own-patch-screen-cifar100")
def own_patch_screen_cifar100(*, seeds: int = 1) -> Study:
    """What makes a head turn to its own patch? Eleven settings that S1 does not report, 24 combinations (S1, Table 2)

    Plackett and Burman's design with its mirror image: main effects stand clear of all interactions of two. Each of
    the 24 settings trains with CutMix in every batch alone, and with AutoAugment. Heads are measured every fifth epoch.

    Run     nearsight study run own-patch-screen-cifar100
    Cost    48 cells of 100 epochs of 40,000 images (192 M), in 24 stacks of two; needs a GPU
    Result  not run yet; its plan is in results/own-patch-screen-cifar100
    """
    base = dataclasses.replace(trained_for(compact_cifar100("baseline"), _EPOCHS), measure_every=_EPOCHS_BETWEEN)
    base = dataclasses.replace(base, protocol=base.protocol.with_(CutMix(p=1.0)))
    factors: dict[str, Levels] = {**SETTINGS, COLOUR: (OFF, AutoAugment())}
    study = Study(base, factors=factors, seeds=seeds, ends=(s1.ONLY_CUTMIX, "all"))
    rows = folded_plackett_burman()
    settings = [_labels(study, row, is_image=place >= len(rows) // 2) for place, row in enumerate(rows)]
    colours = study.labels[COLOUR]
    return study.only(({**setting, COLOUR: colour} for setting in settings for colour in colours), described=_DESIGN)


def _labels(study: Study, row: Sequence[int], *, is_image: bool) -> dict[str, str]:
    """The levels of a row, by the names of the factors."""
    levels = {name: study.labels[name][sign > 0] for name, sign in zip(SETTINGS, row, strict=True)}
    return {**levels, "precision": "fp16"} if is_image and levels["precision"] == "fp32" else levels


def two_levels(results: StudyResults) -> tuple[pd.DataFrame, dict[str, tuple[str, str]]]:
    """The runs, and the two levels of every factor: precisions other than bf16 count as one."""
    runs = results.runs.assign(precision=results.runs["precision"].map(_PRECISIONS))
    levels = {name: (labels[0], labels[1]) for name, labels in results.factors.items()}
    return runs, {**levels, "precision": ("bf16", "finer")}


def with_events(results: StudyResults) -> pd.DataFrame:
    """The runs, two levels of each factor, with whether a head turned to its own patch while they trained."""
    return two_levels(results)[0].merge(_turned(results), on=["condition", "seed"])


@lru_cache(maxsize=1)  # every question asks for it
def _turned(results: StudyResults) -> pd.DataFrame:
    return at_risk(results)[["condition", "seed", HEADS]]


def of_settings(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per setting: in which share of its runs a head turned."""
    return runs.groupby(list(SETTINGS), sort=False)[HEADS].mean().reset_index()


def effect_on_events(runs: pd.DataFrame, factor: str, levels: Sequence[str]) -> tuple[float, float]:
    """What the second level changes in the share of runs with the event, and how surprising that is.

    Two-sided and exact, by permutation: were the factor without any effect, its levels could be dealt anew, of a
    setting to the 24 settings, whose runs stay together; of AutoAugment to the two runs of a setting.
    """
    if factor == COLOUR:
        found = separation(runs, factor, levels, HEADS, blocks=[*SETTINGS, "seed"])
    else:
        found = separation(of_settings(runs), factor, levels, HEADS)
    return found.difference, found.p


@lru_cache(maxsize=2)
def main_effects(results: StudyResults, response: str) -> Mapping[str, Estimate]:
    """What the second level of every factor changes in a number of a run, by one fit to all runs."""
    runs, levels = two_levels(results)
    effects = factorial_effects(runs, levels, response)
    return {
        row["term"]: Estimate(
            value=row["effect"], low=row["low"], high=row["high"], p=row["p"],
            error=row["standard_error"], df=effects.residual_df, n=int(runs["seed"].nunique()),
        )
        for row in records(effects.table)
        if row["order"] == 1
    }  # fmt: skip


def step_in_words(factor: str, levels: Sequence[str]) -> str:
    """ "dropout 0 → 0.1"."""
    return f"{FACTOR_NAMES.get(factor, factor)} {' → '.join(levels)}"


_EVENT = (
    f"a head's distance is below {share(OWN_PATCH)} of that to the next patch, {LASTING} measurements in a row, at any "
    "time of training"
)
_EVENT_RULE = (
    f"*Dealt anew.* The event: {_EVENT}. The share of runs that have it at the one level minus that at the other; "
    "were the factor without effect, its two levels could be dealt to the 24 settings anew (AutoAugment's: to the two "
    "runs of a setting). Shown: so large a difference is rare among all such dealings (exact, two-sided), and of the "
    "sign that is asked for, or of the opposite one. It leans that way where p ≤ 0.5."
)
_FAMILY = "own patch"


def _judge_event(factor: str, results: StudyResults) -> Finding:
    runs = with_events(results)
    levels = two_levels(results)[1][factor]
    difference, p = effect_on_events(runs, factor, levels)
    counts = _counts(runs, factor, levels)
    for_it, against = (p if sign * difference > 0 else 1.0 for sign in (1, -1))
    return Finding(
        ours=f"{step_in_words(factor, levels)}: {counts} of the runs; p = {probability(p)}",
        value=difference,
        n=int(runs["seed"].nunique()),
        p=for_it,
        p_against=against,
        leans=for_it <= 2 * LEANING,
    )


def _counts(runs: pd.DataFrame, factor: str, levels: Sequence[str]) -> str:
    """ "1 of 24 → 7 of 24"."""
    sides = [runs.loc[runs[factor] == level, HEADS] for level in levels]
    return " → ".join(f"{int(side.sum())} of {len(side)}" for side in sides)


_TEXTS = {
    "qkv_bias": "without biases of queries, keys and values",
    "embed_norm": "with norms around the patch embedding",
    "head_size": "with heads of 64 channels",
    "qk_std": "from smaller queries and keys",
    "final_norm": "without a final norm",
    "activation": "with ReLU",
    "precision": "in a finer arithmetic than bf16",
    "batch_size": "with batches of 256 rather than 64",
    "dropout": "with dropout",
    "cutmix.per_sample": "with CutMix drawn per sample",
    "cutmix.alpha": "with CutMix of α 0.2",
    COLOUR: "with AutoAugment",
}


def _about_event(factor: str) -> Claim:
    return Claim(
        id=f"own-patch-{factor}",
        text=f"Do heads turn to their own patch more often {_TEXTS[factor]}?",
        source=OURS,
        rule=_EVENT_RULE,
        family=_FAMILY,
        judge=partial(_judge_event, factor),
        across_seeds=True,
    )


def _judge_distance(factor: str, results: StudyResults) -> Finding:
    found = main_effects(results, "min_mad")
    if factor not in found or math.isnan(found[factor].df):
        raise InputError(f"the runs that there are do not say what {factor} does")
    words = f"{step_in_words(factor, two_levels(results)[1][factor])}: {difference_in_words(found[factor])}"
    return judge_sign(found[factor], sign=-1, words=words)


def _about_distance(factor: str) -> Claim:
    return Claim(
        id=f"min-mad-{factor}",
        text=f"Is the most local head more local {_TEXTS[factor]}?",
        source=OURS,
        rule=SIGN_OF_FIT,
        family="min MAD",
        judge=partial(_judge_distance, factor),
        across_seeds=True,
    )


@asked(
    "in-both",
    "Is there a setting that turns heads to their own patch in all its runs, with AutoAugment and without?",
    source=OURS,
    rule=f"*In both.* Yes: in all runs of some setting {_EVENT}. No: in none of the settings that have all runs. "
    "Nothing is tested; a setting that does is to be run as Table 2, with three seeds.",
)
def _in_both(results: StudyResults) -> Finding:
    runs = with_events(results)
    whole = runs.groupby(list(SETTINGS), sort=False)[HEADS].agg(["sum", "size"])
    seeds = int(runs["seed"].nunique())
    num_all = int((whole["sum"] == 2 * seeds).sum())
    by_colour = runs.groupby(COLOUR, sort=False)[HEADS].agg(["sum", "size"])
    names = {"off": "CutMix alone", "on": "AutoAugment, too"}
    words = "; ".join(
        f"{int(row['sum'])} of {int(row['size'])} runs with {names[str(level)]}" for level, row in by_colour.iterrows()
    )
    words += f"; in all runs of {num_all} of {len(whole)} settings"
    if not num_all and (whole["size"] < 2 * seeds).any():
        raise InputError(f"{words}; some settings lack runs")
    return described(YES if num_all else NO, words, value=float(runs[HEADS].sum()), n=seeds)


def screen_table(results: StudyResults) -> Table:
    """A row per factor: the event at its two levels, and what it changes in distance and accuracy."""
    runs, (_, levels) = with_events(results), two_levels(results)
    distances, accuracies = (main_effects(results, response) for response in ("min_mad", "test_acc"))
    rows = []
    for factor in distances:
        row = Row().keep(factor=factor, first=levels[factor][0], second=levels[factor][1])
        row.show("change", step_in_words(factor, levels[factor]))
        try:
            difference, p = effect_on_events(runs, factor, levels[factor])
        except InputError:  # no run at one of the levels yet
            continue
        row.both("event_difference", difference, "runs with the event", _counts(runs, factor, levels[factor]))
        row.both("event_p", p, "p, event", probability(p))
        distance, accuracy = distances[factor], accuracies[factor]
        row.keep(min_mad=distance.value, min_mad_low=distance.low, min_mad_high=distance.high, min_mad_p=distance.p)
        row.show("min MAD", difference_in_words(distance)).show("p, min MAD", probability(distance.p))
        row.keep(test_acc=accuracy.value, test_acc_low=accuracy.low, test_acc_high=accuracy.high, test_acc_p=accuracy.p)
        row.show("accuracy, points", difference_in_words(accuracy, scale=100, digits=2))
        rows.append(row.keep(scale=results.scale))
    if not rows:
        raise InputError("no factor has runs at both of its levels yet")
    notes = (
        f"The design: {results.design}.",
        f"The event: {_EVENT}. Its p: exact, two-sided, by dealing a factor's levels to the 24 settings anew, whose "
        "runs stay together (AutoAugment's: to the two runs of a setting).",
        "Min MAD and accuracy: main effects by ordinary least squares, the mean at the second level minus that at the "
        "first; ± is half the 95 % interval. p-values are not corrected for their number; the verdict's are.",
        *missing_notes(results),
    )
    return Table.of("screen", f"{results.name}: what each setting changes", rows, notes=notes)


def precision_table(results: StudyResults) -> Table:
    """Runs in each arithmetic: fp32 and fp16 are apart here, though each lies in one half of the design alone."""
    runs = results.runs.merge(_turned(results), on=["condition", "seed"])
    rows = []
    for level, some in runs.groupby("precision", sort=False):
        row = Row(precision=str(level)).both("runs", len(some))
        row.both("events", int(some[HEADS].sum()), "runs with the event", f"{int(some[HEADS].sum())} of {len(some)}")
        row.both("min_mad", some["min_mad"].mean(), "min MAD", rounded(some["min_mad"].mean()))
        rows.append(row.keep(scale=results.scale))
    notes = (f"The event: {_EVENT}. Means over the runs; fp32 is in the first half of the design, fp16 in the second.",)
    return Table.of("screen-precision", f"{results.name}: the event by arithmetic", rows, notes=notes)


def screen_figure(results: StudyResults) -> Drawing:
    """Main effects on the smallest distance, each with how many runs have the event at its two levels."""
    runs, (_, levels) = with_events(results), two_levels(results)
    found = sorted(main_effects(results, "min_mad").items(), key=lambda item: item[1].value)
    rows = [
        ForestRow(
            label=step_in_words(factor, levels[factor]),
            estimate=dataclasses.replace(estimate, n=0),
            words=_counts(runs, factor, levels[factor]),
        )
        for factor, estimate in found
    ]
    figure = forest(rows, "change of the smallest mean attention distance (left: more local)")
    caption = (
        "What each setting changes in the distance of the most local head, over all other settings, and in how many "
        "runs a head turned to its own patch, at its first and its second level."
    )
    words = "Main effects; bars: 95 % intervals. Numbers: runs with an own-patch head, first level → second."
    return noted(figure, results, caption, words, missing=True)


FACTORS: Sequence[Any] = (*SETTINGS, COLOUR)
report_on(
    "own-patch-screen-cifar100",
    claims=(_in_both, *map(_about_event, FACTORS), *map(_about_distance, FACTORS)),
    intervals="± is half a 95 % interval, by one fit to all runs.",
    tables=(screen_table, precision_table, own_patch_table),
    figures={"screen": screen_figure},
)
