"""What S1 does not report: which settings give its numbers, and what moves the smallest distance from 0.2 to 0.02."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from nearsight.report.claims import Claim, asked, judge_all
from nearsight.report.conditions import FACTOR_NAMES, level_looks, noted, scale_notes
from nearsight.report.figures.looks import ModelStyle
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    INK,
    MUTED,
    add_legend,
    house_style,
    light_grid,
)
from nearsight.report.marks import Drawing, ForestRow, add_footnote, draw_dots, forest
from nearsight.report.responses import responses_of, share_notes, with_early_layers
from nearsight.report.rules import NO, SIGN_OF_FIT, YES, Finding, Verdict, described, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import Row, Table, difference_in_words, percent, probability, records, rounded, share
from nearsight.study import OFF, Study
from nearsight.study.factors import Levels
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Effects, Estimate, factorial_effects
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
    """Table 2 again, under the settings that come closest to its numbers: CutMix in every batch (S1, Table 2)

    Without CutMix these are the runs of ablation-cifar100, which need not be run again.

    Run     nearsight study run ablation-fitted-cifar100 --reuse results/ablation-cifar100
    Cost    24 cells of at most 600 epochs of 40,000 images (576 M; half of them are reused); needs a GPU
    Result  a gap in each of three seeds, the paper's size in 4 of 12 runs: see results/ablation-fitted-cifar100
    """
    return ablation_under(NEAREST, seeds=seeds)


NEAREST: Mapping[str, str] = {
    "lr": "0.001",
    "weight_decay": "0.05",
    "init": "trunc_normal",
    "position_std": "0.02",
    "cutmix": "p=1",
}
"""What `best_fitting_levels` says of the results of `unreported-cifar100`; a test holds it so."""


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


CUTMIX = "cutmix"
# What is compared, and how it is shown.
_COMPARED: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "test_acc": ("accuracy, %", percent),
    "min_mad": ("min MAD", rounded),
    "max_mad": ("max MAD", rounded),
}
_FITTED = (BASELINE, ONLY_CUTMIX)
_PAPER = PUBLISHED["ablation-cifar100"]
# The largest of the paper's smallest distances with CutMix.
_PAPERS_BOUND = max(float(_PAPER.conditions[label].min_mad or 0.0) for label in with_cutmix())


def _papers(condition: str, response: str) -> float:
    return float(getattr(_PAPER.conditions[condition], response))


def _ours(row: Mapping[str, float], condition: str, response: str) -> float:
    """From a row of `fits`."""
    return row[f"{response}_{condition}"]


def _unit(response: str) -> float:
    """As far as CutMix moved the paper's own number: what counts as one unit of distance."""
    return abs(_papers(ONLY_CUTMIX, response) - _papers(BASELINE, response))


def fits(results: StudyResults) -> pd.DataFrame:
    """A row per setting and probability of CutMix, the closest to the paper first: its runs' means without and with
    CutMix, and the distance of both from the paper's Baseline and +CutMix."""
    if CUTMIX not in results.factors:
        raise InputError("the study does not vary CutMix")
    settings = _settings_of(results)
    off = results.factors[CUTMIX][0]
    means = results.runs.groupby([*settings, CUTMIX], sort=False)[list(_COMPARED)].mean().reset_index()
    without = means[means[CUTMIX] == off].drop(columns=CUTMIX)
    both = means[means[CUTMIX] != off].merge(without, on=settings, suffixes=(f"_{ONLY_CUTMIX}", f"_{BASELINE}"))
    if both.empty:
        raise InputError("no setting has a run both with and without CutMix yet")
    apart = [
        (both[f"{response}_{condition}"] - _papers(condition, response)) / _unit(response)
        for condition in _FITTED
        for response in _COMPARED
    ]
    both["distance"] = np.sqrt(np.mean(np.square(apart), axis=0))
    return both.sort_values("distance", kind="stable", ignore_index=True)


_DRAWS = 10_000


def firmness(results: StudyResults) -> float:
    """How firm the choice of the closest setting is: the share of draws of the runs' noise, on top of their numbers, in
    which it stays the closest. NaN of a single setting, or where no run is left over to estimate the noise.

    The noise has the covariance of the residuals of the main effects' fits: more than seeds alone would give, since
    interactions count as noise. A setting's run without CutMix is the same at both probabilities.
    """
    table = fits(results)
    fitted = [[_fitted(results, response, has_cutmix=has) for response in _COMPARED] for has in (True, False)]
    df = sum(effects[0].residual_df for effects in fitted)
    if len(table) < 2 or not df:
        return float("nan")
    residuals_R3 = np.concatenate([np.column_stack([each.residuals for each in effects]) for effects in fitted])
    covariance_33 = residuals_R3.T @ residuals_R3 / df / _num_seeds(results)
    setting_S = table.groupby(_settings_of(results), sort=False).ngroup().to_numpy()
    random, squares_DS = np.random.default_rng(0), np.zeros((_DRAWS, len(table)))
    for condition, run_S in ((BASELINE, setting_S), (ONLY_CUTMIX, np.arange(len(table)))):
        noise_DR3 = random.multivariate_normal(np.zeros(len(_COMPARED)), covariance_33, (_DRAWS, run_S.max() + 1))
        for place, response in enumerate(_COMPARED):
            apart_S = table[f"{response}_{condition}"].to_numpy() - _papers(condition, response)
            squares_DS += ((apart_S + noise_DR3[:, run_S, place]) / _unit(response)) ** 2
    return float((squares_DS.argmin(axis=1) == 0).mean())


def _settings_of(results: StudyResults) -> list[str]:
    """The factors but CutMix."""
    return [name for name in results.factors if name != CUTMIX]


def best_fitting_levels(results: StudyResults) -> dict[str, str]:
    """The levels of the setting that is closest to the paper, by factor: what `ablation_under` takes."""
    (best,) = records(fits(results).iloc[:1])
    return {name: str(best[name]) for name in results.factors}


def levels_in_words(levels: Mapping[str, str]) -> str:
    return ", ".join(f"{FACTOR_NAMES.get(name, name)} {level}" for name, level in levels.items())


def main_effects(results: StudyResults, response: str = "min_mad", *, has_cutmix: bool = True) -> dict[str, Estimate]:
    """What going from the first level of a factor to the second changes, those that make heads most local first.

    Among the runs with CutMix, where its probability is a factor too, or among those without.
    """
    effects = _fitted(results, response, has_cutmix=has_cutmix)
    rows = sorted(records(effects.table), key=lambda row: float(row["effect"]))
    return {
        row["term"]: Estimate(
            **{"value": row["effect"], "low": row["low"], "high": row["high"], "p": row["p"]},
            **{"error": row["standard_error"], "df": effects.residual_df, "n": _num_seeds(results)},
        )
        for row in rows
        if row["order"] == 1
    }


def _fitted(results: StudyResults, response: str, *, has_cutmix: bool) -> Effects:
    runs, levels = with_early_layers(results), results.factors.get(CUTMIX, ())
    chosen = runs[(runs[CUTMIX] != levels[0]) == has_cutmix] if levels else runs
    if chosen.empty:
        raise InputError(f"no run {'with' if has_cutmix else 'without'} CutMix yet")
    factors: dict[str, Sequence[str]] = {name: results.factors[name] for name in _settings_of(results)}
    if has_cutmix:
        factors[CUTMIX] = levels[1:]
    return factorial_effects(chosen, factors, response)


def _step(results: StudyResults, factor: str) -> tuple[str, str]:
    """The two levels that an effect compares."""
    first, second = results.factors[factor][1 if factor == CUTMIX else 0 :][:2]
    return first, second


def step_in_words(results: StudyResults, factor: str) -> str:
    """ "weight decay 0.05 → 0"."""
    return f"{FACTOR_NAMES.get(factor, factor)} {' → '.join(_step(results, factor))}"


def what_moves_it(results: StudyResults) -> str:
    """In a sentence: what makes the most local head of runs with CutMix more local, and what does not."""
    found = main_effects(results)
    judged = judge_all((question for question in _QUESTIONS if question.id in found), results)
    verdicts = {each.claim.id: each.verdict for each in judged}
    nearer, farther = (
        [factor for factor in found if verdicts[factor] is verdict]
        for verdict in (Verdict.REPRODUCED, Verdict.CONTRADICTED)
    )
    parts = [
        f"{words}: {'; '.join(f'{step_in_words(results, each)} ({difference_in_words(found[each])})' for each in some)}"
        for words, some in (("More local", nearer), ("less local", farther[::-1]))
        if some
    ]
    rest = [step_in_words(results, factor) for factor in found if factor not in (*nearer, *farther)]
    parts += [f"not shown to change it: {', '.join(rest)}"] if rest else []
    sentence = ". ".join(part[0].upper() + part[1:] for part in parts)
    return f"What changes the smallest distance of runs with CutMix, corrected for the number of settings. {sentence}."


@asked(
    "nearest-setting",
    "Which setting gives the paper's accuracies and distances?",
    source="S1, Table 2",
    rule="*Closest.* The answer is the setting with the smallest distance to the paper's numbers "
    f"(tables/fit-to-paper); nothing is tested. How firm it is: of {_DRAWS:,} draws of the runs' noise, on top of "
    "their numbers, the share in which it stays the closest. The noise is that of the residuals of the fits of main "
    "effects (tables/settings), which count interactions as noise.",
)
def _nearest_setting(results: StudyResults) -> Finding:
    table = fits(results)
    distances = table["distance"]
    others = f"the others {rounded(distances.iloc[1], 2)} and more" if len(table) > 1 else "no other has runs yet"
    words, firm = f"distance {rounded(distances.iloc[0], 2)}; {others}", firmness(results)
    words += "" if np.isnan(firm) else f"; it stays the closest in {share(firm)} of the draws"
    answer = levels_in_words(best_fitting_levels(results))
    return described(answer, words, value=float(distances.iloc[0]), n=_num_seeds(results))


@asked(
    "reached",
    "Does any setting bring the smallest distance down to the paper's?",
    source="S1 abstract",
    rule="*Reached.* Yes: some setting's smallest distance with CutMix is at or below the paper's largest "
    f"({rounded(_PAPERS_BOUND)}). No: none is. Nothing is tested.",
)
def _reached(results: StudyResults) -> Finding:
    column = f"min_mad_{ONLY_CUTMIX}"
    lowest = min(records(fits(results)), key=lambda row: float(row[column]))
    value = float(lowest[column])
    words = f"{rounded(value)} at {levels_in_words({name: str(lowest[name]) for name in results.factors})}"
    return described(YES if value <= _PAPERS_BOUND else NO, words, value=value, n=_num_seeds(results))


def _num_seeds(results: StudyResults) -> int:
    return int(results.runs["seed"].nunique())


def _about_factor(factor: str, text: str) -> Claim:
    @asked(factor, text, source="min MAD, main effect", rule=SIGN_OF_FIT)
    def question(results: StudyResults) -> Finding:
        found = main_effects(results)
        if factor not in found:
            raise InputError(f"{factor} does not vary among the runs with CutMix")
        words = f"{step_in_words(results, factor)}: {difference_in_words(found[factor])}"
        return judge_sign(found[factor], sign=-1, words=words)

    return question


_QUESTIONS = (
    _nearest_setting,
    _reached,
    _about_factor("lr", "With CutMix, does a lower learning rate make the most local head more local?"),
    _about_factor("weight_decay", "With CutMix, is it more local without weight decay?"),
    _about_factor("init", "With CutMix, is it more local from PyTorch's own initialisation?"),
    _about_factor("position_std", "With CutMix, is it more local from positions drawn from N(0, 1)?"),
    _about_factor(CUTMIX, "Is it more local with CutMix in every batch rather than in half of them?"),
)


def fit_table(results: StudyResults) -> Table:
    """The settings, sorted by their distance to the paper's numbers, which are the first row."""

    def shown(levels: Mapping[str, str], value: Callable[[str, str], float], distance: float) -> dict[str, str]:
        numbers = {
            title: ", ".join(describe(value(condition, response)) for condition in _FITTED)
            for response, (title, describe) in _COMPARED.items()
        }
        names = {FACTOR_NAMES.get(name, name): level for name, level in levels.items()}
        return {**names, **numbers, "distance": rounded(distance, 2)}

    table = fits(results)
    rows = [shown(dict.fromkeys(results.factors, "paper"), _papers, 0.0)]
    for row in records(table):
        ours = partial(_ours, row)
        rows.append(shown({name: str(row[name]) for name in results.factors}, ours, row["distance"]))
    scales = ", ".join(
        f"{_unit(response):.4g} in {title.removesuffix(', %')}" for response, (title, _) in _COMPARED.items()
    )
    return Table(
        name="fit-to-paper",
        title=f"{results.name}: which settings give the paper's numbers",
        numbers=table.assign(scale=results.scale),
        shown=pd.DataFrame(rows),
        notes=(
            f"Numbers are those without CutMix, then with it; the paper's are its {BASELINE} and {ONLY_CUTMIX} "
            f"({_PAPER.source}, one seed).",
            "Distance: the root of the mean square, over these six numbers, of ours minus the paper's, each in units "
            f"of what CutMix changes in the paper ({scales}). 1 is as far off as the paper's two conditions are apart.",
            "All runs here have the same number of epochs; the paper stopped early.",
        ),
    )


def settings_table(results: StudyResults) -> Table:
    """Main effects on locality, focus and accuracy, among the runs with CutMix and among those without."""
    rows, shown, notes = [], [], []
    responses = responses_of(results)
    for group, has_cutmix in (("with CutMix", True), ("without CutMix", False)):
        try:
            found = {response: main_effects(results, response, has_cutmix=has_cutmix) for response in responses}
            effects = _fitted(results, "min_mad", has_cutmix=has_cutmix)
        except InputError:
            continue
        notes.append(
            f"Runs {group}: {effects.num_runs}, {effects.residual_df} of them left over to estimate the noise."
        )
        for factor, of_distance in found["min_mad"].items():
            words = Row(runs=group, change=step_in_words(results, factor))
            first, second = _step(results, factor)
            for response, (title, scale, digits) in responses.items():
                effect = found[response][factor]
                words.show(title, difference_in_words(effect, scale=scale, digits=digits))
                row = Row(**{"runs": group, "factor": factor, "from": first, "to": second, "response": response})
                row.keep(effect=effect.value, low=effect.low, high=effect.high, p=effect.p, scale=results.scale)
                rows.append(row)
            shown.append(words.show("p, min MAD", probability(of_distance.p)))
    if not rows:
        raise InputError("no effect can be estimated yet")
    notes = [
        "Main effects by ordinary least squares: the mean at the second level minus that at the first, over all other "
        "settings; ± is half the 95 % interval. p-values are not corrected for their number.",
        what_moves_it(results),
        *share_notes(results),
        *notes,
    ]
    return Table.of("settings", f"{results.name}: what each setting changes", rows, shown=shown, notes=notes)


def settings_beside_the_paper(results: StudyResults) -> Drawing:
    """Accuracy and smallest distance of every setting, without and with CutMix, joined by a line; the paper's too."""
    table = fits(results)
    levels = results.factors[CUTMIX]
    styles = level_looks(CUTMIX, levels)
    with house_style():
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.subplots()
        light_grid(axes)
        for place, row in enumerate(records(table)):
            _draw_pair(axes, row, [styles[levels[0]], styles[str(row[CUTMIX])]], is_best=place == 0)
        if _num_seeds(results) > 1:
            for level, runs in results.runs.groupby(CUTMIX):
                draw_dots(axes, 100 * runs["test_acc"], runs["min_mad"], styles[str(level)].colour, f"seeds-{level}")
        axes.plot(
            [100 * _papers(label, "test_acc") for label in _FITTED],
            [_papers(label, "min_mad") for label in _FITTED],
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
        handles = [style.handle(linestyle="none") for style in styles.values()]
        handles.append(Line2D([], [], color=INK, marker="*", markerfacecolor="white", markersize=11))
        names = ["without CutMix", *(f"CutMix {level}" for level in levels[1:]), "the paper"]
        add_legend(figure, handles, names, loc="outside upper left", ncols=len(names), handlelength=1.6)
    best = levels_in_words(best_fitting_levels(results))
    parts = (
        f"A line joins a setting without CutMix and with it. Thick: closest to the paper ({best}; "
        f"distance {rounded(table['distance'].iloc[0], 2)})."
    )
    if _num_seeds(results) > 1:
        parts += " Marks: means over seeds; dots: seeds."
    caption = (
        "Test accuracy and the distance of the most local head of every setting, without CutMix and with it, next to "
        f"the paper's {BASELINE} and {ONLY_CUTMIX} (stars, one seed)."
    )
    return noted(figure, results, caption, parts)


def _draw_pair(axes: Axes, row: dict[str, float], styles: Sequence[ModelStyle], *, is_best: bool) -> None:
    accuracy = [100 * _ours(row, label, "test_acc") for label in _FITTED]
    distance = [_ours(row, label, "min_mad") for label in _FITTED]
    axes.plot(accuracy, distance, color=INK if is_best else MUTED, linewidth=2.2 if is_best else 0.6, zorder=2)
    for x, y, style in zip(accuracy, distance, styles, strict=True):
        axes.plot(x, y, marker=style.marker, color=style.colour, markersize=6.5, zorder=3)


def settings_effects(results: StudyResults) -> Drawing:
    """Main effects on the smallest distance, among the runs with CutMix."""
    effects = main_effects(results).items()
    rows = [ForestRow(label=step_in_words(results, factor), estimate=estimate) for factor, estimate in effects]
    figure = forest(rows, "change of the smallest mean attention distance (left: more local)")
    add_footnote(figure, ["Main effects among the runs with CutMix; bars: 95 % intervals.", *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="What each unreported setting changes in the distance of the most local head, over all other settings: "
        "main effects among the runs with CutMix, with their 95 % intervals.",
    )


report_on(
    "unreported-cifar100",
    claims=_QUESTIONS,
    tables=(fit_table, settings_table),
    figures={"settings-beside-the-paper": settings_beside_the_paper, "settings-effects": settings_effects},
)
