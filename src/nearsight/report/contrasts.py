"""Contrasts of a study as a table, as a figure and as questions: declared once, estimated by one fit."""

from collections.abc import Callable, Iterable
from functools import partial

from nearsight.errors import InputError
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import noted
from nearsight.report.fits import POOLED, Contrast, condition_means
from nearsight.report.marks import Drawing, ForestRow, forest
from nearsight.report.responses import responses_of, with_early_layers
from nearsight.report.rules import SIGN, Finding, judge_sign
from nearsight.report.tables import Row, Table, difference_in_words, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate
from nearsight.study.statistics.fits import LeastSquares

Fit = Callable[[StudyResults, str], LeastSquares]
"""To one response, by its column."""
NO_RUNS = "no two conditions that it compares have a run yet"


def of_conditions(results: StudyResults, response: str) -> LeastSquares:
    """A mean per condition: what contrasts `between` conditions are estimated from."""
    return condition_means(with_early_layers(results), response)


def contrast_table(
    results: StudyResults,
    contrasts: Iterable[Contrast],
    *,
    title: str,
    fit: Fit = of_conditions,
    name: str = "contrasts",
    label: Callable[[Contrast], Row] = lambda contrast: Row(what=contrast.name),
    notes: Iterable[str] = (POOLED,),
) -> Table:
    """Every contrast on locality, focus and accuracy, of those whose conditions have runs; `label` begins its rows."""
    responses = responses_of(results)
    fits = {response: fit(results, response) for response in responses}
    rows, shown = [], []
    for contrast in contrasts:
        try:
            found = {response: fits[response].estimate(contrast.weights) for response in responses}
        except InputError:
            continue
        words = label(contrast)
        for response, estimate in found.items():
            rows.append(label(contrast).keep(response=response, **columns_of_estimate(estimate), scale=results.scale))
            column, scale, digits = responses[response]
            words.show(column, difference_in_words(estimate, scale=scale, digits=digits))
        shown.append(words)
    if not rows:
        raise InputError(NO_RUNS)
    return Table.of(name, f"{results.name}: {title}", rows, shown=shown, notes=notes)


def columns_of_estimate(estimate: Estimate) -> dict[str, float]:
    return {"estimate": estimate.value, "low": estimate.low, "high": estimate.high}


def contrast_figure(
    results: StudyResults, contrasts: Iterable[Contrast], *, caption: str, reference: str | None = None
) -> Drawing:
    """What each contrast between conditions does to the most local head; the reference is drawn apart."""
    fit, rows = of_conditions(results, "min_mad"), []
    for contrast in contrasts:
        try:
            estimate = fit.estimate(contrast.weights)
        except InputError:
            continue
        rows.append(ForestRow(label=contrast.name, estimate=estimate, is_reference=contrast.name == reference))
    if not rows:
        raise InputError(NO_RUNS)
    figure = forest(rows, "change of the smallest mean attention distance (left: more local)")
    seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
    words = f"{seeds[0].upper()}{seeds[1:]} per condition; bars: 95 % intervals, one noise for all conditions."
    return noted(figure, results, caption, words)


def sign_questions(
    contrasts: Iterable[Contrast], response: str, *, source: str = OURS, fit: Fit = of_conditions
) -> tuple[Claim, ...]:
    """Whether each contrast has the sign that its question asks for, in one response."""

    def judge(contrast: Contrast, results: StudyResults) -> Finding:
        estimate = fit(results, response).estimate(contrast.weights)
        n = int(results.runs["seed"].nunique())
        return judge_sign(estimate, sign=contrast.sign, words=f"{contrast.name}: {difference_in_words(estimate)}", n=n)

    return tuple(
        Claim(id=contrast.name, text=contrast.text, source=source, rule=SIGN, judge=partial(judge, contrast))
        for contrast in contrasts
    )
