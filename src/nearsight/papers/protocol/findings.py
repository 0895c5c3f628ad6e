"""The page of findings: what S1 claims and left open, question by question, as the studies answer it."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.papers.protocol import ablation, emergence, links, mixing, own_patch, size, unreported
from nearsight.papers.protocol.numbers import BASELINE, MODERN, PUBLISHED
from nearsight.report.conditions import num_seeds, scale_notes
from nearsight.report.figures.style import DISTANCE_LABEL, house_style, light_grid
from nearsight.report.findings import Findings, Section
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.study_figures import add_layer_legend, draw_layer, extreme_layers, profile
from nearsight.report.tables import seeds_in_words
from nearsight.study.results import StudyResults

_DATASETS: Mapping[str, tuple[str, ...]] = {
    name: (f"protocol-{name}", f"ablation-{name}") for name in ("cifar10", "cifar100", "tiny-imagenet")
}
"""Data set → the studies that have both protocols on it; the first that was run is shown."""
_LABELS = (MODERN, BASELINE)


def profiles_of_datasets(studies: Mapping[str, StudyResults]) -> Drawing:
    """The distances of each layer's heads, from the lowest to the highest, on every data set that has results."""
    shown: dict[str, StudyResults] = {}
    for names in _DATASETS.values():
        for name in names:
            if name in studies and {*_LABELS} <= set(studies[name].runs["condition"]):
                shown.setdefault(PUBLISHED[name].dataset, studies[name])
    if not shown:
        raise InputError("no data set has a run of both protocols yet")
    one_seed = max(num_seeds(results, label) for results in shown.values() for label in _LABELS) == 1
    with house_style():
        figure = Figure(figsize=(1.2 + 2.4 * max(len(shown), 2), 3.6), layout=ConstrainedLayoutEngine(wspace=0.05))
        panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (dataset, results) in zip(panels, shown.items(), strict=True):
            layers = extreme_layers(results)
            for index, label in enumerate(_LABELS):
                numbers = profile(results, label, "mad", over_images=one_seed)
                for layer in layers:
                    draw_layer(panel, numbers[numbers["layer"] == layer], index, layers, f"{dataset}-{label}-{layer}")
            light_grid(panel)
            panel.set_title(dataset)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            panel.set_xlabel("heads of a layer, by distance")
        panels[0].set_ylim(bottom=-0.01)  # markers near 0 are whole
        panels[0].set_ylabel(DISTANCE_LABEL)
        add_layer_legend(figure, _LABELS, layers)
    seeds = seeds_in_words(num_seeds(results, label) for results in shown.values() for label in _LABELS)
    bands = "± one standard deviation over images" if one_seed else "the range over seeds"
    words = f"Lines: {seeds}; bands: {bands}."
    add_footnote(figure, [words, *dict.fromkeys(note for results in shown.values() for note in scale_notes(results))])
    return Drawing(
        figure=figure,
        caption=f"Mean attention distance of the heads of the first and last layers of {' and '.join(_LABELS)} on "
        f"{', '.join(shown)}, sorted within their layer (S1, Figure 1). {words}",
    )


_OF_PROTOCOLS = ("accuracy", "most-local-head", "early-layers")
_OF_ABLATIONS = ("cutmix-separates", "colour-alone", "smoothing-alone")
_ON_OTHER_DATA_SETS = Section(
    title="On other data sets?",
    claim="S1 shows that the Modern protocol makes early layers local on three data sets, and takes it apart on one. "
    "It asks for the others.",
    answers={
        "protocol-cifar10": _OF_PROTOCOLS,
        "protocol-cifar100": ("accuracy", "most-local-head"),
        "protocol-tiny-imagenet": _OF_PROTOCOLS,
        "ablation-cifar10": _OF_ABLATIONS,
        "ablation-tiny-imagenet": _OF_ABLATIONS,
    },
    in_short=("most-local-head", "cutmix-separates"),
    hinges_on=("protocol-cifar10", "protocol-tiny-imagenet", "ablation-cifar10", "ablation-tiny-imagenet"),
    draw=("findings-datasets", profiles_of_datasets),
    change_our_mind="A data set on which CutMix leaves attention as global as it was, at the same number of seeds.",
)

FINDINGS = Findings(
    title="# Findings: what the protocol study left open",
    about="What S1 (*Inducing Spatial Locality in Vision Transformers through the Training Protocol*, arXiv "
    "2605.16390) claims and what it leaves open, put to the test with seeds and intervals. Every number on this page "
    "is computed from the tables under `results/`, every verdict by a rule that the study's `verdict.md` states. "
    "*Asked* says whether a question was planned before the runs or asked afterwards, as the study's `plan.json` has "
    "it. What was tried besides, failures included, is in the [log](log.md). MAD is the mean attention distance of a "
    "head, as a fraction of the grid's diagonal; ± is half a 95 % interval.",
    sections=(
        ablation.FINDING,
        unreported.FINDING,
        ablation.FITTED_FINDING,
        own_patch.FINDING,
        links.LENGTH_FINDING,
        _ON_OTHER_DATA_SETS,
        mixing.FINDING,
        emergence.FINDING,
        size.FINDING,
    ),
)


def write_findings(results: Path, page: Path) -> tuple[Path, ...]:
    """Write the page and, next to it in images/, the figures that no study has alone; the files written."""
    return FINDINGS.write(results, page)
