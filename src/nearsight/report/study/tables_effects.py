"""Main effects and interactions of the factors on accuracy, distance and entropy, for the model and per layer."""

from collections.abc import Mapping
from itertools import product

import pandas as pd

from nearsight.report.study.conditions import FACTOR_NAMES
from nearsight.report.study.shares import SHARES, share_notes, with_shares
from nearsight.report.study.table import MISSING, Table, mean_and_ends, probability, records
from nearsight.study.fractions import FRACTION
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Effects, factorial_effects, layer_responses

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
        numbers=_numbers(results, {(name, None): effects for name, effects in fitted.items()}),
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
        numbers=_numbers(results, fitted),
        shown=pd.DataFrame(shown).fillna(MISSING),
        notes=(
            METHOD,
            *_aliases(results),
            "Mean and min are over the layer's heads. Interactions and p-values are in the CSV file beside this one.",
            *_what_is_left_out(next(iter(fitted.values()))),
        ),
    )


def _numbers(results: StudyResults, fitted: Mapping[tuple[str, int | None], Effects]) -> pd.DataFrame:
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
