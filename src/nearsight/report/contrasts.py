"""Contrasts of a study as a table, as a figure and as questions: declared once, estimated by one fit to all runs, in
which the noise of one condition is learned from the seeds of every other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import noted
from nearsight.report.marks import Drawing, ForestRow, dots_and_bars, forest
from nearsight.report.responses import responses_of, with_early_layers
from nearsight.report.rules import SIGN_OF_FIT, Finding, judge_sign
from nearsight.report.tables import Row, Table, difference_in_words, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, LeastSquares, least_squares, mean_interval
from nearsight.study.statistics.intervals import LEVEL, by_seed

POOLED = (
    "Intervals (95 %) come from one fit to all runs, which takes the spread over seeds to be the same everywhere; runs "
    "of one seed share what the seed does."
)


def condition_means(runs: pd.DataFrame, response: str) -> LeastSquares:
    """A mean per condition, with the seeds' own effects (which sum to 0) taken out: the model of paired differences,
    with one noise for all pairs."""
    conditions = pd.get_dummies(runs["condition"], dtype=float)
    seeds = pd.get_dummies(runs["seed"].astype(str), prefix="seed", dtype=float)
    centred = seeds.iloc[:, 1:].sub(seeds.iloc[:, 0], axis=0)
    return least_squares(pd.concat([conditions, centred], axis=1), runs[response])


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A weighted sum of what a fit gives, and what is asked of it."""

    name: str
    text: str = ""
    """The question."""
    weights: Mapping[str, float]
    """By the names of the fit's columns."""
    words: str = ""
    """What is compared with what."""
    sign: int = -1
    """Of a yes."""


def between(
    name: str, text: str, with_it: Sequence[str], without_it: Sequence[str], *, sign: int = -1, of_sums: bool = False
) -> Contrast:
    """The mean of some conditions minus the mean of others, which lack one thing.

    `of_sums`: sums instead of means, which is the difference of two differences.
    """

    def weight(labels: Sequence[str], whole: float) -> dict[str, float]:
        return dict.fromkeys(labels, whole if of_sums else whole / len(labels))

    def joined(labels: Sequence[str]) -> str:
        return labels[0] if len(labels) == 1 else f"{'sum' if of_sums else 'mean'} of {' and '.join(labels)}"

    weights = weight(with_it, 1) | weight(without_it, -1)
    return Contrast(name=name, text=text, weights=weights, words=f"{joined(with_it)} − {joined(without_it)}", sign=sign)


def pooled_interval(values: "pd.Series[float]", fit: LeastSquares, *, num_runs: int) -> Estimate:
    """Of the mean of values, one per seed, that are each a sum or difference of so many runs.

    The noise of a run is the fit's, estimated from all conditions: two seeds of one condition are too few.
    """
    from scipy import stats  # here, because it takes most of a second

    plain = mean_interval(values)
    found = Estimate(value=plain.value, n=plain.n, std=plain.std)
    if not (fit.residual_df and plain.n):
        return found
    error, df = float(np.sqrt(num_runs * fit.noise / plain.n)), fit.residual_df
    half = float(stats.t.ppf((1 + LEVEL) / 2, df)) * error
    return replace(found, low=found.value - half, high=found.value + half, error=error, df=df)


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
    fit, values, rows = of_conditions(results, "min_mad"), by_seed(results.runs, "min_mad"), []
    for contrast in contrasts:
        try:
            estimate = fit.estimate(contrast.weights)
        except InputError:
            continue
        shared = values[list(contrast.weights)].dropna()
        differences = (shared @ pd.Series(contrast.weights)).tolist()
        is_reference = contrast.name == reference
        rows.append(ForestRow(label=contrast.name, estimate=estimate, seeds=differences, is_reference=is_reference))
    if not rows:
        raise InputError(NO_RUNS)
    figure = forest(rows, "change of the smallest mean attention distance (left: more local)")
    seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
    marks = dots_and_bars([len(row.seeds) for row in rows])
    half = " ± is half a 95 % interval, with one noise for all conditions." if rows[0].estimate.has_interval else ""
    return noted(figure, results, caption, f"{seeds[0].upper()}{seeds[1:]} per condition{marks}.{half}")


def sign_questions(
    contrasts: Iterable[Contrast], response: str, *, source: str = OURS, fit: Fit = of_conditions
) -> tuple[Claim, ...]:
    """Whether each contrast has the sign that its question asks for, in one response."""

    def judge(contrast: Contrast, results: StudyResults) -> Finding:
        estimate = fit(results, response).estimate(contrast.weights)
        n = int(results.runs["seed"].nunique())
        words = f"{contrast.name}: {difference_in_words(estimate)}"
        return judge_sign(replace(estimate, n=n), sign=contrast.sign, words=words)

    return tuple(
        Claim(id=contrast.name, text=contrast.text, source=source, rule=SIGN_OF_FIT, judge=partial(judge, contrast))
        for contrast in contrasts
    )
