"""The tables that every study has: conditions beside a paper's, effects, separation, accuracy against locality."""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import product

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.conditions import (
    FACTOR_NAMES,
    key_factor,
    level_in_words,
    missing_notes,
    ordered_conditions,
    pair_columns,
    roles,
    with_attention,
)
from nearsight.report.responses import SHARES, known_shares, share_notes, with_shares
from nearsight.report.studies import PublishedCondition, report_of
from nearsight.report.tables import (
    MISSING,
    Table,
    mean_and_ends,
    percent,
    probability,
    records,
    rounded,
    seeds_in_words,
    span,
    with_interval,
)
from nearsight.study.fractions import FRACTION
from nearsight.study.results import StudyResults
from nearsight.study.statistics import (
    Effects,
    MeanInterval,
    Separation,
    correlations,
    dissociations,
    factorial_effects,
    layer_responses,
    mean_interval,
    paired_difference,
    separation,
)
from nearsight.study.statistics.intervals import ACCURACY_MARGIN, LOCALITY_MARGIN, SAME_ACCURACY, SAME_LOCALITY


def common_tables(results: StudyResults) -> list[Table]:
    """Those that every study has, as far as its runs can give them."""
    conditions, gain = conditions_table(results), gain_table(results)
    if "effects" not in report_of(results.name).without and (many := factors_of_many_levels(with_attention(results))):
        why = f"No table of effects: they are fitted for factors of two levels, not for {', '.join(many)}."
        conditions = dataclasses.replace(conditions, notes=(*conditions.notes, why))
    return [conditions, *([gain] if gain else []), *_of_locality(results)]


def _of_locality(results: StudyResults) -> list[Table]:
    measured = with_attention(results)
    if measured.runs.empty:
        return []
    separated = separation_table(measured)
    tables = [*effects_tables(measured), *([separated] if separated else []), *dissociation_tables(measured)]
    left_out = len(results.runs) - len(measured.runs)
    notes = (f"Without {left_out} runs whose heads could not be measured.",) if left_out else ()
    return [dataclasses.replace(table, notes=(*table.notes, *notes)) for table in tables]


# What each condition gave, with the paper's numbers beside (S1, Tables 1 and 2).


RESPONSES = ("test_acc", "min_mad", "max_mad", "min_entropy", "max_entropy")
INTERVALS = "± is half the 95 % interval of the mean over seeds (Student's t); with one seed there is none."


def conditions_table(results: StudyResults) -> Table:
    """A row per condition, those of the paper that have no run yet included."""
    published = report_of(results.name).published
    papers = dict(published.conditions) if published else {}
    labels, responses = ordered_conditions(results), (*RESPONSES, *known_shares(results))
    rows, shown = [], []
    for label in [*labels, *(label for label in papers if label not in labels)]:
        runs = results.runs[results.runs["condition"] == label]
        ours = {response: mean_interval(runs[response]) for response in responses}
        rows.append(_condition_numbers(results, label, runs, ours, papers.get(label)))
        shown.append(_shown(label, runs, ours, papers.get(label), with_paper=bool(papers)))
    notes = [
        INTERVALS,
        "MAD: smallest and largest mean attention distance over all heads of a run, then the mean over seeds; entropy "
        "likewise. Epochs: the mean number trained.",
        *share_notes(results),
    ]
    if published is not None:
        notes.append(f"The paper's numbers ({published.source}) are of one seed.")
    title = f"{results.name}: the conditions" + (f", beside {published.source}" if published else "")
    return Table(
        name="conditions",
        title=title,
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(*notes, *missing_notes(results)),
    )


def _condition_numbers(
    results: StudyResults,
    label: str,
    runs: pd.DataFrame,
    ours: dict[str, MeanInterval],
    paper: PublishedCondition | None,
) -> dict[str, object]:
    levels = {name: runs[name].iloc[0] if len(runs) else None for name in results.factors}
    row: dict[str, object] = {"condition": label, **levels, "scale": results.scale, "seeds": len(runs)}
    row |= {"mean_epochs": runs["epochs"].mean(), "mean_best_epoch": runs["best_epoch"].mean()}
    for response, interval in ours.items():
        row |= {f"{response}_{part}": value for part, value in asdict(interval).items() if part != "n"}
    if paper is not None:
        row |= {f"paper_{response}": value for response, value in asdict(paper).items()}
    return row


def _shown(
    label: str,
    runs: pd.DataFrame,
    ours: dict[str, MeanInterval],
    paper: PublishedCondition | None,
    *,
    with_paper: bool,
) -> dict[str, str]:
    row = {
        "condition": label,
        "seeds": str(len(runs)),
        "epochs": rounded(runs["epochs"].mean(), 0) if len(runs) else MISSING,
        "test accuracy, %": with_interval(ours["test_acc"], scale=100, digits=2),
        "paper's accuracy": percent(paper.test_acc if paper else None),
        "MAD, min to max": span(with_interval(ours["min_mad"]), with_interval(ours["max_mad"])),
        "paper's MAD": _published_span(paper, "mad"),
        **{
            f"{title}, %": with_interval(ours[column], scale=100, digits=2)
            for column, title in SHARES.items()
            if column in ours
        },
        "entropy, min to max": span(with_interval(ours["min_entropy"]), with_interval(ours["max_entropy"])),
        "paper's entropy": _published_span(paper, "entropy"),
    }
    return {name: cell for name, cell in row.items() if with_paper or not name.startswith("paper")}


def _published_span(paper: PublishedCondition | None, metric: str) -> str:
    return span(*(rounded(getattr(paper, f"{end}_{metric}", None)) for end in ("min", "max")))


def gain_table(results: StudyResults) -> Table | None:
    """Test accuracy without and with everything on, and the gain (S1, Table 1); None where one has no run."""
    found = roles(results)
    if found.base is None or found.full is None or found.base == found.full:
        return None
    published = report_of(results.name).published
    papers = published.conditions if published else {}
    ours = {
        label: mean_interval(results.runs.loc[results.runs["condition"] == label, "test_acc"])
        for label in (found.base, found.full)
    }
    ours["gain"] = paired_difference(results.runs, found.full, found.base, "test_acc")
    paper = {label: papers[label].test_acc for label in (found.base, found.full) if label in papers}
    if len(paper) == 2:
        paper["gain"] = paper[found.full] - paper[found.base]
    dataset = published.dataset if published and results.scale == "full" else str(results.settings.get("data.name", ""))
    row: dict[str, object] = {"study": results.name, "dataset": dataset, "scale": results.scale}
    shown = {"data set": dataset or MISSING}
    for label, interval in ours.items():
        signed = label == "gain"
        row |= {f"{label}_{part}": value for part, value in asdict(interval).items()}
        shown[f"{label}, {'points' if signed else '%'}"] = with_interval(interval, scale=100, digits=2, signed=signed)
        if label in paper:
            row[f"paper_{label}"] = paper[label]
            shown[f"paper's {label}"] = rounded(100 * paper[label], 2, signed=signed)
    notes = [INTERVALS, _whose_gain(ours["gain"], ours[found.base], ours[found.full])]
    if paper:
        assert published is not None
        notes.append(f"The paper's numbers ({published.source_of_gain}) are of one seed.")
    return Table(
        name="gain",
        title=f"{results.name}: test accuracy, {found.base} and {found.full}",
        numbers=pd.DataFrame([row]),
        shown=pd.DataFrame([shown]),
        notes=tuple(notes),
    )


def _whose_gain(gain: MeanInterval, *means: MeanInterval) -> str:
    """Where the two lack each other's seeds, the gain is not the difference of the means beside it."""
    if all(mean.n == gain.n for mean in means):
        return "The gain is taken within seeds."
    if gain.n == 0:
        return "The gain is taken within seeds, and they have none in common."
    seeds = seeds_in_words([gain.n])
    return f"The gain is taken within seeds, over the {seeds} that both have; the means are over all that each has."


# Main effects and interactions of the factors on accuracy, distance and entropy, for the model and per layer.


MODEL_RESPONSES = {"test_acc": "test accuracy, points", "min_mad": "min MAD", "min_entropy": "min entropy"}
LAYER_RESPONSES = {"mean_mad": "mean MAD", "min_mad": "min MAD", "mean_entropy": "mean entropy"}
PER_CENT = ("test_acc", *SHARES)
METHOD = (
    "Ordinary least squares on levels coded −1 and +1, seeds as replicates. The effect of a factor is the mean with it "
    "minus the mean without it; that of an interaction is half of what one factor changes in the other's effect."
)
NOT_CORRECTED = "p-values are those of single tests, not corrected for their number."


def factors_of_many_levels(results: StudyResults) -> list[str]:
    return [name for name, levels in results.factors.items() if len(levels) != 2]


def effects_tables(results: StudyResults) -> list[Table]:
    """None where a factor has more than two levels."""
    if factors_of_many_levels(results):
        return []
    return [_model_table(results), _layer_table(results)]


def _model_table(results: StudyResults) -> Table:
    responses = with_shares(results, MODEL_RESPONSES, lambda title: f"{title}, points")
    fitted = {name: factorial_effects(results.runs, results.factors, name) for name in responses}
    columns = {}
    for response, title in responses.items():
        scale, digits = (100, 2) if response in PER_CENT else (1, 3)
        rows = records(fitted[response].table)
        columns[title] = {_spelt(row["term"]): _effect(row, scale, digits) for row in rows}
        columns[f"p, {title.split(',')[0]}"] = {_spelt(row["term"]): probability(row["p"]) for row in rows}
    return Table(
        name="effects",
        title=f"{results.name}: effects of the factors",
        numbers=_effect_numbers(results, {(name, None): effects for name, effects in fitted.items()}),
        shown=pd.DataFrame(columns).rename_axis("term").reset_index(),
        notes=(
            METHOD,
            *_aliases(results),
            *share_notes(results),
            NOT_CORRECTED,
            *_what_is_left_out(fitted["min_mad"]),
        ),
    )


def _layer_table(results: StudyResults) -> Table:
    layers = layer_responses(results.heads).merge(results.runs[["run", *results.factors]], on="run")
    fitted: dict[tuple[str, int | None], Effects] = {}
    shown = []
    for response, layer in product(LAYER_RESPONSES, sorted(set(layers["layer"]))):
        effects = factorial_effects(layers[layers["layer"] == layer], results.factors, response)
        fitted[response, int(layer)] = effects
        main = {_spelt(row["term"]): _effect(row) for row in records(effects.table) if row["order"] == 1}
        shown.append({"response": LAYER_RESPONSES[response], "layer": f"L{layer + 1}", **main})
    return Table(
        name="effects-by-layer",
        title=f"{results.name}: main effects per layer",
        numbers=_effect_numbers(results, fitted),
        shown=pd.DataFrame(shown).fillna(MISSING),
        notes=(
            METHOD,
            *_aliases(results),
            "Mean and min are over the layer's heads. Interactions and p-values are in the CSV file beside this one.",
            *_what_is_left_out(next(iter(fitted.values()))),
        ),
    )


def _effect_numbers(results: StudyResults, fitted: Mapping[tuple[str, int | None], Effects]) -> pd.DataFrame:
    frames = [
        effects.table.assign(
            response=response,
            layer=layer,
            scale=results.scale,
            runs=effects.num_runs,
            residual_df=effects.residual_df,
        )
        for (response, layer), effects in fitted.items()
    ]
    table = pd.concat(frames, ignore_index=True)
    table["layer"] = table["layer"].astype("Int64")
    first = ["response", "layer", "scale", "runs", "residual_df"]
    return table[[*first, *(name for name in table.columns if name not in first)]]


def _effect(row: Mapping[str, float], scale: float = 1.0, digits: int = 3) -> str:
    return mean_and_ends(row["effect"], row["low"], row["high"], scale=scale, digits=digits)


def _spelt(term: str) -> str:
    return " × ".join(FACTOR_NAMES.get(name, name) for name in term.split(" × "))


def _aliases(results: StudyResults) -> tuple[str, ...]:
    """Of a fraction: whose doing an effect may be as well."""
    if not results.design.startswith(FRACTION):
        return ()
    told = results.design.removeprefix(FRACTION)
    return (f"A fraction of the design: {told}. An effect may be that of its aliases: these runs cannot tell.",)


def _what_is_left_out(effects: Effects) -> tuple[str, ...]:
    """The same for every response: it depends on the runs alone."""
    told = f"{effects.num_runs} runs, {effects.residual_df} of them left over to estimate the noise."
    return (told, *(f"{note[0].upper()}{note[1:]}." for note in effects.notes))


# Do the runs fall into two groups, and does accuracy go with locality?


# Rows of a table for people; machines get all.
MOST_ROWS = 30
SEPARATED = {"min_mad": "min MAD", "min_entropy": "min entropy"}


def separation_table(results: StudyResults) -> Table | None:
    """For every factor: the gap between the runs with it and without it; None where no factor varies yet."""
    rows, shown = [], []
    responses = with_shares(results, SEPARATED, lambda title: f"{title}, %")
    for factor, levels in results.factors.items():
        for response, title in responses.items():
            try:
                free, seeds, pairs = (
                    separation(results.runs, factor, levels, response, blocks=blocks)
                    for blocks in ((), ("seed",), pair_columns(results, factor))
                )
            except InputError:  # all runs at one level: nothing to compare yet
                continue
            rows += [_separation_numbers(results, found) for found in (free, seeds, pairs)]
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


def _separation_numbers(results: StudyResults, found: Separation) -> dict[str, object]:
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
