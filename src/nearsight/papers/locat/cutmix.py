"""Does CutMix still make attention local where LocAt already does? And LocAt, where CutMix already does?

The question that no paper asked: S1 meets S2, in a factorial of CutMix and the two parts of LocAt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import house_style, light_grid
from nearsight.report.marks import FEWEST, Drawing, add_footnote, dots_and_bars, draw_seeds, legend_above
from nearsight.report.responses import known_shares, run_measures, share_notes
from nearsight.report.rules import SIGN, Finding, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.study_tables import INTERVALS
from nearsight.report.tables import MISSING, Row, Table, difference_in_words, rounded, seeds_in_words
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, LeastSquares, least_squares, mean_interval
from nearsight.study.statistics.significance import ALPHA, p_of_sign
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


class Beside(NamedTuple):
    """What a factor does to a response without another factor and with it."""

    without: Estimate
    with_other: Estimate
    change: Estimate
    """The second minus the first: the interaction."""


_Factors = Mapping[str, tuple[str, ...]]
"""Name → levels."""


def beside(
    runs: pd.DataFrame, factors: _Factors, response: str, *, factor: tuple[str, ...], other: tuple[str, ...]
) -> Beside:
    """Differences of means of the factorial's cells, within each seed that has all of them.

    Several factors are switched together; over those that are in neither, means are taken. An `InputError` says what
    these runs cannot show.
    """
    values = runs.assign(cell=_cell_names(runs, factors)).pivot_table(index="seed", columns="cell", values=response)

    def mean(*on: str) -> "pd.Series[float]":
        """Of a seed's cells with these factors on, and the others of the question off."""
        ends = {name: (levels[-1 if name in on else 0],) for name, levels in factors.items()}
        rest = {name: levels for name, levels in factors.items() if name not in (*factor, *other)}
        cells = [_cell_name(levels) for levels in product(*(ends | rest).values())]
        return values.reindex(columns=cells).mean(axis=1, skipna=False)

    effects = {"without": mean(*factor) - mean(), "with_other": mean(*factor, *other) - mean(*other)}
    known = pd.DataFrame(effects).dropna()
    if known.empty:
        raise InputError(f"no seed has a {response} of every run that is compared")
    changes = known["with_other"] - known["without"]
    return Beside(*map(mean_interval, (known["without"], known["with_other"], changes)))


def _cell_name(levels: Iterable[str]) -> str:
    return ", ".join(levels)


def _cell_names(runs: pd.DataFrame, factors: _Factors) -> "pd.Series[str]":
    return pd.Series(map(_cell_name, runs[list(factors)].itertuples(index=False)), index=runs.index)


def _cell_means(runs: pd.DataFrame, factors: _Factors, response: str) -> LeastSquares:
    """A mean per cell of the factorial, by `_cell_name`, with one noise for all cells and seeds as replicates."""
    return least_squares(pd.get_dummies(_cell_names(runs, factors), dtype=float), runs[response])


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
_PAIRS = tuple(way for way in _WAYS if way.factor == (_CUTMIX,))
"""An interaction is the same both ways."""
_QUESTIONS = {
    "min_mad": "Does {} still make the most local head more local where {} already does?",
    "mean_mad": "Does {} still make heads more local on average where {} already does?",
    "log_min_mad": "Does {} still make the most local head more local, relative to what {} leaves of its distance?",
    "test_acc": "Does {} still raise accuracy where {} already does?",
}
_INTERACTIONS = {
    "min_mad": "Do {} and {} take from each other's effect on the most local head?",
    "mean_mad": "Do {} and {} take from each other's effect on heads on average?",
    "log_min_mad": "Do {} and {} take from each other's effect on the most local head, relative to its distance?",
    "test_acc": "Do {} and {} take from each other's effect on accuracy?",
}
_WITHIN = (
    "LocAt is GAug and PRR, switched together; where GAug is asked for alone, effects are means over models with and "
    "without PRR. The four responses of a question are one family."
)
_STILL = (
    f"{SIGN} Here: what the factor changes where the other already is. What it changes without the other is not "
    f"judged; *not shown* behind it: its p-value, not corrected, is above {ALPHA:.2g}. {_WITHIN}"
)
_LESS = (
    f"{SIGN} Here: the interaction, what a factor changes with the other minus what it changes without. Both are "
    "expected to lower MAD and to raise accuracy. Yes: they do so less together than the sum of what each does alone. "
    f"The other way round: more. {_WITHIN}"
)


def _spelt(factors: tuple[str, ...]) -> str:
    return "LocAt" if factors == _LOCAT else " and ".join(FACTOR_NAMES.get(factor, factor) for factor in factors)


def _judge_still(way: _Way, response: _Response, results: StudyResults) -> Finding:
    found = _found(way, response, results)
    without, with_other, _ = map(response.describe, found)
    shown = "" if p_of_sign(found.without, response.sign) <= ALPHA else " (not shown)"
    words = f"without {_spelt(way.other)} {without}{shown}, with it {with_other}"
    return judge_sign(found.with_other, sign=response.sign, words=words)


def _judge_less(way: _Way, response: _Response, results: StudyResults) -> Finding:
    found = _found(way, response, results)
    factor, other = _spelt(way.factor), _spelt(way.other)
    without, with_other, change = map(response.describe, found)
    words = f"{factor} without {other} {without}, with it {with_other}: changed by {change}"
    return judge_sign(found.change, sign=-response.sign, words=words)


def _found(way: _Way, response: _Response, results: StudyResults) -> Beside:
    return beside(_measured_runs(results), results.factors, response.column, factor=way.factor, other=way.other)


def _question(
    way: _Way,
    response: _Response,
    *,
    joined: str,
    texts: Mapping[str, str],
    rule: str,
    family: str,
    judge: Callable[[_Way, _Response, StudyResults], Finding],
) -> Claim:
    """About two factors, whose names fill `texts` and `family`, and whose columns are `joined` in the id."""
    names = _spelt(way.factor), _spelt(way.other)
    return Claim(
        id=f"{'+'.join(way.factor)} {joined} {'+'.join(way.other)}-{response.column}",
        text=texts[response.column].format(*names),
        source="no paper asks it",
        rule=rule,
        family=family.format(*names),
        judge=partial(judge, way, response),
    )


_still = partial(_question, joined="beside", texts=_QUESTIONS, rule=_STILL, family="{} where {} is", judge=_judge_still)
"""The effect where the other is."""
_interaction = partial(
    _question, joined="x", texts=_INTERACTIONS, rule=_LESS, family="{} and {} together", judge=_judge_less
)


class _Effect(NamedTuple):
    factor: tuple[str, ...]
    where: str
    response: _Response
    effect: Estimate
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
        rows.append(Row().keep(**named, scale=results.scale, **ends, n=one.effect.n, p=one.p))
        if (one.factor, one.where) not in shown:
            words = Row().show("effect of", _spelt(one.factor)).show("where", one.where).show("n", str(one.effect.n))
            words.words |= dict.fromkeys((response.title for response in responses), MISSING)
            shown[one.factor, one.where] = words
        shown[one.factor, one.where].show(one.response.title, one.response.describe(one.effect))
    notes = (
        f"{INTERVALS} n: seeds. Everything is taken within seeds: a difference of runs, of means over models with and "
        "without PRR (all models), or of two such differences (change: what the other changes in the effect, the "
        "interaction). LocAt: GAug and PRR together.",
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
        yield _Effect((factor,), where, response, interval)


def _at(runs: pd.DataFrame, levels: Mapping[str, str]) -> pd.DataFrame:
    return runs[(runs[list(levels)] == pd.Series(levels)).all(axis=1)]


def _beside(runs: pd.DataFrame, factors: _Factors, way: _Way, response: _Response) -> Iterator[_Effect]:
    """The effect without the other and with it, and the change; nothing where the runs cannot show it."""
    try:
        found = beside(runs, factors, response.column, factor=way.factor, other=way.other)
    except InputError:
        return
    other, models = _spelt(way.other), "all models " if way.is_over_models else ""
    yield _Effect(way.factor, f"{models}without {other}", response, found.without)
    yield _Effect(way.factor, f"{models}with {other}", response, found.with_other)
    yield _Effect(way.factor, f"change by {other}", response, found.change, found.change.p)


_PANELS = {
    "min_mad": "MAD of the most local head",
    "mean_mad": "mean MAD over all heads",
    "test_acc": "test accuracy, %",
}
_LINES = ("without CutMix", "with CutMix")
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
        legend_above(figure, {name: style.look_with(markersize=7) for name, style in looks(_LINES).items()})
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
    style, aside = looks(_LINES)[_LINES[place]], _APART if place else -_APART
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
    claims=[
        *(_still(way, response) for way in _WAYS for response in _RESPONSES),
        *(_interaction(way, response) for way in _PAIRS for response in _RESPONSES),
    ],
    intervals=f"{INTERVALS} Effects are taken within seeds.",
    tables=(locality_table, layers_table, differences_to("Baseline"), cutmix_table),
    figures={"figure-6-interaction": interaction, "figure-7-layers": layer_profiles(_CUTMIX_AND_LOCAT)},
)
