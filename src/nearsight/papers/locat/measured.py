"""What the conditions of the LocAt studies gave: per model, per layer, and how far they are from ViT and from LocAt."""

from collections.abc import Callable, Collection, Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.papers.locat import numbers as s2
from nearsight.report.conditions import missing_notes, num_seeds, ordered_conditions, scale_notes
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import house_style, light_grid
from nearsight.report.marks import FEWEST, Drawing, add_footnote, dots_and_bars, draw_seeds, legend_above
from nearsight.report.responses import OF_LAYERS, interval_of, layer_measures, measures_of, run_measures, share_notes
from nearsight.report.study_tables import INTERVALS
from nearsight.report.tables import MISSING, Row, Table, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import paired_difference

_WHAT_IS_MEASURED = (
    "MAD and entropy: over all heads of a run. Locality score: the mean cosine similarity of a patch token and its "
    "neighbours; patch–CLS similarity: that of the patch tokens and CLS (S2 App. F); both of what the blocks give, "
    "over all layers."
)


def locality_table(results: StudyResults) -> Table:
    """A row per condition: accuracy, where its heads look, what its tokens are like."""
    runs, measures, rows = run_measures(results), measures_of(results), []
    for label in ordered_conditions(results):
        row = Row(condition=label, seeds=num_seeds(results, label)).keep(scale=results.scale)
        for column, measure in measures.items():
            measure.put(row, column, interval_of(runs, label, column))
        rows.append(row)
    notes = (INTERVALS, _WHAT_IS_MEASURED, *share_notes(results), *missing_notes(results))
    return Table.of("locality", f"{results.name}: accuracy and locality", rows, notes=notes)


def layers_table(results: StudyResults) -> Table:
    """Every layer in the numbers; the first, a middle and the last one for people."""
    layers = layer_measures(results)
    numbers = sorted({int(layer) for layer in layers["layer"]})
    if not numbers:
        raise InputError("no run has a measured layer")
    picked = {numbers[0], numbers[len(numbers) // 2], numbers[-1]}
    rows, shown = [], []
    for column, measure in OF_LAYERS.items():
        for label in ordered_conditions(results):
            words = Row(measure=measure.title, condition=label)
            for layer in numbers:
                ours = interval_of(layers[layers["layer"] == layer], label, column)
                named = {"measure": column, "condition": label, "scale": results.scale, "layer": layer}
                rows.append(Row().keep(**named, **ours.as_mean()))
                if layer in picked:
                    words.show(f"L{layer}", measure.in_words(ours))
            shown.append(words)
    notes = (
        INTERVALS,
        "MAD and entropy: over the layer's heads. Locality score and patch–CLS similarity: of the tokens that the "
        "layer's block gives (S2 App. F).",
        "Layers count from 0; all of them are in the CSV file next to this one.",
    )
    return Table.of("layers", f"{results.name}: layer by layer", rows, shown=shown, notes=notes)


def differences_to(reference: str, *, of: Collection[str] | None = None) -> Callable[[StudyResults], Table]:
    """A table of what conditions change, seed by seed: of all of them, or `of` some."""

    def table(results: StudyResults) -> Table:
        known = ordered_conditions(results)
        others = [label for label in known if label != reference and (of is None or label in of)]
        if reference not in known or not others:
            raise InputError(f"it compares conditions with {reference}, and one of the two has no run yet")
        runs, measures, rows = run_measures(results), measures_of(results), []
        papers = {label: _published_difference(label, reference) for label in others}
        has_paper = any(by_size for _, by_size in papers.values())
        for label, (words, by_size) in papers.items():
            ours = {column: paired_difference(runs, label, reference, column) for column in measures}
            row = Row(condition=label, seeds=ours["test_acc"].n).keep(reference=reference, scale=results.scale)
            for column, measure in measures.items():
                measure.put(row, column, ours[column], unit="points", signed=True)
            row.keep(**{f"paper_{size}": value for size, value in by_size.items()})
            rows.append(row.show("paper's accuracy, points", words) if has_paper else row)
        notes = [
            f"Condition minus {reference}, taken within seeds. {INTERVALS}",
            _WHAT_IS_MEASURED,
            *share_notes(results),
        ]
        if has_paper:
            notes.append(
                "The paper's differences of accuracy (S2 Tables 5, 7 and 8) are of larger models at 224 pixels: their "
                "sign can be compared, their size cannot."
            )
        title = f"{results.name}: what each condition changes in {reference}"
        return Table.of(f"differences-to-{reference.lower()}", title, rows, notes=notes)

    return table


def _published_difference(condition: str, reference: str) -> tuple[str, Mapping[str, float]]:
    """The paper's difference of accuracy in words, and by the size of the model; none where it has no such pair."""
    contrast = s2.above(condition, reference)
    for table in s2.ABLATIONS:
        # Of the fixed widths it is lost which is which.
        if table.has(condition, reference) and condition not in s2.FIXED:
            found = {str(size): float(value) for size, value in contrast.of(table.frame()).items()}
            return f"{table.in_words(contrast)} ({table.dataset})", found
    return MISSING, {}


_PANELS = {
    "mean_mad": "mean MAD of the heads",
    "min_mad": "MAD of the most local head",
    "locality_score": "locality score",
    "patch_cls_similarity": "patch–CLS similarity",
}


def layer_profiles(conditions: Mapping[str, str]) -> Callable[[StudyResults], Drawing]:
    """A figure of these conditions, layer by layer (S2, Figure 5): label → its name in the legend."""
    styles = looks(list(conditions.values()))
    lines = {label: styles[name].look_with(linewidth=1.5, markersize=5) for label, name in conditions.items()}

    def draw(results: StudyResults) -> Drawing:
        present = [label for label in conditions if label in ordered_conditions(results)]
        if not present:
            raise InputError(f"it shows {', '.join(conditions)}, and none of them has a run yet")
        layers = layer_measures(results)
        with house_style():
            figure = Figure(figsize=(7.2, 5.4), layout="constrained")
            panels = figure.subplots(2, 2, sharex=True)
            for panel, (column, title) in zip(panels.flat, _PANELS.items(), strict=True):
                for label in present:
                    here = layers[layers["condition"] == label].groupby("layer")[column]
                    numbers, colour = here.agg(["mean", "min", "max", list]).dropna(), lines[label]["color"]
                    place = numbers.index
                    draw_seeds(panel, place, numbers["list"], colour, f"seeds-{column}-{label}")
                    if num_seeds(results, label) >= FEWEST:
                        panel.fill_between(place, numbers["min"], numbers["max"], color=colour, alpha=0.18, linewidth=0)
                    panel.plot(place, numbers["mean"], **lines[label], gid=f"{column}-{label}")
                panel.set_title(title)
                panel.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
                light_grid(panel)
            for panel in panels[-1]:
                panel.set_xlabel("layer (from 0)")
            legend_above(figure, {conditions[label]: lines[label] for label in present})
        counts = [num_seeds(results, label) for label in present]
        words = "Lines: 1 seed."
        if max(counts) > 1:
            words = f"Lines: mean over {seeds_in_words(counts)}{dots_and_bars(counts, 'bands: their range')}."
        add_footnote(figure, [words, *missing_notes(results), *scale_notes(results)])
        return Drawing(
            with_round_places=True,
            figure=figure,
            caption="Layer by layer: mean attention distance of the layer's heads and of its most local one, in "
            "fractions of the grid's diagonal (top); mean cosine similarity of the patch tokens with their neighbours "
            f"and with CLS, as the layer's block gives them (bottom; S2 Figure 5). {words} Without PRR the classifier "
            "reads CLS alone, so what the patches of the last layer attend to does not reach the loss.",
        )

    return draw
