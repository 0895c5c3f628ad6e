"""What CutMix does in each model, what LocAt and GAug do with and without CutMix, and how each changes the other."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.locat.cutmix import WAYS, Response, Way, cutmix_runs, responses_of, spelt
from nearsight.report.study.locat.interaction import Effect
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.shares import share_notes
from nearsight.report.study.table import MISSING, Table
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval


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
