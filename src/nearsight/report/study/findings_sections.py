"""The sections of the findings: which answers stand there, beside which figure, and what would overturn them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nearsight.metrics import least_share_on_itself, next_patch_distance
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.figure1_datasets import profiles_of_datasets
from nearsight.report.study.own_patch.table import what_they_look_at
from nearsight.report.study.paper import PUBLISHED, SIDE, WITH_CUTMIX
from nearsight.report.study.table import rounded
from nearsight.report.study.unreported.effects import PAPERS_BOUND, what_moves_it
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


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    """The question."""
    claim: str
    """What is at stake, and who says so."""
    answers: Mapping[str, tuple[str, ...]]
    """Study → the ids of its claims that are shown."""
    in_short: tuple[str, ...]
    """Those of them that decide the question, for the summary."""
    hinges_on: tuple[str, ...] = ()
    """Studies one of which must have results for the question to be answered at all; by default any of them."""
    figures: tuple[tuple[str, str], ...] = ()
    """Study and file name of its figures."""
    draw: tuple[str, Callable[[Mapping[str, StudyResults]], Drawing]] | None = None
    """Name and function of a figure of several studies, where none of them has it."""
    words: Mapping[str, Callable[[StudyResults], str]] = field(default_factory=dict)
    """Study → a sentence with numbers."""
    change_our_mind: str


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
