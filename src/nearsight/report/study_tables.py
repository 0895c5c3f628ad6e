"""The tables that every study has: conditions next to a paper's, effects, separation, accuracy against locality."""

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
    OF_TWO,
    Row,
    Table,
    columns_of,
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
    Estimate,
    correlations,
    dissociations,
    factorial_effects,
    layer_responses,
    mean_interval,
    paired_difference,
    separation,
)
from nearsight.study.statistics.intervals import ACCURACY_MARGIN, LOCALITY_MARGIN, SAME_ACCURACY, SAME_LOCALITY

INTERVALS = f"± is half the 95 % interval of the mean over seeds (Student's t); {OF_TWO}, and one has none."
NOT_CORRECTED = "p-values are those of single tests, not corrected for their number."
_RESPONSES = ("test_acc", "min_mad", "max_mad", "min_entropy", "max_entropy")


def common_tables(results: StudyResults) -> list[Table]:
    """Those that every study has, as far as its runs can give them."""
    conditions, gain = conditions_table(results), _gain_table(results)
    if "effects" not in report_of(results.name).without and (many := _factors_of_many_levels(with_attention(results))):
        why = f"No table of effects: they are fitted for factors of two levels, not for {', '.join(many)}."
        conditions = dataclasses.replace(conditions, notes=(*conditions.notes, why))
    return [conditions, *([gain] if gain else []), *_of_locality(results)]


def _of_locality(results: StudyResults) -> list[Table]:
    measured = with_attention(results)
    if measured.runs.empty:
        return []
    separated = _separation_table(measured)
    tables = [*_effects_tables(measured), *([separated] if separated else []), *_dissociation_tables(measured)]
    left_out = len(results.runs) - len(measured.runs)
    notes = (f"Without {left_out} runs whose heads could not be measured.",) if left_out else ()
    return [dataclasses.replace(table, notes=(*table.notes, *notes)) for table in tables]


def conditions_table(results: StudyResults) -> Table:
    """A row per condition, those of the paper that have no run yet included (S1, Tables 1 and 2)."""
    published = report_of(results.name).published
    papers = dict(published.conditions) if published else {}
    labels = dict.fromkeys([*ordered_conditions(results), *papers])
    notes = [
        INTERVALS,
        "MAD: smallest and largest mean attention distance over all heads of a run, then the mean over seeds; entropy "
        "in the same way. Epochs: the mean number trained.",
        *share_notes(results),
    ]
    if published is not None:
        notes.append(f"The paper's numbers ({published.source}) are of one seed.")
    return Table.of(
        "conditions",
        f"{results.name}: the conditions" + (f", next to {published.source}" if published else ""),
        [_condition_row(results, label, papers.get(label), with_paper=bool(papers)) for label in labels],
        notes=(*notes, *missing_notes(results)),
    )


def _condition_row(results: StudyResults, label: str, paper: PublishedCondition | None, *, with_paper: bool) -> Row:
    runs = results.runs[results.runs["condition"] == label]
    epochs, ours = runs["epochs"].mean(), {}
    row = Row(condition=label).keep(**{name: runs[name].iloc[0] if len(runs) else None for name in results.factors})
    row.keep(scale=results.scale).both("seeds", len(runs))
    row.both("mean_epochs", epochs, "epochs", rounded(epochs, 0)).keep(mean_best_epoch=runs["best_epoch"].mean())
    for response in (*_RESPONSES, *known_shares(results)):
        ours[response] = mean_interval(runs[response])
        row.keep(**columns_of(response, ours[response]))
        del row.numbers[f"{response}_n"]  # the seeds
    if paper is not None:
        row.keep(**{f"paper_{response}": value for response, value in asdict(paper).items()})
    row.show("test accuracy, %", with_interval(ours["test_acc"], scale=100, digits=2))
    if with_paper:
        row.show("paper's accuracy", percent(paper.test_acc if paper else None))
    for metric, title in (("mad", "MAD"), ("entropy", "entropy")):
        ends = (f"min_{metric}", f"max_{metric}")
        row.show(f"{title}, min to max", span(*(with_interval(ours[end]) for end in ends)))
        if with_paper:
            row.show(f"paper's {title}", span(*(rounded(getattr(paper, end, None)) for end in ends)))
        for column, name in known_shares(results).items() if metric == "mad" else ():
            row.show(f"{name}, %", with_interval(ours[column], scale=100, digits=2))
    return row


def _gain_table(results: StudyResults) -> Table | None:
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
    row = Row().keep(study=results.name).both("dataset", dataset, "data set", dataset or MISSING)
    row.keep(scale=results.scale)
    for label, interval in ours.items():
        signed = label == "gain"
        title = f"{label}, {'points' if signed else '%'}"
        row.interval(label, interval, title, scale=100, digits=2, signed=signed)
        if label in paper:
            text = rounded(100 * paper[label], 2, signed=signed)
            row.both(f"paper_{label}", paper[label], f"paper's {label}", text)
    notes = [INTERVALS, _whose_gain(ours["gain"], ours[found.base], ours[found.full])]
    if paper:
        assert published is not None
        notes.append(f"The paper's numbers ({published.source_of_gain}) are of one seed.")
    return Table.of("gain", f"{results.name}: test accuracy, {found.base} and {found.full}", [row], notes=notes)


def _whose_gain(gain: Estimate, *means: Estimate) -> str:
    """Where the two lack each other's seeds, the gain is not the difference of the means next to it."""
    if all(mean.n == gain.n for mean in means):
        return "The gain is taken within seeds."
    if gain.n == 0:
        return "The gain is taken within seeds, and they have none in common."
    seeds = seeds_in_words([gain.n])
    return f"The gain is taken within seeds, over the {seeds} that both have; the means are over all that each has."


_OF_MODEL = {"test_acc": "test accuracy, points", "min_mad": "min MAD", "min_entropy": "min entropy"}
_OF_LAYER = {"mean_mad": "mean MAD", "min_mad": "min MAD", "mean_entropy": "mean entropy"}
_PER_CENT = ("test_acc", *SHARES)
_METHOD = (
    "Ordinary least squares on levels coded −1 and +1, seeds as replicates. The effect of a factor is the mean with it "
    "minus the mean without it; that of an interaction is half of what one factor changes in the other's effect."
)


def _factors_of_many_levels(results: StudyResults) -> list[str]:
    return [name for name, levels in results.factors.items() if len(levels) != 2]


def _effects_tables(results: StudyResults) -> list[Table]:
    """Main effects and interactions of the factors, for the model and per layer; none where a factor has more than two
    levels."""
    return [] if _factors_of_many_levels(results) else [_model_table(results), _layer_table(results)]


def _model_table(results: StudyResults) -> Table:
    responses = with_shares(results, _OF_MODEL, lambda title: f"{title}, points")
    rows: list[Row] = []
    shown: dict[str, Row] = {}
    for response, title in responses.items():
        effects = factorial_effects(results.runs, results.factors, response)
        scale, digits = (100, 2) if response in _PER_CENT else (1, 3)
        for effect in records(effects.table):
            rows.append(_effect_row(results, effects, effect, response))
            term = spelt(effect["term"])
            words = shown.setdefault(term, Row().show("term", term)).show(title, _effect(effect, scale, digits))
            words.show(f"p, {title.split(',')[0]}", probability(effect["p"]))
    notes = (_METHOD, *_aliases(results), *share_notes(results), NOT_CORRECTED, *_what_is_left_out(effects))
    title = f"{results.name}: effects of the factors"
    return Table.of("effects", title, rows, shown=shown.values(), notes=notes)


def _layer_table(results: StudyResults) -> Table:
    layers = layer_responses(results.heads).merge(results.runs[["run", *results.factors]], on="run")
    rows, shown = [], []
    for response, layer in product(_OF_LAYER, sorted(set(layers["layer"]))):
        effects = factorial_effects(layers[layers["layer"] == layer], results.factors, response)
        words = Row(response=_OF_LAYER[response], layer=f"L{layer}")
        for effect in records(effects.table):
            rows.append(_effect_row(results, effects, effect, response, int(layer)))
            if effect["order"] == 1:
                words.show(spelt(effect["term"]), _effect(effect))
        shown.append(words)
    of_csv = (
        "Layers count from 0; mean and min are over a layer's heads. Interactions and p-values are in the CSV file "
        "next to this one."
    )
    notes = (_METHOD, *_aliases(results), of_csv, *_what_is_left_out(effects))
    table = Table.of("effects-by-layer", f"{results.name}: main effects per layer", rows, shown=shown, notes=notes)
    return dataclasses.replace(table, shown=table.shown.fillna(MISSING))


def _effect_row(
    results: StudyResults, effects: Effects, effect: Mapping[str, object], response: str, layer: int | None = None
) -> Row:
    fit = {"scale": results.scale, "runs": effects.num_runs, "residual_df": effects.residual_df}
    return Row().keep(response=response, layer=layer, **fit, **effect)


def _effect(row: Mapping[str, float], scale: float = 1.0, digits: int = 3) -> str:
    return mean_and_ends(row["effect"], row["low"], row["high"], scale=scale, digits=digits)


def spelt(term: str) -> str:
    """An effect as people read it."""
    return " × ".join(FACTOR_NAMES.get(name, name) for name in term.split(" × "))


def _aliases(results: StudyResults) -> tuple[str, ...]:
    """Of a fraction: whose doing an effect may be as well."""
    if not results.design.startswith(FRACTION):
        return ()
    text = results.design.removeprefix(FRACTION)
    return (f"A fraction of the design: {text}. These runs cannot separate an effect from its aliases.",)


def _what_is_left_out(effects: Effects) -> tuple[str, ...]:
    """The same for every response: it depends on the runs alone."""
    text = f"{effects.num_runs} runs, {effects.residual_df} of them left over to estimate the noise."
    return (text, *(f"{note[0].upper()}{note[1:]}." for note in effects.notes))


_SEPARATED = {"min_mad": "min MAD", "min_entropy": "min entropy"}


def _separation_table(results: StudyResults) -> Table | None:
    """For every factor: the gap between the runs with it and without it; None where no factor varies yet."""
    rows, shown = [], []
    responses = with_shares(results, _SEPARATED, lambda title: f"{title}, %")
    for (factor, levels), (response, title) in product(results.factors.items(), responses.items()):
        try:
            free, seeds, pairs = (
                separation(results.runs, factor, levels, response, blocks=blocks)
                for blocks in ((), ("seed",), pair_columns(results, factor))
            )
        except InputError:  # all runs at one level: nothing to compare yet
            continue
        rows += [
            Row().keep(**{**asdict(found), "blocks": " ".join(found.blocks)}, scale=results.scale)
            for found in (free, seeds, pairs)
        ]
        in_words = partial(_in_words, response)
        words = Row(factor=FACTOR_NAMES.get(factor, factor), response=title)
        words.show("with it", span(in_words(free.lowest_with), in_words(free.highest_with)))
        words.show("without it", span(in_words(free.lowest_without), in_words(free.highest_without)))
        words.show("margin", in_words(free.margin, signed=True))
        words.show("difference of means", in_words(free.difference, signed=True))
        words.show("p", probability(free.p)).show("p, within seeds", probability(seeds.p))
        # A fraction has no pairs that differ in one factor alone.
        words.show("p, within pairs", probability(pairs.p) if pairs.num_dealings > 1 else MISSING)
        shown.append(words.show("chance of complete separation", probability(free.p_complete)))
    if not rows:
        return None
    counting = "Where there are too many permutations to count (exact = False in the CSV), random ones are drawn."
    if all(row.numbers["exact"] for row in rows):
        counting = "All permutations are counted (exact)."
    return Table.of(
        "separation",
        f"{results.name}: runs with and without each factor",
        rows,
        shown=shown,
        notes=(
            "With it: all runs at the factor's last level; without it: at its first. Margin: the smallest of the upper "
            "group minus the largest of the lower; positive is a clean gap, negative an overlap.",
            "p: two-sided permutation test of the difference of means: the labels are permuted over all runs, over the "
            "runs of a seed, and within pairs of runs that differ in this factor alone. The last holds even where "
            f"the other factors have effects. {counting}",
            "Chance of complete separation: the share of permutations over all runs that separate them completely.",
            *share_notes(results),
        ),
    )


def _in_words(response: str, value: float, *, signed: bool = False) -> str:
    return rounded(100 * value, 2, signed=signed) if response in SHARES else rounded(value, signed=signed)


_MOST_ROWS = 30
"""Of a table for people; machines get all."""


def _dissociation_tables(results: StudyResults) -> list[Table]:
    """Pairs of conditions that differ in one of accuracy and locality, and how the two correlate over runs."""
    order, key = ordered_conditions(results), key_factor(results)
    pairs = dissociations(results.runs.sort_values("condition", key=lambda labels: labels.map(order.index)))
    return [
        *([_pairs_table(results, pairs)] if len(pairs) else []),
        *([_correlation_table(results, key)] if key is not None else []),
    ]


def _pairs_table(results: StudyResults, pairs: pd.DataFrame) -> Table:
    rows = []
    for pair in records(pairs):
        row = Row().keep(**pair, accuracy_margin=ACCURACY_MARGIN, locality_margin=LOCALITY_MARGIN, scale=results.scale)
        row.show("first", pair["first"]).show("second", pair["second"]).show("seeds", str(pair["n"]))
        row.show("accuracy, points", _difference(pair, "test_acc", 100, 2))
        rows.append(row.show("min MAD", _difference(pair, "min_mad")).show("what differs", pair["kind"]))
    shown = [row for kind in (SAME_ACCURACY, SAME_LOCALITY) for row in rows if row.numbers["kind"] == kind]
    return Table.of(
        "dissociation",
        f"{results.name}: accuracy without locality, locality without accuracy",
        rows,
        shown=shown[:_MOST_ROWS],
        notes=(
            "Differences are second minus first, taken within seeds, with half the 95 % interval. Close: a mean "
            f"difference of at most {ACCURACY_MARGIN:g} in test accuracy (a fraction), of at most {LOCALITY_MARGIN:g} "
            "in min MAD. With few seeds that does not prove equality: the intervals say how far they may be apart. "
            "Different: more than that, and the interval excludes 0; with one seed there is none, and more is enough.",
            f"Pairs compared: {len(pairs)}; all of them are in the CSV file next to this one."
            + (f" Shown: the first {_MOST_ROWS} of {len(shown)}." if len(shown) > _MOST_ROWS else ""),
        ),
    )


def _difference(row: dict[str, float], response: str, scale: float = 1.0, digits: int = 3) -> str:
    mean, low, high = (row[f"{response}_{part}"] for part in ("difference", "low", "high"))
    return mean_and_ends(mean, low, high, scale=scale, digits=digits)


def _correlation_table(results: StudyResults, key: str) -> Table:
    levels = results.factors[key]
    names = ["all runs", *(level_in_words(key, levels, level) for level in levels)]
    rows, shown = [], []
    for name, found in zip(names, records(correlations(results.runs, key, levels)), strict=True):
        row = Row().keep(**found, scale=results.scale).show("runs", name).show("n", str(found["n"]))
        for kind in ("pearson", "spearman"):
            row.show(kind.capitalize(), rounded(found[kind], 2))
            row.show(f"p, {kind.capitalize()}", probability(found[f"{kind}_p"]))
        rows.append(row)
        shown += [row] if found["n"] > 2 else []
    return Table.of(
        "correlation",
        f"{results.name}: test accuracy against min MAD over runs",
        rows,
        shown=shown,
        notes=(
            "Over all runs a factor that moves both makes them correlate; within a level of "
            f"{FACTOR_NAMES.get(key, key)} what is left is not due to it. Runs of one seed are not quite independent, "
            "so the p-values are rough.",
        ),
    )
