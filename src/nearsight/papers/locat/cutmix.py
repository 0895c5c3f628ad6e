"""Does CutMix still make attention local where LocAt already does? And LocAt, where CutMix already does?

The question that no paper asked: S1 meets S2, in a factorial of CutMix and the two parts of LocAt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.augment import CutMix
from nearsight.errors import InputError
from nearsight.papers.locat.measured import differences_to, layer_profiles, layers_table, locality_table
from nearsight.report.claims import Claim
from nearsight.report.conditions import FACTOR_NAMES, missing_notes, scale_notes
from nearsight.report.figures.style import house_style, light_grid, model_style
from nearsight.report.marks import FEWEST, Drawing, add_footnote, dots_and_bars, draw_seeds, legend_above
from nearsight.report.responses import known_shares, run_measures, share_notes
from nearsight.report.rules import CLEARLY_LESS, Finding
from nearsight.report.studies import report_on
from nearsight.report.tables import (
    MISSING,
    Row,
    Table,
    difference_in_words,
    probability,
    rounded,
    seeds_in_words,
    share,
)
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, LeastSquares, least_squares, mean_interval
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 50
_CUTMIX, _GAUG, _PRR = "cutmix", "GAug", "PRR"
_LOCAT = (_GAUG, _PRR)


@recipe("locat-cutmix-cifar100")
def locat_cutmix_cifar100(*, seeds: int = 3) -> Study:
    """Does CutMix still make attention local where LocAt already does? CutMix × GAug × PRR (S1 meets S2)

    Run     nearsight study run locat-cutmix-cifar100
    Cost    24 cells of at most 50 epochs of 40,000 images (48 M); needs a GPU
    Result  see results/locat-cutmix-cifar100
    """
    factors: dict[str, Any] = {
        _CUTMIX: (OFF, CutMix(p=0.5)),
        _GAUG: {"off": OFF, "on": {"gaug": True}},
        _PRR: {"off": OFF, "on": {"prr": True}},
    }
    base = trained_for(compact_cifar100("baseline"), _EPOCHS)
    return Study(base, factors=factors, seeds=seeds, ends=("Baseline", "CutMix + LocAt"))


class Answer(StrEnum):
    """Does the factor still do it where the other already does?"""

    STILL = "yes, still"
    LESS = "yes, but less"
    NOT = "not any more"
    REVERSED = "reversed"
    UNDECIDED = "undecided"
    NOT_EVEN_ALONE = "not even alone"


_ANSWERS = (
    "*With the other.* The factor's effect without the other, its effect with it, and their difference (the "
    "interaction), each with its 95 % interval: ordinary least squares over all runs of the factorial, seeds as "
    "replicates. Where the question is about two of the three factors, effects are means over the third; LocAt is GAug "
    "and PRR, switched together. The noise is that of all runs, so the interval of an effect that all seeds agree on "
    "can contain 0 here; its differences within seeds are in the table. An effect is shown where its interval excludes "
    "0; it shrinks where the interval of the difference excludes 0 and its sign is opposite to the effect without. "
    f"*{Answer.NOT_EVEN_ALONE}*: the effect without the other is not shown, or has the opposite sign, so that there is "
    f"nothing to keep. *{Answer.REVERSED}*: with the other it is shown with the opposite sign. *{Answer.NOT}*: it "
    "shrinks, and with the other its interval contains 0 and is within "
    f"{share(CLEARLY_LESS)} of the effect without. *{Answer.LESS}*: it shrinks, but is not shown to vanish. "
    f"*{Answer.STILL}*: with the other it is shown, and it is not shown to shrink. *{Answer.UNDECIDED}*: neither that "
    "it remains nor that it shrinks is shown."
)


class Beside(NamedTuple):
    """What a factor does to a response without another factor and with it."""

    without: Estimate
    with_other: Estimate
    change: Estimate
    """The second minus the first: the interaction."""

    def answer(self, sign: int) -> Answer:
        """`sign`: which way the factor is expected to move the response."""
        if not _is_shown(self.without, sign):
            return Answer.NOT_EVEN_ALONE
        if _is_shown(self.with_other, -sign):
            return Answer.REVERSED
        if _is_shown(self.change, -sign):
            is_small = max(abs(self.with_other.low), abs(self.with_other.high)) <= CLEARLY_LESS * abs(
                self.without.value
            )
            return Answer.NOT if is_small and not _is_shown(self.with_other, sign) else Answer.LESS
        return Answer.STILL if _is_shown(self.with_other, sign) else Answer.UNDECIDED


def _is_shown(effect: Estimate, sign: int) -> bool:
    """By its interval; nothing is shown without one."""
    return effect.has_interval and effect.has_sign(sign)


_Factors = Mapping[str, tuple[str, ...]]
"""Name → levels."""


def beside(
    runs: pd.DataFrame, factors: _Factors, response: str, *, factor: tuple[str, ...], other: tuple[str, ...]
) -> Beside:
    """Differences of means of the factorial's cells, with the noise within all of them.

    Several factors are switched together; over those that are in neither, means are taken. An `InputError` says what
    these runs cannot show.
    """
    if not np.isfinite(runs[response]).all():
        raise InputError(f"{response} is not known of every run")
    fitted = _cell_means(runs, factors, response)

    def mean(*on: str) -> dict[str, float]:
        """The weights of cells in the mean with these factors on, and the others of the question off."""
        ends = {name: (levels[-1] if name in on else levels[0],) for name, levels in factors.items()}
        rest = {name: levels for name, levels in factors.items() if name not in (*factor, *other)}
        cells = [_cell_name(levels) for levels in product(*(ends | rest).values())]
        return dict.fromkeys(cells, 1 / len(cells))

    without = _minus(mean(*factor), mean())
    with_other = _minus(mean(*factor, *other), mean(*other))
    return Beside(*map(fitted.estimate, (without, with_other, _minus(with_other, without))))


def _minus(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {cell: one.get(cell, 0.0) - other.get(cell, 0.0) for cell in {**one, **other}}


def _cell_name(levels: Iterable[str]) -> str:
    return ", ".join(levels)


def _cell_means(runs: pd.DataFrame, factors: _Factors, response: str) -> LeastSquares:
    """A mean per cell of the factorial, by `_cell_name`, with one noise for all cells and seeds as replicates."""
    names = [_cell_name(levels) for levels in runs[list(factors)].itertuples(index=False)]
    return least_squares(pd.get_dummies(pd.Series(names, index=runs.index), dtype=float), runs[response])


class _Response(NamedTuple):
    column: str
    title: str
    sign: int
    """Which way CutMix and LocAt are expected to move it."""
    describe: Callable[[Estimate], str]


def _in_per_cent(effect: Estimate) -> str:
    """A difference of logarithms as a change in per cent, with the ends of its interval."""
    ends = [100 * float(np.expm1(end)) for end in (effect.value, effect.low, effect.high)]
    value, low, high = (rounded(end, 0, signed=True) for end in ends)
    return f"{value} % ({low} to {high})" if effect.has_interval else f"{value} %"


def _in_points(effect: Estimate) -> str:
    return difference_in_words(effect, scale=100, digits=2)


_RESPONSES = (
    _Response("min_mad", "min MAD", -1, difference_in_words),
    _Response("mean_mad", "mean MAD", -1, difference_in_words),
    _Response("log_min_mad", "min MAD, relative", -1, _in_per_cent),
    _Response("test_acc", "test accuracy, points", 1, _in_points),
)


def _measured_runs(results: StudyResults) -> pd.DataFrame:
    """The runs with every response; the logarithm is NaN of a distance of 0."""
    runs = run_measures(results)
    return runs.assign(log_min_mad=np.log(runs["min_mad"].where(runs["min_mad"] > 0)))


class _Way(NamedTuple):
    """Whose effect is asked for, and with which other factor. Several factors are switched together."""

    factor: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def is_over_models(self) -> bool:
        """Whether a third factor is left, over which means are taken."""
        return len(self.factor) == len(self.other) == 1


_WAYS = (
    _Way((_CUTMIX,), _LOCAT),
    _Way(_LOCAT, (_CUTMIX,)),
    _Way((_CUTMIX,), (_GAUG,)),
    _Way((_GAUG,), (_CUTMIX,)),
)
_QUESTIONS = {
    "min_mad": "Does {} still make the most local head more local where {} already does?",
    "mean_mad": "Does {} still make heads more local on average where {} already does?",
    "log_min_mad": "Does {} still make the most local head more local, relative to what {} leaves of its distance?",
    "test_acc": "Does {} still raise accuracy where {} already does?",
}


def _spelt(factors: tuple[str, ...]) -> str:
    return "LocAt" if factors == _LOCAT else " and ".join(FACTOR_NAMES.get(factor, factor) for factor in factors)


def _question(way: _Way, response: _Response) -> Claim:
    return Claim(
        id=f"{'+'.join(way.factor)} beside {'+'.join(way.other)}-{response.column}",
        text=_QUESTIONS[response.column].format(_spelt(way.factor), _spelt(way.other)),
        source="no paper asks it",
        rule=_ANSWERS,
        judge=partial(_judge, way, response),
    )


def _judge(way: _Way, response: _Response, results: StudyResults) -> Finding:
    found = beside(_measured_runs(results), results.factors, response.column, factor=way.factor, other=way.other)
    without, with_other, change = map(response.describe, found)
    return Finding(
        verdict=found.answer(response.sign),
        ours=f"without {_spelt(way.other)} {without}, with it {with_other}; "
        f"changed by {change} (p = {probability(found.change.p)})",
        value=found.change.value,
        low=found.change.low,
        high=found.change.high,
        n=int(results.runs["seed"].nunique()),
    )


class _Effect(NamedTuple):
    factor: tuple[str, ...]
    where: str
    response: _Response
    effect: Estimate
    n: int
    """The runs, or pairs of runs, that it comes from."""
    p: float = float("nan")


def cutmix_table(results: StudyResults) -> Table:
    """What CutMix and GAug do in each model, alone and together: a row per factor and place, a column per response."""
    # The shares of attention near a patch, where all runs have them, after the smallest distance.
    shares = (_Response(name, f"{title}, points", 1, _in_points) for name, title in known_shares(results).items())
    responses = (_RESPONSES[0], *shares, *_RESPONSES[1:])
    about, pairs = (_measured_runs(results), results.factors), list(product(_WAYS, responses))
    found = [one for way, response in pairs if way.is_over_models for one in _in_each_model(*about, way, response)]
    found += [one for way, response in pairs for one in _beside(*about, way, response)]
    if not found:
        raise InputError("no two runs of one seed differ in CutMix or GAug alone")
    rows, shown = [], {}
    for one in found:
        named = {"factor": "+".join(one.factor), "where": one.where, "response": one.response.column}
        ends = {"value": one.effect.value, "low": one.effect.low, "high": one.effect.high}
        rows.append(Row().keep(**named, scale=results.scale, **ends, n=one.n, p=one.p))
        if (one.factor, one.where) not in shown:
            words = Row().show("effect of", _spelt(one.factor)).show("where", one.where).show("n", str(one.n))
            words.words |= dict.fromkeys((response.title for response in responses), MISSING)
            shown[one.factor, one.where] = words
        shown[one.factor, one.where].show(one.response.title, one.response.describe(one.effect))
    notes = (
        "± is half the 95 % interval. Of one model: differences within seeds, n of them (Student's t; with one "
        "seed there is no interval). Over models, and with or without LocAt (GAug and PRR): ordinary least squares "
        "with seeds as replicates and one noise for all, from n runs. Change: what the other changes in the "
        "effect, the interaction.",
        "Relative: the change of the smallest distance in per cent, with the ends of its interval; in rows of "
        "changes, the ratio of two such changes. No distance is below 0, so where little of it is left less "
        "can be taken off: the relative change allows for that.",
        *share_notes(results),
        *missing_notes(results),
    )
    title = f"{results.name}: CutMix together with LocAt"
    return Table.of("cutmix-beside-locat", title, rows, shown=shown.values(), notes=notes)


def _in_each_model(runs: pd.DataFrame, factors: _Factors, way: _Way, response: _Response) -> Iterator[_Effect]:
    """The factor's effect at every combination of the others, within seeds."""
    (factor,) = way.factor
    others = [name for name in factors if name != factor]
    for combination in product(*(factors[name] for name in others)):
        levels = dict(zip(others, combination, strict=True))
        values = _at(runs, levels).pivot_table(index="seed", columns=factor, values=response.column)
        values = values.reindex(columns=list(factors[factor])).dropna()
        if values.empty:
            continue
        interval = mean_interval(values.iloc[:, -1] - values.iloc[:, 0])
        on = [_spelt((name,)) for name, level in levels.items() if level != factors[name][0]]
        where = f"with {' and '.join(on)}" if on else "alone"
        yield _Effect((factor,), where, response, interval, interval.n)


def _at(runs: pd.DataFrame, levels: Mapping[str, str]) -> pd.DataFrame:
    return runs[(runs[list(levels)] == pd.Series(levels)).all(axis=1)]


def _beside(runs: pd.DataFrame, factors: _Factors, way: _Way, response: _Response) -> Iterator[_Effect]:
    """The effect without the other and with it, and the change; nothing where the runs cannot show it."""
    try:
        found = beside(runs, factors, response.column, factor=way.factor, other=way.other)
    except InputError:
        return
    other, models = _spelt(way.other), "all models " if way.is_over_models else ""
    yield _Effect(way.factor, f"{models}without {other}", response, found.without, len(runs))
    yield _Effect(way.factor, f"{models}with {other}", response, found.with_other, len(runs))
    yield _Effect(way.factor, f"change by {other}", response, found.change, len(runs), found.change.p)


_PANELS = {
    "min_mad": "MAD of the most local head",
    "mean_mad": "mean MAD over all heads",
    "test_acc": "test accuracy, %",
}
_APART = 0.12
"""How far without and with CutMix stand from the middle of their place, in units of the distance between places."""


def interaction(results: StudyResults) -> Drawing:
    """Per response: the four models from ViT to LocAt, a line without CutMix and one with it, which are parallel where
    neither changes the other."""
    runs, factors = _measured_runs(results), results.factors
    if any(runs[factor].nunique() < 2 for factor in (_CUTMIX, _GAUG)):
        raise InputError("it compares runs with and without CutMix, with and without GAug, and some have no run yet")
    with house_style():
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        panels = figure.subplots(1, len(_PANELS))
        models = _models(factors)
        for panel, (column, title) in zip(panels, _PANELS.items(), strict=True):
            known = runs.dropna(subset=[column])
            fitted = _cell_means(known, factors, column)
            for place in range(len(factors[_CUTMIX])):
                _draw_line(panel, known, factors, fitted, column, place)
            panel.set_title(title)
            panel.set_xticks(range(len(models)), list(models))
            panel.set_xlim(-0.4, len(models) - 0.6)
            light_grid(panel, "y")
        names = ("without CutMix", "with CutMix")
        legend_above(figure, {name: model_style(place).look_with(markersize=7) for place, name in enumerate(names)})
    counts = runs.groupby("condition")["seed"].nunique()
    bars = "bars: 95 % intervals, the noise taken from all runs"
    lines = f"Lines: means over {seeds_in_words(counts)}{dots_and_bars(counts, bars)}."
    add_footnote(figure, [lines, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"What CutMix does in each model; parallel lines would mean that neither CutMix nor LocAt's parts "
        f"change what the other does. {lines}",
    )


def _models(factors: _Factors) -> dict[str, dict[str, str]]:
    """Name → its levels of GAug and PRR."""
    gaug, prr = factors[_GAUG], factors[_PRR]
    return {
        "ViT": {_GAUG: gaug[0], _PRR: prr[0]},
        "+PRR": {_GAUG: gaug[0], _PRR: prr[-1]},
        "+GAug": {_GAUG: gaug[-1], _PRR: prr[0]},
        "LocAt": {_GAUG: gaug[-1], _PRR: prr[-1]},
    }


def _draw_line(
    panel: Axes, runs: pd.DataFrame, factors: _Factors, fitted: LeastSquares, column: str, place: int
) -> None:
    style, aside = model_style(place), _APART if place else -_APART
    scale = 100 if column == "test_acc" else 1
    across, means = [], []
    for middle, model in enumerate(_models(factors).values()):
        levels = {**model, _CUTMIX: factors[_CUTMIX][place]}
        here = _at(runs, levels)
        if here.empty:
            continue
        estimate = fitted.estimate({_cell_name(levels[name] for name in factors): 1.0})
        across.append(middle + aside)
        means.append(scale * estimate.value)
        if estimate.has_interval and len(here) >= FEWEST:
            ends = [scale * estimate.low, scale * estimate.high]
            panel.plot([across[-1]] * 2, ends, color=style.colour, linewidth=4, alpha=0.35, gid="interval")
        seeds = (scale * here[column]).tolist()
        draw_seeds(panel, [across[-1] + aside], [seeds], style.colour, f"seeds-{column}-{place}-{middle}")
    panel.plot(across, means, **style.look_with(markersize=7, linewidth=1.6), gid=f"{column}-{place}")


# With CutMix and LocAt as whole, the conditions' names would say of LocAt alone what it lacks.
_CUTMIX_AND_LOCAT = {
    "Baseline": "neither",
    "+CutMix": "CutMix",
    "−CutMix": "LocAt",
    "CutMix + LocAt": "CutMix and LocAt",
}
report_on(
    "locat-cutmix-cifar100",
    claims=[_question(way, response) for way in _WAYS for response in _RESPONSES],
    tables=(locality_table, layers_table, differences_to("Baseline"), cutmix_table),
    figures={"figure-6-interaction": interaction, "figure-7-layers": layer_profiles(_CUTMIX_AND_LOCAT)},
)
