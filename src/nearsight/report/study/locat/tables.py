"""What the conditions of the LocAt studies gave, per model and per layer, and how far they are from ViT and LocAt."""

from collections.abc import Callable, Collection
from dataclasses import asdict

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.conditions import num_seeds, ordered_conditions
from nearsight.report.study.locat import paper as s2
from nearsight.report.study.locat.measures import (
    OF_LAYERS,
    Measure,
    interval_of,
    layer_measures,
    measures_of,
    run_measures,
)
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.shares import share_notes
from nearsight.report.study.table import MISSING, Table, rounded
from nearsight.report.study.tables_conditions import INTERVALS
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval, paired_difference

WHAT_IS_MEASURED = (
    "MAD and entropy: over all heads of a run. Locality score: the mean cosine similarity of a patch token and its "
    "neighbours; patch–CLS similarity: that of the patch tokens and CLS (S2 App. F); both of what the blocks give, "
    "over all layers."
)
PAPERS = "paper's accuracy, points"


def locality_table(results: StudyResults) -> Table:
    """A row per condition: accuracy, where its heads look, what its tokens are like."""
    runs, measures = run_measures(results), measures_of(results)
    rows, shown = [], []
    for label in ordered_conditions(results):
        ours = {column: interval_of(runs, label, column) for column in measures}
        counted: dict[str, object] = {"condition": label, "seeds": num_seeds(results, label)}
        rows.append({**counted, "scale": results.scale, **_flat(ours)})
        cells = {_unit(measure): measure.told(ours[column]) for column, measure in measures.items()}
        shown.append({**counted, **cells})
    return Table(
        name="locality",
        title=f"{results.name}: accuracy and locality",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).astype(str),
        notes=(INTERVALS, WHAT_IS_MEASURED, *share_notes(results), *missing_notes(results)),
    )


def _unit(measure: Measure) -> str:
    return f"{measure.title}, %" if measure.is_share else measure.title


def _flat(ours: dict[str, MeanInterval]) -> dict[str, float]:
    """A column per measure and part of its interval."""
    return {f"{column}_{part}": value for column, interval in ours.items() for part, value in asdict(interval).items()}


def layers_table(results: StudyResults) -> Table:
    """Every layer in the numbers; the first, a middle and the last one for people."""
    layers = layer_measures(results)
    numbers = sorted({int(layer) for layer in layers["layer"]})
    if not numbers:
        raise InputError("no run has a measured layer")
    picked = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    rows, shown = [], []
    for column, measure in OF_LAYERS.items():
        for label in ordered_conditions(results):
            here = layers[layers["condition"] == label]
            ours = {layer: mean_interval(here.loc[here["layer"] == layer, column].dropna()) for layer in numbers}
            named = {"measure": column, "condition": label, "scale": results.scale}
            rows += [{**named, "layer": layer, **asdict(interval)} for layer, interval in ours.items()]
            cells = {f"L{layer + 1}": measure.told(ours[layer]) for layer in picked}
            shown.append({"measure": measure.title, "condition": label, **cells})
    return Table(
        name="layers",
        title=f"{results.name}: layer by layer",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(
            INTERVALS,
            "MAD and entropy: over the layer's heads. Locality score and patch–CLS similarity: of the tokens that the "
            "layer's block gives (S2 App. F).",
            "All layers are in the CSV file beside this one.",
        ),
    )


def differences_to(reference: str, *, of: Collection[str] | None = None) -> Callable[[StudyResults], Table]:
    """A table of what conditions change, seed by seed: of all of them, or `of` some."""

    def table(results: StudyResults) -> Table:
        known = ordered_conditions(results)
        others = [label for label in known if label != reference and (of is None or label in of)]
        if reference not in known or not others:
            raise InputError(f"it compares conditions with {reference}, and one of the two has no run yet")
        runs, measures = run_measures(results), measures_of(results)
        rows, shown = [], []
        for label in others:
            ours = {column: paired_difference(runs, label, reference, column) for column in measures}
            paper, by_size = published_difference(label, reference)
            counted: dict[str, object] = {"condition": label, "seeds": ours["test_acc"].n}
            theirs = {f"paper_{size}": value for size, value in by_size.items()}
            rows.append({**counted, "reference": reference, "scale": results.scale, **_flat(ours), **theirs})
            cells = {_change(measure): measure.told(ours[column], signed=True) for column, measure in measures.items()}
            shown.append(counted | cells | {PAPERS: paper})
        frame = pd.DataFrame(shown).astype(str)
        has_paper = bool((frame[PAPERS] != MISSING).any())
        notes = [
            f"Condition minus {reference}, taken within seeds. {INTERVALS}",
            WHAT_IS_MEASURED,
            *share_notes(results),
        ]
        if has_paper:
            notes.append(
                "The paper's differences of accuracy (S2 Tables 5, 7 and 8) are of larger models at 224 pixels: their "
                "sign can be compared, their size cannot."
            )
        return Table(
            name=f"differences-to-{reference.lower()}",
            title=f"{results.name}: what each condition changes in {reference}",
            numbers=pd.DataFrame(rows),
            shown=frame if has_paper else frame.drop(columns=PAPERS),
            notes=tuple(notes),
        )

    return table


def _change(measure: Measure) -> str:
    return f"{measure.title}, points" if measure.is_share else measure.title


def published_difference(condition: str, reference: str) -> tuple[str, dict[str, float]]:
    """The paper's difference of accuracy in words, and by the size of the model; none where it has no such pair."""
    for table in s2.ABLATIONS:
        # Of the fixed widths it is lost which is which.
        if table.has(condition, reference) and condition not in s2.FIXED:
            frame = table.frame()
            found = {str(size): float(value) for size, value in (frame[condition] - frame[reference]).items()}
            words = ", ".join(f"{size} {rounded(100 * value, 2, signed=True)}" for size, value in found.items())
            return f"{words} ({table.dataset})", found
    return MISSING, {}
