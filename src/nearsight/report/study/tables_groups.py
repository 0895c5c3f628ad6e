"""Do the runs fall into two groups, and does accuracy go with locality?"""

from dataclasses import asdict
from functools import partial

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.conditions import FACTOR_NAMES, key_factor, level_in_words, ordered_conditions, pair_columns
from nearsight.report.study.shares import SHARES, share_notes, with_shares
from nearsight.report.study.table import MISSING, Table, mean_and_ends, probability, records, rounded, span
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Separation, correlations, dissociations, separation
from nearsight.study.statistics.intervals import ACCURACY_MARGIN, LOCALITY_MARGIN, SAME_ACCURACY, SAME_LOCALITY

# Rows of a table for people; machines get all.
MOST_ROWS = 30
RESPONSES = {"min_mad": "min MAD", "min_entropy": "min entropy"}


def separation_table(results: StudyResults) -> Table | None:
    """For every factor: the gap between the runs with it and without it; None where no factor varies yet."""
    rows, shown = [], []
    responses = with_shares(results, RESPONSES, lambda title: f"{title}, %")
    for factor, levels in results.factors.items():
        for response, title in responses.items():
            try:
                free, seeds, pairs = (
                    separation(results.runs, factor, levels, response, blocks=blocks)
                    for blocks in ((), ("seed",), pair_columns(results, factor))
                )
            except InputError:  # all runs at one level: nothing to compare yet
                continue
            rows += [_numbers(results, found) for found in (free, seeds, pairs)]
            told = partial(_told, response)
            shown.append(
                {
                    "factor": FACTOR_NAMES.get(factor, factor),
                    "response": title,
                    "with it": span(told(free.lowest_with), told(free.highest_with)),
                    "without it": span(told(free.lowest_without), told(free.highest_without)),
                    "margin": told(free.margin, signed=True),
                    "difference of means": told(free.difference, signed=True),
                    "p": probability(free.p),
                    "p, within seeds": probability(seeds.p),
                    # A fraction has no pairs that differ in one factor alone.
                    "p, within pairs": probability(pairs.p) if pairs.num_dealings > 1 else MISSING,
                    "chance of complete separation": probability(free.p_complete),
                }
            )
    if not rows:
        return None
    return Table(
        name="separation",
        title=f"{results.name}: runs with and without each factor",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(
            "With it: all runs at the factor's last level; without it: at its first. Margin: the smallest of the upper "
            "group minus the largest of the lower; positive is a clean gap, negative an overlap.",
            "p: two-sided permutation test of the difference of means: the labels dealt anew to all runs, to the runs "
            "of a seed, and to pairs of runs that differ in this factor alone. The last holds even where the other "
            "factors have effects. " + _counting(rows),
            "Chance of complete separation: the share of dealings to all runs that part them completely.",
            *share_notes(results),
        ),
    )


def _told(response: str, value: float, *, signed: bool = False) -> str:
    return rounded(100 * value, 2, signed=signed) if response in SHARES else rounded(value, signed=signed)


def _numbers(results: StudyResults, found: Separation) -> dict[str, object]:
    row: dict[str, object] = asdict(found)
    return {**row, "blocks": " ".join(found.blocks), "scale": results.scale}


def _counting(rows: list[dict[str, object]]) -> str:
    if all(row["exact"] for row in rows):
        return "All dealings are counted (exact)."
    return "Where there are too many dealings to count (exact = False in the CSV), random ones stand in."


def dissociation_tables(results: StudyResults) -> list[Table]:
    """Pairs of conditions that differ in one of accuracy and locality, and how the two correlate over runs."""
    tables = []
    order = ordered_conditions(results)
    pairs = dissociations(results.runs.sort_values("condition", key=lambda labels: labels.map(order.index)))
    if len(pairs):
        tables.append(_pairs_table(results, pairs))
    key = key_factor(results)
    if key is not None:
        tables.append(_correlation_table(results, key))
    return tables


def _pairs_table(results: StudyResults, pairs: pd.DataFrame) -> Table:
    shown = [
        {
            "first": row["first"],
            "second": row["second"],
            "seeds": str(row["n"]),
            "accuracy, points": _difference(row, "test_acc", 100, 2),
            "min MAD": _difference(row, "min_mad"),
            "what differs": kind,
        }
        for kind in (SAME_ACCURACY, SAME_LOCALITY)
        for row in records(pairs[pairs["kind"] == kind])
    ]
    return Table(
        name="dissociation",
        title=f"{results.name}: accuracy without locality, locality without accuracy",
        numbers=pairs.assign(accuracy_margin=ACCURACY_MARGIN, locality_margin=LOCALITY_MARGIN, scale=results.scale),
        shown=pd.DataFrame(shown[:MOST_ROWS]),
        notes=(
            "Differences are second minus first, taken within seeds, with half the 95 % interval. Close: a mean "
            f"difference of at most {ACCURACY_MARGIN:g} in test accuracy (a fraction), of at most {LOCALITY_MARGIN:g} "
            "in min MAD. With few seeds that is no proof of equality: the intervals say how far they may be apart. "
            "Different: more than that, and the interval excludes 0; with one seed there is none, and more is enough.",
            f"Pairs compared: {len(pairs)}; all of them are in the CSV file beside this one."
            + (f" Shown: the first {MOST_ROWS} of {len(shown)}." if len(shown) > MOST_ROWS else ""),
        ),
    )


def _difference(row: dict[str, float], response: str, scale: float = 1.0, digits: int = 3) -> str:
    mean, low, high = (row[f"{response}_{part}"] for part in ("difference", "low", "high"))
    return mean_and_ends(mean, low, high, scale=scale, digits=digits)


def _correlation_table(results: StudyResults, key: str) -> Table:
    levels = results.factors[key]
    table = correlations(results.runs, key, levels)
    names = ["all runs", *(level_in_words(key, levels, level) for level in levels)]
    shown = pd.DataFrame(
        {
            "runs": names,
            "n": table["n"].astype(str),
            "Pearson": [rounded(value, 2) for value in table["pearson"]],
            "p, Pearson": [probability(value) for value in table["pearson_p"]],
            "Spearman": [rounded(value, 2) for value in table["spearman"]],
            "p, Spearman": [probability(value) for value in table["spearman_p"]],
        }
    )[table["n"].to_numpy() > 2]
    return Table(
        name="correlation",
        title=f"{results.name}: test accuracy against min MAD over runs",
        numbers=table.assign(scale=results.scale),
        shown=shown,
        notes=(
            "Over all runs a factor that moves both makes them correlate; within a level of "
            f"{FACTOR_NAMES.get(key, key)} what is left is not its doing. Runs of one seed are not quite independent, "
            "so the p-values are rough.",
        ),
    )
