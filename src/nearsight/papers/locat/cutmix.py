"""What one factor does where another already does it: the question that no paper asked of CutMix and LocAt."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.papers.locat.measures import run_measures
from nearsight.report.claims import Claim
from nearsight.report.conditions import FACTOR_NAMES, missing_notes, scale_notes
from nearsight.report.figures.style import add_legend, house_style, light_grid, model_style
from nearsight.report.fits import LeastSquares, least_squares
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.responses import known_shares, share_notes
from nearsight.report.rules import CLEARLY_LESS, Finding
from nearsight.report.tables import MISSING, Table, mean_and_ends, probability, rounded, seeds_in_words, share
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval


class Answer(StrEnum):
    """Does the factor still do it where the other already does?"""

    STILL = "yes, still"
    LESS = "yes, but less"
    NOT = "not any more"
    REVERSED = "reversed"
    UNDECIDED = "undecided"
    NOT_EVEN_ALONE = "not even alone"


ANSWERS = (
    "*Beside the other.* The factor's effect without the other, its effect with it, and their difference (the "
    "interaction), each with its 95 % interval: ordinary least squares over all runs of the factorial, seeds as "
    "replicates. Where one factor is asked after beside one, effects are means over the third; LocAt is GAug and PRR, "
    "which come and go together. The noise is that of all runs, so an effect that seeds agree on can be less than sure "
    "here; its differences within seeds are in the table. An effect is sure where its interval excludes 0; it "
    f"shrinks where the difference is sure and goes against the effect without. *{Answer.NOT_EVEN_ALONE}*: the "
    "effect without the other is not sure, or goes the other way, so that there is nothing to keep. "
    f"*{Answer.REVERSED}*: with the other it is "
    f"sure and goes the other way. *{Answer.NOT}*: it shrinks, and with the other its interval holds 0 and is within "
    f"{share(CLEARLY_LESS)} of the effect without. *{Answer.LESS}*: it shrinks, but is not shown to be gone. "
    f"*{Answer.STILL}*: with the other it is sure, and it does not surely shrink. *{Answer.UNDECIDED}*: neither that "
    "it is left nor that it shrinks is sure."
)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A difference with its interval, whose ends are NaN where no run is left over to estimate the noise."""

    value: float
    low: float
    high: float
    n: int
    """The runs, or pairs of runs, that it comes from."""

    def is_sure(self, sign: int) -> bool:
        return self.low > 0 if sign > 0 else self.high < 0

    @property
    def reach(self) -> float:
        """How large it may be, on either side."""
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What a factor does to a response without another factor and with it."""

    without: Effect
    with_other: Effect
    change: Effect
    """The second minus the first: the interaction."""
    p: float
    """Of the change."""

    def answer(self, sign: int) -> Answer:
        """`sign`: which way the factor is expected to move the response."""
        if not self.without.is_sure(sign):
            return Answer.NOT_EVEN_ALONE
        if self.with_other.is_sure(-sign):
            return Answer.REVERSED
        if self.change.is_sure(-sign):
            gone = not self.with_other.is_sure(sign)
            small = self.with_other.reach <= CLEARLY_LESS * abs(self.without.value)
            return Answer.NOT if gone and small else Answer.LESS
        return Answer.STILL if self.with_other.is_sure(sign) else Answer.UNDECIDED


def beside(
    runs: pd.DataFrame,
    factors: dict[str, tuple[str, ...]],
    response: str,
    *,
    factor: tuple[str, ...],
    other: tuple[str, ...],
) -> Beside:
    """Differences of means of the factorial's cells, with the noise within all of them.

    Several factors come and go together; over those that are in neither, means are taken. An `InputError` says what
    the runs there are cannot tell.
    """
    if not np.isfinite(runs[response]).all():
        raise InputError(f"{response} is not known of every run")
    fitted = cell_means(runs, factors, response)

    def mean(*on: str) -> dict[str, float]:
        """The weights of cells in the mean with these factors on, and the others of the question off."""
        ends = {name: (levels[-1] if name in on else levels[0],) for name, levels in factors.items()}
        rest = {name: levels for name, levels in factors.items() if name not in (*factor, *other)}
        cells = [cell_name(levels) for levels in product(*(ends | rest).values())]
        return dict.fromkeys(cells, 1 / len(cells))

    without = _minus(mean(*factor), mean())
    with_other = _minus(mean(*factor, *other), mean(*other))
    change = fitted.estimate(_minus(with_other, without))
    told = [
        Effect(value=one.value, low=one.low, high=one.high, n=len(runs))
        for one in (fitted.estimate(without), fitted.estimate(with_other), change)
    ]
    return Beside(without=told[0], with_other=told[1], change=told[2], p=change.p)


def _minus(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {cell: one.get(cell, 0.0) - other.get(cell, 0.0) for cell in {**one, **other}}


def cell_name(levels: Iterable[str]) -> str:
    return ", ".join(levels)


def cell_means(runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], response: str) -> LeastSquares:
    """A mean per cell of the factorial, by `cell_name`, with one noise for all cells and seeds as replicates."""
    names = [cell_name(levels) for levels in runs[list(factors)].itertuples(index=False)]
    return least_squares(pd.get_dummies(pd.Series(names, index=runs.index), dtype=float), runs[response])


# Does CutMix still make attention local where LocAt already does? And LocAt, where CutMix already does?


CUTMIX, GAUG, PRR = "cutmix", "GAug", "PRR"
LOCAT = (GAUG, PRR)
SOURCE = "no paper asks it"


@dataclass(frozen=True, kw_only=True)
class Response:
    column: str
    title: str
    sign: int
    """Which way CutMix and LocAt are expected to move it."""
    tell: Callable[[Effect], str]


@dataclass(frozen=True)
class Way:
    """Whose effect is asked after, and beside which other. Those of several factors come and go together."""

    factor: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{'+'.join(self.factor)} beside {'+'.join(self.other)}"

    @property
    def is_over_models(self) -> bool:
        """Whether a third factor is left, over which means are taken."""
        return len(self.factor) == len(self.other) == 1

    def compare(self, runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], response: str) -> Beside:
        return beside(runs, factors, response, factor=self.factor, other=self.other)


WAYS = (
    Way((CUTMIX,), LOCAT),
    Way(LOCAT, (CUTMIX,)),
    Way((CUTMIX,), (GAUG,)),
    Way((GAUG,), (CUTMIX,)),
)


def spelt(*factors: str) -> str:
    return "LocAt" if factors == LOCAT else " and ".join(FACTOR_NAMES.get(factor, factor) for factor in factors)


def _plain(effect: Effect) -> str:
    return mean_and_ends(effect.value, effect.low, effect.high)


def _points(effect: Effect) -> str:
    return mean_and_ends(effect.value, effect.low, effect.high, scale=100, digits=2)


def _ratio(effect: Effect) -> str:
    """A difference of logarithms as a change in per cent, with the ends of its interval."""
    ends = [100 * float(np.expm1(end)) for end in (effect.value, effect.low, effect.high)]
    value, low, high = (rounded(end, 0, signed=True) for end in ends)
    return f"{value} %" if np.isnan(effect.low) else f"{value} % ({low} to {high})"


RESPONSES = (
    Response(column="min_mad", title="min MAD", sign=-1, tell=_plain),
    Response(column="mean_mad", title="mean MAD", sign=-1, tell=_plain),
    Response(column="log_min_mad", title="min MAD, relative", sign=-1, tell=_ratio),
    Response(column="test_acc", title="test accuracy, points", sign=1, tell=_points),
)


def responses_of(results: StudyResults) -> tuple[Response, ...]:
    """`RESPONSES`, with the shares of attention near a patch, where all runs have them, after the smallest distance."""
    shares = known_shares(results).items()
    told = (Response(column=name, title=f"{title}, points", sign=1, tell=_points) for name, title in shares)
    return (RESPONSES[0], *told, *RESPONSES[1:])


def cutmix_runs(results: StudyResults) -> pd.DataFrame:
    """The runs with every response; the logarithm is NaN of a distance of 0."""
    runs = run_measures(results)
    return runs.assign(log_min_mad=np.log(runs["min_mad"].where(runs["min_mad"] > 0)))


_QUESTIONS = {
    "min_mad": "Does {} still bring the most local head nearer where {} already does?",
    "mean_mad": "Does {} still make heads look nearer on average where {} already does?",
    "log_min_mad": "Does {} still bring the most local head nearer, relative to what {} leaves of its distance?",
    "test_acc": "Does {} still raise accuracy where {} already does?",
}


def cutmix_questions() -> tuple[Claim, ...]:
    return tuple(_question(response, way) for way in WAYS for response in RESPONSES)


def _question(response: Response, way: Way) -> Claim:
    factor, other = spelt(*way.factor), spelt(*way.other)

    def judge(results: StudyResults) -> Finding:
        found = way.compare(cutmix_runs(results), results.factors, response.column)
        tell, change = response.tell, found.change
        words = (
            f"without {other} {tell(found.without)}, with it {tell(found.with_other)}; "
            f"changed by {tell(change)} (p = {probability(found.p)})"
        )
        return Finding(
            verdict=found.answer(response.sign),
            ours=words,
            value=change.value,
            low=change.low,
            high=change.high,
            n=int(results.runs["seed"].nunique()),
        )

    text = _QUESTIONS[response.column].format(factor, other)
    return Claim(id=f"{way.name}-{response.column}", text=text, source=SOURCE, rule=ANSWERS, judge=judge)


# What CutMix does in each model, what LocAt and GAug do with and without CutMix, and how each changes the other.


@dataclass(frozen=True, kw_only=True)
class FoundEffect:
    factor: tuple[str, ...]
    where: str
    response: Response
    effect: Effect
    p: float = float("nan")


def cutmix_table(results: StudyResults) -> Table:
    """A row per factor and place, a column per response."""
    runs = cutmix_runs(results)
    single = [way.factor[0] for way in WAYS if way.is_over_models]
    found = [
        *(
            effect
            for factor in single
            for response in responses_of(results)
            for effect in _in_each_model(runs, results.factors, factor, response)
        ),
        *(
            effect
            for way in WAYS
            for response in responses_of(results)
            for effect in _beside(runs, results.factors, way, response)
        ),
    ]
    if not found:
        raise InputError("no two runs of one seed differ in CutMix or GAug alone")
    shown: dict[tuple[tuple[str, ...], str], dict[str, str]] = {}
    for each in found:
        named = {"effect of": spelt(*each.factor), "where": each.where, "n": str(each.effect.n)}
        told = {each.response.title: each.response.tell(each.effect)}
        shown.setdefault((each.factor, each.where), named).update(told)
    rows = [
        {
            **{"factor": "+".join(each.factor), "where": each.where, "response": each.response.column},
            **{"scale": results.scale, **asdict(each.effect), "p": each.p},
        }
        for each in found
    ]
    return Table(
        name="cutmix-beside-locat",
        title=f"{results.name}: CutMix beside LocAt",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(list(shown.values())).fillna(MISSING),
        notes=(
            "± is half the 95 % interval. Of one model: differences within seeds, n of them (Student's t; with one "
            "seed there is no interval). Over models, and with or without LocAt (GAug and PRR): ordinary least squares "
            "with seeds as replicates and one noise for all, from n runs. Change: what the other changes in the "
            "effect, the interaction.",
            "Relative: the change of the smallest distance in per cent, with the ends of its interval; in rows of "
            "changes, the ratio of two such changes. No distance is below 0, so where little of it is left less "
            "can be taken off: the relative change allows for that.",
            *share_notes(results),
            *missing_notes(results),
        ),
    )


def _in_each_model(
    runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], factor: str, response: Response
) -> Iterator[FoundEffect]:
    """The factor's effect at every combination of the others, within seeds."""
    others = [name for name in factors if name != factor]
    for combination in product(*(factors[name] for name in others)):
        levels = dict(zip(others, combination, strict=True))
        here = runs[(runs[others] == pd.Series(levels)).all(axis=1)]
        values = here.pivot_table(index="seed", columns=factor, values=response.column)
        values = values.reindex(columns=list(factors[factor])).dropna()
        if values.empty:
            continue
        interval = mean_interval(values.iloc[:, -1] - values.iloc[:, 0])
        on = [spelt(name) for name, level in levels.items() if level != factors[name][0]]
        yield FoundEffect(
            factor=(factor,),
            where=f"with {' and '.join(on)}" if on else "alone",
            response=response,
            effect=Effect(value=interval.mean, low=interval.low, high=interval.high, n=interval.n),
        )


def _beside(
    runs: pd.DataFrame, factors: dict[str, tuple[str, ...]], way: Way, response: Response
) -> Iterator[FoundEffect]:
    """The effect without the other and with it, and the change; nothing where the runs cannot tell."""
    try:
        found = way.compare(runs, factors, response.column)
    except InputError:
        return
    other = spelt(*way.other)
    models = "all models " if way.is_over_models else ""
    for where, effect, p in (
        (f"{models}without {other}", found.without, float("nan")),
        (f"{models}with {other}", found.with_other, float("nan")),
        (f"change by {other}", found.change, found.p),
    ):
        yield FoundEffect(factor=way.factor, where=where, response=response, effect=effect, p=p)


# CutMix in ViT, with each part of LocAt and with both: lines that are parallel where neither changes the other.


PANELS = {
    "min_mad": "MAD of the most local head",
    "mean_mad": "mean MAD over all heads",
    "test_acc": "test accuracy, %",
}
APART = 0.12
"""How far without and with CutMix stand from the middle of their place, in units of the distance between places."""


def interaction(results: StudyResults) -> Drawing:
    """Per response: the four models from ViT to LocAt, a line without CutMix and one with it."""
    runs = cutmix_runs(results)
    if any(runs[factor].nunique() < 2 for factor in (CUTMIX, GAUG)):
        raise InputError("it compares runs with and without CutMix, with and without GAug, and some have no run yet")
    with house_style():
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        models = _models(results.factors)
        for panel, (column, title) in zip(panels, PANELS.items(), strict=True):
            known = runs.dropna(subset=[column])
            fitted = cell_means(known, results.factors, column)
            for place in range(len(results.factors[CUTMIX])):
                _draw_line(panel, known, results.factors, fitted, column, place)
            panel.set_title(title)
            panel.set_xticks(range(len(models)), list(models))
            panel.set_xlim(-0.4, len(models) - 0.6)
            light_grid(panel, "y")
        _add_legend(figure)
    seeds = seeds_in_words(runs.groupby("condition")["seed"].nunique())
    lines = (
        f"Lines: means over {seeds}; small markers: single runs; bars: 95 % intervals, the noise taken from all runs."
    )
    add_footnote(figure, [lines, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"What CutMix does in each model; parallel lines would mean that neither CutMix nor LocAt's parts "
        f"change what the other does. {lines}",
    )


def _models(factors: dict[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """Name → its levels of GAug and PRR."""
    gaug, prr = factors[GAUG], factors[PRR]
    return {
        "ViT": {GAUG: gaug[0], PRR: prr[0]},
        "+PRR": {GAUG: gaug[0], PRR: prr[-1]},
        "+GAug": {GAUG: gaug[-1], PRR: prr[0]},
        "LocAt": {GAUG: gaug[-1], PRR: prr[-1]},
    }


def _draw_line(
    panel: Axes,
    runs: pd.DataFrame,
    factors: dict[str, tuple[str, ...]],
    fitted: LeastSquares,
    column: str,
    place: int,
) -> None:
    style = model_style(place)
    scale = 100 if column == "test_acc" else 1
    across, means = [], []
    for middle, model in enumerate(_models(factors).values()):
        levels = {**model, CUTMIX: factors[CUTMIX][place]}
        here = runs[(runs[list(levels)] == pd.Series(levels)).all(axis=1)]
        if here.empty:
            continue
        estimate = fitted.estimate({cell_name(levels[name] for name in factors): 1.0})
        across.append(middle + (APART if place else -APART))
        means.append(scale * estimate.value)
        if estimate.has_interval:
            ends = [scale * estimate.low, scale * estimate.high]
            panel.plot([across[-1]] * 2, ends, color=style.colour, linewidth=4, alpha=0.35, gid="interval")
        values = scale * here[column]
        panel.plot(
            [across[-1] + (APART if place else -APART)] * len(values),
            values,
            marker=style.marker,
            markersize=3,
            color=style.colour,
            linestyle="none",
        )
    panel.plot(
        across,
        means,
        color=style.colour,
        linestyle=style.dash,
        marker=style.marker,
        markersize=7,
        linewidth=1.6,
        gid=f"{column}-{place}",
    )


def _add_legend(figure: Figure) -> None:
    handles, names = [], []
    for place, name in enumerate(("without CutMix", "with CutMix")):
        style = model_style(place)
        handles.append(Line2D([], [], color=style.colour, linestyle=style.dash, marker=style.marker, markersize=7))
        names.append(name)
    add_legend(figure, handles, names, loc="outside upper left", ncols=len(names))
