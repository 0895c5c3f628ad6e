"""From S3 to S1: does CutMix raise the association of learned positions, and does association tell where heads look?"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch

from nearsight.errors import InputError
from nearsight.metrics import neighbour_association
from nearsight.report.study.by_cutmix import PROTOCOL, correlations, grouping, groups, link, link_rule
from nearsight.report.study.conditions import FACTOR_NAMES
from nearsight.report.study.grid import patches_per_side
from nearsight.report.study.least_squares import Estimate
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.positions.positional import ASSOCIATION, WHAT_ASSOCIATION_IS
from nearsight.report.study.questions import SIGN, judge_sign
from nearsight.report.study.rank_correlation import METHOD as CORRELATION
from nearsight.report.study.table import MISSING, Table, probability, records, rounded, span
from nearsight.report.study.tables_effects import NOT_CORRECTED
from nearsight.study.results import StudyResults
from nearsight.study.statistics import factorial_effects, mean_interval, paired_difference

MEAN, EFFECT, CORRELATED = "mean", "effect", "rank correlation"
"""Kinds of rows."""
LINK = link_rule("association")


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    kind: str
    group: str = ""
    """Of a mean or a rank correlation: which runs."""
    value: float
    low: float = float("nan")
    high: float = float("nan")
    p: float = float("nan")
    exact: bool | None = None
    """Of a rank correlation: all orders were counted for p."""
    n: int
    """Seeds of a mean or of a difference within seeds; else runs."""
    counted: str
    answer: str = MISSING


def associated_runs(results: StudyResults) -> pd.DataFrame:
    """The runs whose models have learned positions. None such is an `InputError`."""
    if ASSOCIATION not in results.runs or results.runs[ASSOCIATION].isna().all():
        raise InputError("no run has learned positions whose association was measured")
    return results.runs.dropna(subset=[ASSOCIATION]).astype({ASSOCIATION: "float64", "min_mad": "float64"})


def chance_association(settings: Mapping[str, object]) -> float | None:
    """What positions of a random order give on the models' grid; None where the settings do not say the grid."""
    side = patches_per_side(settings)
    return None if side is None else neighbour_association(torch.zeros(side**2, side**2), (side, side)).chance


def association_rows(results: StudyResults) -> list[Row]:
    """All that is said of association."""
    return [*_means(results), *_effects(results), *_correlations(results)]


def association_table(results: StudyResults) -> Table:
    """Means of the groups, effects on association, and its rank correlation with the smallest distance."""
    rows = association_rows(results)
    chance = chance_association(results.settings)
    of_chance = () if chance is None else (f"By chance association would be {rounded(chance)} on the models' grid.",)
    return Table(
        name="position-association",
        title=f"{results.name}: do learned positions know neighbours, and do local heads go with it?",
        numbers=pd.DataFrame([_numbers(row, results.scale, chance) for row in rows]),
        shown=pd.DataFrame([_shown(row) for row in rows]),
        notes=(
            WHAT_ASSOCIATION_IS,
            *of_chance,
            "Means: over seeds, of what the group's runs of each seed have on average; 95 % intervals (Student's t).",
            *_how_effects(results),
            CORRELATION,
            "A factor that moves both makes them correlate over all runs; what is left within a group is the link "
            "itself.",
            f"Does CutMix, or Modern, raise association? {SIGN}",
            f"Do runs with more association have a more local head? {LINK}",
            NOT_CORRECTED,
            *missing_notes(results),
        ),
    )


def _means(results: StudyResults) -> list[Row]:
    runs, factor, rows = associated_runs(results), grouping(results), []
    for level, words in groups(results).items():
        by_seed = runs[runs[factor] == level].groupby("seed")[ASSOCIATION].mean()
        ours = mean_interval(by_seed)
        if ours.n:
            rows.append(
                Row(
                    what=f"association, {words}",
                    kind=MEAN,
                    group=words,
                    value=ours.mean,
                    low=ours.low,
                    high=ours.high,
                    n=ours.n,
                    counted="seeds",
                )
            )
    return rows


def _effects(results: StudyResults) -> list[Row]:
    """What each factor does to association; of two protocols, what Modern does within seeds. Only CutMix is judged."""
    runs, factor = associated_runs(results), grouping(results)
    if factor == PROTOCOL:
        first, last = results.factors[factor][0], results.factors[factor][-1]
        ours = paired_difference(runs.assign(condition=runs[factor]), last, first, ASSOCIATION)
        if not ours.n:
            return []
        estimate = Estimate.of(ours)
        return [_effect_row(f"change of association, {last} minus {first}", estimate, n=ours.n, counted="seeds")]
    found = []
    for row in records(factorial_effects(runs, results.factors, ASSOCIATION).table):
        if row["order"] == 1:
            estimate = Estimate(value=row["effect"], low=row["low"], high=row["high"])
            what = f"effect on association, {FACTOR_NAMES.get(row['term'], row['term'])}"
            is_key = row["term"] == factor
            found.append(_effect_row(what, estimate, n=len(runs), counted="runs", p=row["p"], is_key=is_key))
    return found


def _effect_row(
    what: str, estimate: Estimate, *, n: int, counted: str, p: float = float("nan"), is_key: bool = True
) -> Row:
    answer = judge_sign(estimate, sign=1, words="", n=n).verdict if is_key else MISSING
    value, low, high = estimate.value, estimate.low, estimate.high
    return Row(what=what, kind=EFFECT, value=value, low=low, high=high, p=p, n=n, counted=counted, answer=answer)


def _correlations(results: StudyResults) -> list[Row]:
    return [
        Row(
            what=f"association and min MAD, {words}",
            kind=CORRELATED,
            group=words,
            value=found.value,
            low=found.low,
            high=found.high,
            p=found.p,
            exact=found.exact,
            n=found.n,
            counted="runs",
            answer=link(found),
        )
        for words, found in correlations(results, ASSOCIATION).items()
    ]


def _how_effects(results: StudyResults) -> list[str]:
    if grouping(results) == PROTOCOL:
        return [
            "The change is taken within seeds, with Student's t interval; the protocols differ in more than CutMix."
        ]
    effects = factorial_effects(associated_runs(results), results.factors, ASSOCIATION)
    told = (
        "Effects: the mean with a factor minus the mean without it, by ordinary least squares with all interactions, "
        f"seeds as replicates; {effects.num_runs} runs, {effects.residual_df} of them left over to estimate the noise."
    )
    return [told, *(f"{note[0].upper()}{note[1:]}." for note in effects.notes)]


def _numbers(row: Row, scale: str, chance: float | None) -> dict[str, object]:
    ends = {"value": row.value, "low": row.low, "high": row.high, "p": row.p, "exact": row.exact}
    counted = {"n": row.n, "counted": row.counted, "answer": row.answer, "chance": chance, "scale": scale}
    return {"what": row.what, "kind": row.kind, **ends, **counted}


def _shown(row: Row) -> dict[str, str]:
    signed = row.kind != MEAN
    low, high = (rounded(end, signed=signed) for end in (row.low, row.high))
    return {
        "what": row.what,
        "value": rounded(row.value, signed=signed),
        "95 % interval": span(low, high),
        "p": probability(row.p) + (" (exact)" if row.exact else ""),
        "from": f"{row.n} {row.counted}",
        "answer": row.answer if row.answer == MISSING else f"**{row.answer}**",
    }
