"""What S1 does not report: which settings give its numbers, and what moves the smallest distance from 0.2 to 0.02."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.augment import AutoAugment, CutMix
from nearsight.errors import InputError, unknown_name
from nearsight.papers.protocol.ablation import ablation, ablation_cifar100
from nearsight.papers.protocol.numbers import BASELINE, ONLY_CUTMIX, PUBLISHED, with_cutmix
from nearsight.report.claims import Claim
from nearsight.report.conditions import FACTOR_NAMES, scale_notes
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    INK,
    MUTED,
    add_legend,
    house_style,
    light_grid,
    model_style,
)
from nearsight.report.fits import Estimate
from nearsight.report.marks import Drawing, ForestRow, add_footnote, forest
from nearsight.report.responses import responses_of, share_notes, with_early_layers
from nearsight.report.rules import NO, ROUNDING, SIGN, SIZE_TOLERANCE, YES, Finding, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import Table, percent, probability, records, rounded, share
from nearsight.study import OFF, Study
from nearsight.study.factors import Levels
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Effects, factorial_effects
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 60
# The first level of each is the conventional guess that all other studies start from.
_SETTINGS: Mapping[str, Levels] = {
    "lr": (1e-3, 3e-4),
    "weight_decay": (0.05, 0.0),
    "init": ("trunc_normal", "pytorch"),
    "position_std": (0.02, 1.0),
}
_CUTMIX: Mapping[str, Any] = {"off": OFF, "p=0.5": CutMix(p=0.5), "p=1": CutMix(p=1.0)}


@recipe("unreported-cifar100")
def unreported_cifar100(*, seeds: int = 1) -> Study:
    """Which unreported settings give the paper's numbers? Learning rate, decay, initialisation, CutMix (S1, Table 2)

    Half of the 16 combinations of learning rate, weight decay and the two initialisations (the positions' is the
    product of the others, so that every main effect stands clear of all interactions of two), each without CutMix and
    with it at two probabilities: every setting has its own Baseline.

    Run     nearsight study run unreported-cifar100
    Cost    24 cells of 60 epochs of 40,000 images (57 M); needs a GPU
    Result  see results/unreported-cifar100
    """
    base = trained_for(compact_cifar100("baseline"), _EPOCHS)
    half = Study(base, factors=_SETTINGS).fraction("D=ABC").chosen or ()
    study = Study(base, factors={**_SETTINGS, "cutmix": _CUTMIX}, seeds=seeds, ends=("Baseline", "all"))
    return study.only({**settings, "cutmix": level} for settings in half for level in _CUTMIX)


@recipe("ablation-fitted-cifar100")
def ablation_fitted_cifar100(*, seeds: int = 3) -> Study:
    """Table 2 again, under the settings that come nearest to its numbers: CutMix in every batch (S1, Table 2)

    Without CutMix these are the runs of ablation-cifar100, which need not be run again.

    Run     nearsight study run ablation-fitted-cifar100 --reuse results/ablation-cifar100
    Cost    24 cells of at most 600 epochs of 40,000 images (576 M; half of them are reused); needs a GPU
    Result  the gap reproduces, the paper's magnitude in 4 of 12 runs with CutMix: see results/ablation-fitted-cifar100
    """
    return ablation_under(NEAREST, seeds=seeds)


NEAREST: Mapping[str, str] = {
    "lr": "0.001",
    "weight_decay": "0.05",
    "init": "trunc_normal",
    "position_std": "0.02",
    "cutmix": "p=1",
}
"""What `report.study.best_fitting_levels` says of the results of `unreported-cifar100`; a test holds it so."""


def ablation_under(levels: Mapping[str, str], *, seeds: int = 3) -> Study:
    """Table 2 under one of those settings: `levels` are its labels, by the names of the factors."""
    study = unreported_cifar100()
    # With the paper's early stopping, not the number of epochs of the search.
    base = ablation_cifar100().base
    for factor in study.parsed:
        if factor.name not in levels:
            raise InputError(f"no level of {factor.name} is given; it needs one of {', '.join(factor.labels)}")
        if factor.name != "cutmix":
            base = factor.apply(base, levels[factor.name])
    cutmix = _CUTMIX.get(levels["cutmix"])
    if not isinstance(cutmix, CutMix):
        raise unknown_name("probability of CutMix", levels["cutmix"], [name for name in _CUTMIX if name != "off"])
    fitted = ablation(base, colour=AutoAugment(), cutmix=cutmix, seeds=seeds)
    return dataclasses.replace(fitted, name="ablation-fitted-cifar100")


# Which settings of `unreported-cifar100` give the paper's numbers, and how far the others are from them.


CUTMIX = "cutmix"
COMPARED = ("test_acc", "min_mad", "max_mad")
FITTED = (BASELINE, ONLY_CUTMIX)
_PAPER = PUBLISHED["ablation-cifar100"]


def paper_value(condition: str, response: str) -> float:
    return float(getattr(_PAPER.conditions[condition], response))


def scale_of(response: str) -> float:
    """As far as CutMix moved the paper's own number: what counts as one unit of distance."""
    return abs(paper_value(ONLY_CUTMIX, response) - paper_value(BASELINE, response))


def settings_of(results: StudyResults) -> list[str]:
    """The factors but CutMix."""
    return [name for name in results.factors if name != CUTMIX]


def fits(results: StudyResults) -> pd.DataFrame:
    """A row per setting and probability of CutMix, the nearest to the paper first: its runs' means without and with
    CutMix, and the distance of both from the paper's Baseline and +CutMix."""
    if CUTMIX not in results.factors:
        raise InputError("the study does not vary CutMix")
    settings = settings_of(results)
    off = results.factors[CUTMIX][0]
    means = results.runs.groupby([*settings, CUTMIX], sort=False)[list(COMPARED)].mean().reset_index()
    without = means[means[CUTMIX] == off].drop(columns=CUTMIX)
    both = means[means[CUTMIX] != off].merge(without, on=settings, suffixes=(f"_{ONLY_CUTMIX}", f"_{BASELINE}"))
    if both.empty:
        raise InputError("no setting has a run both with and without CutMix yet")
    apart = [
        (both[f"{response}_{condition}"] - paper_value(condition, response)) / scale_of(response)
        for condition in FITTED
        for response in COMPARED
    ]
    both["distance"] = np.sqrt(np.mean(np.square(apart), axis=0))
    return both.sort_values("distance", kind="stable", ignore_index=True)


def best_fitting_levels(results: StudyResults) -> dict[str, str]:
    """The levels of the setting that is nearest to the paper, by factor: what `ablation_under` of the recipes takes."""
    (best,) = records(fits(results).iloc[:1])
    return {name: str(best[name]) for name in results.factors}


def levels_in_words(levels: Mapping[str, str]) -> str:
    return ", ".join(f"{FACTOR_NAMES.get(name, name)} {level}" for name, level in levels.items())


def fit_table(results: StudyResults) -> Table:
    """The settings, sorted by their distance to the paper's numbers, which are the first row."""
    table = fits(results)
    names = {name: FACTOR_NAMES.get(name, name) for name in results.factors}
    paper = dict.fromkeys(names.values(), "paper")
    paper |= {title: _both(*values) for title, values in _cells(None).items()} | {"distance": rounded(0.0, 2)}
    shown = [paper]
    for row in records(table):
        levels = {title: str(row[name]) for name, title in names.items()}
        numbers = {title: _both(*values) for title, values in _cells(row).items()}
        shown.append({**levels, **numbers, "distance": rounded(row["distance"], 2)})
    scales = ", ".join(
        f"{scale_of(response):.4g} in {name}"
        for response, name in zip(COMPARED, ("accuracy", "min MAD", "max MAD"), strict=True)
    )
    return Table(
        name="fit-to-paper",
        title=f"{results.name}: which settings give the paper's numbers",
        numbers=table.assign(scale=results.scale),
        shown=pd.DataFrame(shown),
        notes=(
            f"Numbers are those without CutMix, then with it; the paper's are its {BASELINE} and {ONLY_CUTMIX} "
            f"({_PAPER.source}, one seed).",
            "Distance: the root of the mean square, over these six numbers, of ours minus the paper's, each in units "
            f"of what CutMix changes in the paper ({scales}). 1 is as far off as the paper's two conditions are apart.",
            "All runs here have the same number of epochs; the paper stopped early.",
        ),
    )


def _cells(row: Mapping[str, float] | None) -> dict[str, tuple[str, str]]:
    """Title → the numbers without and with CutMix; the paper's where there is no row."""

    def value(condition: str, response: str) -> float:
        return paper_value(condition, response) if row is None else row[f"{response}_{condition}"]

    def both(response: str) -> list[float]:
        return [value(condition, response) for condition in FITTED]

    first, second = (percent(accuracy) for accuracy in both("test_acc"))
    cells = {"accuracy, %": (first, second)}
    for response, title in (("min_mad", "min MAD"), ("max_mad", "max MAD")):
        low, high = (rounded(distance) for distance in both(response))
        cells[title] = (low, high)
    return cells


def _both(without: str, with_it: str) -> str:
    return f"{without}, {with_it}"


# What moves the most local head of `unreported-cifar100`: main effects of the settings, with and without CutMix.


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
NEAREST_RULE = (
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
        rule=NEAREST_RULE,
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


# The settings of `unreported-cifar100` beside the paper, and what each of them moves.


def settings_beside_the_paper(results: StudyResults) -> Drawing:
    """Accuracy and smallest distance of every setting, without and with CutMix, joined by a line; the paper's too."""
    table = fits(results)
    levels = results.factors[CUTMIX]
    with house_style():
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.subplots()
        light_grid(axes)
        for place, row in enumerate(records(table)):
            _draw_pair(axes, row, level=levels.index(row[CUTMIX]), is_best=place == 0)
        axes.plot(
            [100 * paper_value(label, "test_acc") for label in FITTED],
            [paper_value(label, "min_mad") for label in FITTED],
            color=INK,
            linewidth=1.4,
            marker="*",
            markersize=13,
            markerfacecolor="white",
            zorder=5,
            gid="paper",
        )
        axes.set_xlabel("test accuracy, %")
        axes.set_ylabel(f"smallest {DISTANCE_LABEL_ONE_LINE.split(' (')[0]}\n(fraction of the grid's diagonal)")
        axes.set_ylim(bottom=0.0)
        _add_legend(figure, levels)
    best = levels_in_words(best_fitting_levels(results))
    told = (
        f"A line joins a setting without CutMix and with it. Thick: nearest to the paper ({best}; "
        f"distance {rounded(table['distance'].iloc[0], 2)})."
    )
    add_footnote(figure, [told, *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Test accuracy and the distance of the most local head of every setting, without CutMix and with it, "
        f"beside the paper's {BASELINE} and {ONLY_CUTMIX} (stars, one seed). {told}",
    )


def _draw_pair(axes: Axes, row: dict[str, float], *, level: int, is_best: bool) -> None:
    accuracy = [100 * row[f"test_acc_{label}"] for label in FITTED]
    distance = [row[f"min_mad_{label}"] for label in FITTED]
    off, style = model_style(1), model_style(_place(level))
    axes.plot(accuracy, distance, color=INK if is_best else MUTED, linewidth=2.2 if is_best else 0.6, zorder=2)
    for index, look in enumerate((off, style)):
        axes.plot(accuracy[index], distance[index], marker=look.marker, color=look.colour, markersize=6.5, zorder=3)


def _place(level: int) -> int:
    """Of a level's look in the palette: without CutMix it is the second everywhere."""
    return {0: 1, 1: 0}.get(level, level)


def _add_legend(figure: Figure, levels: tuple[str, ...]) -> None:
    handles = []
    for level in range(len(levels)):
        style = model_style(_place(level))
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, linestyle="none"))
    handles.append(Line2D([], [], color=INK, marker="*", markerfacecolor="white", markersize=11))
    names = ["without CutMix", *(f"CutMix {level}" for level in levels[1:]), "the paper"]
    add_legend(figure, handles, names, loc="outside upper left", ncols=len(names), handlelength=1.6)


def settings_effects(results: StudyResults) -> Drawing:
    """Main effects on the smallest distance, among the runs with CutMix."""
    rows = [ForestRow(label=change.in_words, estimate=change.estimate) for change in changes(results)]
    figure = forest(rows, "change of the smallest mean attention distance (left: more local)")
    add_footnote(figure, ["Main effects among the runs with CutMix; bars: 95 % intervals.", *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="What each unreported setting changes in the distance of the most local head, over all other settings: "
        "main effects among the runs with CutMix, with their 95 % intervals.",
    )


report_on(
    "unreported-cifar100",
    claims=UNREPORTED_QUESTIONS,
    tables=(fit_table, settings_table),
    figures={"settings-beside-the-paper": settings_beside_the_paper, "settings-effects": settings_effects},
)
