"""The numbers the paper published, as data, to compare with ours.

S1 is "Inducing Spatial Locality in Vision Transformers through the Training Protocol" (arXiv 2605.16390). Every one of
its numbers comes from a single seed. Accuracies are fractions here, as in all data of this package.
"""

from collections.abc import Mapping
from functools import partial

from nearsight.report.studies import Published, PublishedCondition

PAPER = "S1 (arXiv 2605.16390)"
SIDE = 8
"""Patches along a side of its grid, on every data set."""

BASELINE = "Baseline"
MODERN = "Modern"
CUTMIX, AUTOAUGMENT, COLORJITTER, SMOOTHING = "CutMix", "AutoAugment", "ColorJitter", "LabelSmoothing"


def only(part: str) -> str:
    """Baseline with one part of Modern, as the paper and our studies call it."""
    return f"+{part}"


def without(part: str) -> str:
    """Modern without one part."""
    return f"−{part}"


ONLY_CUTMIX, ONLY_AUTOAUGMENT, ONLY_SMOOTHING = only(CUTMIX), only(AUTOAUGMENT), only(SMOOTHING)
WITHOUT_CUTMIX, WITHOUT_AUTOAUGMENT, WITHOUT_SMOOTHING = without(CUTMIX), without(AUTOAUGMENT), without(SMOOTHING)


def with_cutmix(colour: str = AUTOAUGMENT) -> tuple[str, ...]:
    """The four conditions of an ablation that have CutMix; `colour` is what the data set has for AutoAugment."""
    return (MODERN, without(colour), WITHOUT_SMOOTHING, ONLY_CUTMIX)


def without_cutmix(colour: str = AUTOAUGMENT) -> tuple[str, ...]:
    """The other four."""
    return (BASELINE, WITHOUT_CUTMIX, only(colour), ONLY_SMOOTHING)


WITH_CUTMIX = with_cutmix()


_published = partial(
    Published,
    source_of_gain="S1 Table 1",
    beside_figures={
        "figure-1-profiles": "In the paper's Figure 1 a line is one seed and its band the spread over images.",
        "figure-2-plane": "The paper's Figure 2 shows one seed.",
        "figure-3-heatmaps": "The paper's Figure 3 shows one seed.",
        "figure-5-key-conditions": "The paper's Figure 5 shows one seed.",
    },
)


def _row(test_acc: float, mad: tuple[float, float], entropy: tuple[float, float]) -> PublishedCondition:
    return PublishedCondition(
        test_acc=test_acc, min_mad=mad[0], max_mad=mad[1], min_entropy=entropy[0], max_entropy=entropy[1]
    )


_TABLE_2 = {
    BASELINE: _row(0.4853, (0.316, 0.588), (0.551, 0.958)),
    MODERN: _row(0.6338, (0.008, 0.482), (0.047, 0.975)),
    WITHOUT_CUTMIX: _row(0.5560, (0.210, 0.449), (0.644, 0.967)),
    WITHOUT_AUTOAUGMENT: _row(0.5511, (0.024, 0.492), (0.106, 0.953)),
    WITHOUT_SMOOTHING: _row(0.6034, (0.009, 0.481), (0.054, 0.959)),
    ONLY_CUTMIX: _row(0.5512, (0.021, 0.427), (0.096, 0.941)),
    ONLY_AUTOAUGMENT: _row(0.5522, (0.254, 0.436), (0.763, 0.986)),
    ONLY_SMOOTHING: _row(0.4919, (0.315, 0.463), (0.635, 0.948)),
}


_BOTH = (BASELINE, MODERN)


def _table_1(dataset: str, *accuracies: float, key_factor: str | None = None) -> Published:
    rows = {label: PublishedCondition(test_acc=acc) for label, acc in zip(_BOTH, accuracies, strict=True)}
    return _published(source="S1 Table 1", dataset=dataset, conditions=rows, key_factor=key_factor)


_CIFAR10, _TINY_IMAGENET = ("CIFAR-10", 0.7846, 0.8484), ("Tiny-ImageNet", 0.3489, 0.4192)
_ABLATION = _published(source="S1 Table 2", dataset="CIFAR-100", conditions=_TABLE_2, key_factor="cutmix")

PUBLISHED: Mapping[str, Published] = {
    "ablation-cifar100": _ABLATION,
    "ablation-fitted-cifar100": _ABLATION,
    # The paper has no ablation on these, but two of the eight conditions.
    "ablation-cifar10": _table_1(*_CIFAR10, key_factor="cutmix"),
    "ablation-tiny-imagenet": _table_1(*_TINY_IMAGENET, key_factor="cutmix"),
    "protocol-cifar10": _table_1(*_CIFAR10),
    "protocol-cifar100": _published(
        source="S1 Tables 1 and 2", dataset="CIFAR-100", conditions={label: _TABLE_2[label] for label in _BOTH}
    ),
    "protocol-tiny-imagenet": _table_1(*_TINY_IMAGENET),
}
"""By the name of the study."""
