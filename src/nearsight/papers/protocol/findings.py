"""The sections of the findings: which answers stand there, beside which figure, and what would overturn them."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.metrics import least_share_on_itself, next_patch_distance
from nearsight.papers.protocol.numbers import BASELINE, MODERN, PUBLISHED, SIDE, WITH_CUTMIX
from nearsight.papers.protocol.own_patch import what_they_look_at
from nearsight.papers.protocol.unreported import PAPERS_BOUND, what_moves_it
from nearsight.report.conditions import num_seeds, scale_notes
from nearsight.report.figures.style import DISTANCE_LABEL, house_style, light_grid
from nearsight.report.findings import Findings, Section
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.study_figures import add_layer_legend, draw_layer, extreme_layers, profile
from nearsight.report.tables import rounded, seeds_in_words
from nearsight.study.results import StudyResults

ALL: tuple[str, ...] = ()
"""Every claim of a study."""
_PARTS_OF_MODERN = ("adding-cutmix", "removing-cutmix", "colour-alone", "smoothing-alone", "dissociation")
_OWN_PATCH = ("own-patch-heads", "others-separated", "others-more-local")
_LONGER = ("longer-with-cutmix", "longer-without-cutmix")
_EQUALLY_LONG = ("only-with-cutmix", "equally-many-epochs")
_OF_APPEARING = ("first-local-head", "accuracy-leads", "turns-global", "turns-to-own-patch")
_OF_PROTOCOLS = ("accuracy", "most-local-head", "early-layers")


def _of_the_papers_heads() -> str:
    published = PUBLISHED["ablation-cifar100"].conditions
    distances = [distance for label in WITH_CUTMIX if (distance := published[label].min_mad) is not None]
    grid = (SIDE, SIDE)
    shares = [100 * least_share_on_itself(distance, grid) for distance in (max(distances), min(distances))]
    return (
        f"S1's models with CutMix have their most local head at {rounded(min(distances))} to {rounded(max(distances))} "
        f"and call it local. On its grid of {SIDE} × {SIDE} the next patch is at {rounded(next_patch_distance(grid))}, "
        f"so that these distances leave at least {shares[0]:.0f} to {shares[1]:.0f} % of the attention to the patch "
        "itself: such a head mixes little, and says nothing about the others."
    )


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


SECTIONS = (
    Section(
        title="Is it CutMix?",
        claim="S1 trains a small ViT on CIFAR-100 under eight protocols, once each, and finds that attention becomes "
        "local in the four that have CutMix and in no other.",
        answers={"ablation-cifar100": ("cutmix-separates", *_PARTS_OF_MODERN)},
        in_short=("cutmix-separates", "adding-cutmix"),
        figures=(("ablation-cifar100", "figure-4-minimum-mad.png"),),
        change_our_mind="More seeds that part those with CutMix from those without as cleanly as in the paper, or in "
        "which the two cannot be told apart at all. What other settings do, and equally long training, is asked below.",
    ),
    Section(
        title="Which settings give the paper's numbers?",
        claim=f"In S1 every model with CutMix has a head with a distance of {rounded(PAPERS_BOUND)} or less. How near "
        "heads come may hang on what S1 does not report: learning rate, weight decay, initialisation, CutMix's "
        "probability.",
        answers={"unreported-cifar100": ALL},
        in_short=("reached",),
        figures=(("unreported-cifar100", "settings-beside-the-paper.png"),),
        words={"unreported-cifar100": what_moves_it},
        change_our_mind="The authors' settings, or a setting outside these levels that brings accuracies and distances "
        "to theirs at once.",
    ),
    Section(
        title="And with CutMix in every batch?",
        claim="S1 does not say how often it mixes, and we took half of the batches. Of the settings above, CutMix in "
        "every batch comes nearest to the paper's numbers, so Table 2 is run again with it.",
        answers={
            "ablation-fitted-cifar100": (
                "cutmix-separates",
                "accuracy",
                "most-local-head",
                "own-region",
                *_PARTS_OF_MODERN,
            )
        },
        in_short=("cutmix-separates", "most-local-head"),
        figures=(("ablation-fitted-cifar100", "figure-4-minimum-mad.png"),),
        change_our_mind="Seeds in which the two groups overlap, or runs without CutMix that become as local when they "
        "are trained for as long as those with it: these are below (*Does it take long training?*).",
    ),
    Section(
        title="What does the most local head look at?",
        claim=_of_the_papers_heads(),
        answers={"ablation-fitted-cifar100": _OWN_PATCH},
        in_short=_OWN_PATCH,
        figures=(("ablation-fitted-cifar100", "own-patch.png"),),
        words={"ablation-fitted-cifar100": what_they_look_at},
        change_our_mind="Runs in which many heads, not one, come as near as in the paper; or longer ones in which the "
        "others follow the one.",
    ),
    Section(
        title="Does it take long training?",
        claim="S1 ends every run by early stopping and does not say when. In ours that moment differs widely from run "
        "to run, and those with CutMix train several times as long: it takes runs of equal length to tell the two "
        "apart.",
        answers={
            "ablation-cifar100": _LONGER,
            # Those without CutMix are the same runs in both ablations.
            "ablation-fitted-cifar100": _LONGER[:1],
            "emergence-fitted-cifar100": _EQUALLY_LONG,
        },
        in_short=(*_LONGER, *_EQUALLY_LONG),
        hinges_on=("ablation-cifar100", "ablation-fitted-cifar100"),
        figures=(
            ("ablation-fitted-cifar100", "training-length.png"),
            ("emergence-fitted-cifar100", "emergence-course.png"),
        ),
        change_our_mind="Runs without CutMix that become local after more epochs than these, or under another schedule "
        "of the learning rate.",
    ),
    Section(
        title="On other data sets?",
        claim="S1 shows that the Modern protocol makes early layers local on three data sets, and takes it apart on "
        "one. It asks for the others.",
        answers={
            "protocol-cifar10": _OF_PROTOCOLS,
            "protocol-cifar100": ("accuracy", "most-local-head"),
            "protocol-tiny-imagenet": _OF_PROTOCOLS,
            "ablation-cifar10": ("cutmix-separates", "colour-alone", "smoothing-alone"),
            "ablation-tiny-imagenet": ("cutmix-separates", "colour-alone", "smoothing-alone"),
        },
        in_short=("most-local-head", "cutmix-separates"),
        hinges_on=("protocol-cifar10", "protocol-tiny-imagenet", "ablation-cifar10", "ablation-tiny-imagenet"),
        draw=("findings-datasets", profiles_of_datasets),
        change_our_mind="A data set on which CutMix leaves attention as global as it was, at the same number of seeds.",
    ),
    Section(
        title="Is it the cut, the mix, or the label?",
        claim="S1 explains CutMix by the need to classify from a part of the image, and leaves open whether the "
        "rectangular cut or the mixing of images does it.",
        answers={"mixing-cifar100": ALL},
        in_short=("the cut", "the other image", "its label", "the mix without a cut"),
        figures=(("mixing-cifar100", "mixing-contrasts.png"),),
        change_our_mind="More seeds that move a contrast across a bound of the rule, or the same contrasts turning out "
        "otherwise on another data set, or in runs so long that CutMix does all that it can.",
    ),
    Section(
        title="When do heads become local?",
        claim="S1 looks at trained models only, and asks at which epoch the pattern appears.",
        answers={"emergence-cifar100": ALL, "emergence-fitted-cifar100": _OF_APPEARING},
        in_short=("first-local-head", "accuracy-leads"),
        figures=(
            ("emergence-cifar100", "emergence-course.png"),
            ("emergence-fitted-cifar100", "emergence-layers-by-epoch.png"),
            ("emergence-fitted-cifar100", "emergence-heads.gif"),
        ),
        change_our_mind="Another schedule under which locality comes first, or seeds whose local heads do not last.",
    ),
    Section(
        title="Does a larger model need more data, or more CutMix?",
        claim="Raghu et al. (2021) found that large ViTs do not learn to attend locally without very much data. S1 "
        "trains one size.",
        answers={"size-cifar100": ALL},
        in_short=(
            "width doubled, without CutMix, all images",
            "CutMix in every batch rather than in half, at twice the width",
        ),
        figures=(("size-cifar100", "distance-by-size.png"),),
        change_our_mind="Larger models than these, or more seeds, that turn the sign of an interaction.",
    ),
)


TITLE = "# Findings: what the protocol study left open"
ABOUT = (
    "What S1 (*Inducing Spatial Locality in Vision Transformers through the Training Protocol*, arXiv 2605.16390) "
    "claims and what it leaves open, put to the test with seeds and intervals. Every number on this page is computed "
    "from the tables under `results/`, every verdict by a rule that the study's `verdict.md` states; what was tried "
    "besides, failures included, is in the [log](log.md). MAD is the mean attention distance of a head, as a fraction "
    "of the grid's diagonal; ± is half a 95 % interval."
)


def write_findings(results: Path, page: Path) -> tuple[Path, ...]:
    """Write the page, and beside it, in images/, the figures that no study has alone; the files written."""
    return FINDINGS.write(results, page)


FINDINGS = Findings(title=TITLE, about=ABOUT, sections=SECTIONS)
