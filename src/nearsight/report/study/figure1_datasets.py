"""Figure 1 as the paper has it: one panel per data set (S1, Figure 1)."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.report.figures.style import DISTANCE_LABEL, house_style, light_grid
from nearsight.report.study.conditions import num_seeds
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.figure1_profiles import add_layer_legend, draw_layer, extreme_layers, profile
from nearsight.report.study.notes import add_footnote, scale_notes, seeds_in_words
from nearsight.report.study.paper import BASELINE, MODERN, PUBLISHED
from nearsight.study.results import StudyResults

DATASETS: Mapping[str, tuple[str, ...]] = {
    name: (f"protocol-{name}", f"ablation-{name}") for name in ("cifar10", "cifar100", "tiny-imagenet")
}
"""Data set → the studies that have both protocols on it; the first that was run is shown."""
LABELS = (MODERN, BASELINE)


def profiles_of_datasets(studies: Mapping[str, StudyResults]) -> Drawing:
    """The distances of each layer's heads, from the lowest to the highest, on every data set that has results."""
    shown: dict[str, StudyResults] = {}
    for names in DATASETS.values():
        for name in names:
            if name in studies and {*LABELS} <= set(studies[name].runs["condition"]):
                shown.setdefault(PUBLISHED[name].dataset, studies[name])
    if not shown:
        raise InputError("no data set has a run of both protocols yet")
    one_seed = max(num_seeds(results, label) for results in shown.values() for label in LABELS) == 1
    with house_style():
        figure = Figure(figsize=(1.2 + 2.4 * max(len(shown), 2), 3.6), layout=ConstrainedLayoutEngine(wspace=0.05))
        panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (dataset, results) in zip(panels, shown.items(), strict=True):
            layers = extreme_layers(results)
            for index, label in enumerate(LABELS):
                numbers = profile(results, label, "mad", over_images=one_seed)
                for layer in layers:
                    draw_layer(panel, numbers[numbers["layer"] == layer], index, layers, f"{dataset}-{label}-{layer}")
            light_grid(panel)
            panel.set_title(dataset)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            panel.set_xlabel("heads of a layer, by distance")
        panels[0].set_ylim(bottom=-0.01)  # markers near 0 are whole
        panels[0].set_ylabel(DISTANCE_LABEL)
        add_layer_legend(figure, LABELS, layers)
    seeds = seeds_in_words(num_seeds(results, label) for results in shown.values() for label in LABELS)
    bands = "± one standard deviation over images" if one_seed else "the range over seeds"
    told = f"Lines: {seeds}; bands: {bands}."
    add_footnote(figure, [told, *dict.fromkeys(note for results in shown.values() for note in scale_notes(results))])
    return Drawing(
        figure=figure,
        caption=f"Mean attention distance of the heads of the first and last layers of {' and '.join(LABELS)} on "
        f"{', '.join(shown)}, sorted within their layer (S1, Figure 1). {told}",
    )
