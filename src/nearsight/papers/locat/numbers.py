"""The accuracies S2 published, as data, and the comparisons that are made in them and in our runs.

S2 is "Locality-Attending Vision Transformer" (ICLR 2026, arXiv 2603.04892). Its models are ViTs of patch 16 at 224
pixels, Tiny to Base, with one number each and no spread; ours is S1's compact ViT at 32 or 64 pixels. So what can be
compared is which way a difference goes, not how large it is. Its numbers of frozen features stand in `dense`.
Accuracies are fractions, as in all data of this package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from nearsight.report.rules import Finding, all_of
from nearsight.report.tables import rounded
from nearsight.study.statistics import Estimate, mean_interval

PAPER = "S2 (arXiv 2603.04892)"
# The conditions of the studies, in the words of their recipes.
VIT, GAUG, PRR, LOCAT = "ViT", "ViT + GAug", "ViT + PRR", "LocAt"
VIT_WITHOUT_POSITIONS, LOCAT_WITHOUT_POSITIONS, GAP = "ViT - PE", "LocAt - PE", "ViT + GAP"
LAPLACE, INVERSE = "Laplace kernel", "Inverse distance"
FROM_INPUT, ISOTROPIC = "Width from input", "Isotropic width"
FIXED = ("Fixed width 1", "Fixed width 2", "Fixed width 4")
NO_SCALE, AUTO_SCALE = "No scale", "Auto scale"
CORE = (VIT, GAUG, PRR, LOCAT)
KERNELS = (LAPLACE, INVERSE)
WIDTHS = (FROM_INPUT, ISOTROPIC, *FIXED)
SCALES = (NO_SCALE, AUTO_SCALE)
OTHER_LOCATS = (LOCAT_WITHOUT_POSITIONS, *KERNELS, *WIDTHS, *SCALES)
"""LocAt made in another way: their differences are also to LocAt."""


BACKBONES: Mapping[str, tuple[str, str]] = {
    VIT: (VIT, LOCAT),
    **{name: (name, f"{name} + LocAt") for name in ("RegViT", "RoPEViT", "Swin", "Jumbo")},
}
"""Those of Table 1: the condition without LocAt and the one with it."""


@dataclass(frozen=True)
class Contrast:
    """What is judged, both of the paper's tables and of our runs."""

    needs: tuple[str, ...]
    """The conditions that it compares."""
    of: Callable[[pd.DataFrame], "pd.Series[float]"]
    """From a column per condition to a number per row: a row is a seed, or a size of the paper's."""
    parts: tuple["Contrast", ...] = ()
    """Where several differences are claimed together, each of them."""


def above(condition: str, reference: str) -> Contrast:
    return Contrast((reference, condition), lambda values: values[condition] - values[reference])


def weakest(*parts: Contrast, sign: int = 1) -> Contrast:
    """Of differences that are all claimed to have a sign: in each row the one that has it least."""
    needs = tuple(dict.fromkeys(label for part in parts for label in part.needs))

    def of(values: pd.DataFrame) -> "pd.Series[float]":
        every = pd.concat([part.of(values) for part in parts], axis=1)
        return every.min(axis=1) if sign > 0 else every.max(axis=1)

    return Contrast(needs, of, parts)


TOGETHER = weakest(*(above(LOCAT, part) for part in (GAUG, PRR)))
"""LocAt above the better of its parts."""
EVERY_KERNEL = weakest(*(above(kernel, VIT) for kernel in (LOCAT, *KERNELS)))
"""The worst kernel above ViT."""
GAUSSIAN = weakest(*(above(LOCAT, kernel) for kernel in KERNELS))
"""The Gaussian kernel above the better of the others."""
BEST_FIXED = weakest(*(above(width, LOCAT) for width in FIXED), sign=-1)
"""The best of the fixed widths above LocAt, than which all are claimed to be worse."""
LARGER = "The paper's models are larger and see larger images"
"""Why the size of a difference is not compared."""
EACH = (
    "Several differences are claimed together, and the numbers are of the weakest one in each seed. Each difference is "
    "tested by itself, since the weakest of equal ones has the opposite sign by chance: all have to be shown (the "
    "largest p-value counts), or the opposite of one (by a p-value that counts as often as there are differences)."
)


def judge_contrast(
    contrast: Contrast, values: pd.DataFrame, judge: Callable[[Estimate], Finding], *, words: str
) -> Finding:
    """By a rule for one difference, over seeds; where several are claimed together, by this rule on each of them."""
    ours = mean_interval(contrast.of(values))
    if not contrast.parts:
        return replace(judge(ours), ours=words)
    parts = [judge(mean_interval(part.of(values))) for part in contrast.parts]
    return replace(all_of(parts, words, value=ours.value), low=ours.low, high=ours.high)


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    source: str
    dataset: str
    accuracy: Mapping[str, Mapping[str, float]]
    """Size of the model → condition → test accuracy."""

    def frame(self) -> pd.DataFrame:
        """A row per size, a column per condition: as our runs, which have a row per seed."""
        return pd.DataFrame.from_dict({size: dict(row) for size, row in self.accuracy.items()}, orient="index")

    def in_words(self, contrast: Contrast) -> str:
        """In points: "Tiny +1.55, Base +1.32"."""
        values = contrast.of(self.frame())
        return ", ".join(f"{size} {rounded(100 * value, 2, signed=True)}" for size, value in values.items())

    def has(self, *conditions: str) -> bool:
        return all(label in row for label in conditions for row in self.accuracy.values())


TABLE_3_CIFAR100 = PublishedTable(
    source="Table 3",
    dataset="CIFAR-100 at 224 pixels",
    accuracy={
        "Tiny": {VIT: 0.7384, LOCAT: 0.8043},
        "Small": {VIT: 0.7633, LOCAT: 0.8113},
        "Base": {VIT: 0.7690, LOCAT: 0.8220},
    },
)
TABLE_3_MINI_IMAGENET = PublishedTable(
    source="Table 3",
    dataset="mini-ImageNet",
    accuracy={
        "Tiny": {VIT: 0.7494, LOCAT: 0.7847},
        "Small": {VIT: 0.7898, LOCAT: 0.8430},
        "Base": {VIT: 0.7991, LOCAT: 0.8486},
    },
)
TABLE_5 = PublishedTable(
    source="Table 5",
    dataset="ImageNet-1K",
    accuracy={
        "Tiny": {
            **{VIT: 0.7239, GAUG: 0.7316, PRR: 0.7371, LOCAT: 0.7394},
            **{VIT_WITHOUT_POSITIONS: 0.6936, LOCAT_WITHOUT_POSITIONS: 0.7310, GAP: 0.7250},
        },
        "Base": {
            **{VIT: 0.8099, GAUG: 0.8200, PRR: 0.8219, LOCAT: 0.8231},
            **{VIT_WITHOUT_POSITIONS: 0.7939, LOCAT_WITHOUT_POSITIONS: 0.8217, GAP: 0.8184},
        },
    },
)
TABLE_7 = PublishedTable(
    source="Table 7",
    # Inferred: LocAt's accuracies are those of Table 3 on mini-ImageNet, and so is ViT's here.
    dataset="mini-ImageNet",
    accuracy={
        size: {
            **{label: TABLE_3_MINI_IMAGENET.accuracy[size][label] for label in (VIT, LOCAT)},
            **{FROM_INPUT: from_input, ISOTROPIC: isotropic, NO_SCALE: no_scale, AUTO_SCALE: auto_scale},
            # In the order of the table. Which widths they are of is lost, so they only serve together.
            **dict(zip(FIXED, fixed, strict=True)),
        }
        for size, from_input, isotropic, fixed, no_scale, auto_scale in (
            ("Tiny", 0.7910, 0.7871, (0.7520, 0.7641, 0.7553), 0.7626, 0.7848),
            ("Base", 0.8518, 0.8466, (0.8281, 0.8265, 0.8242), 0.8307, 0.8454),
        )
    },
)
TABLE_8 = PublishedTable(
    source="Table 8",
    dataset="ImageNet-1K",
    accuracy={
        "Tiny": {VIT: 0.7239, LOCAT: 0.7394, INVERSE: 0.7400, LAPLACE: 0.7401},
        "Base": {VIT: 0.8099, LOCAT: 0.8231, INVERSE: 0.8194, LAPLACE: 0.8224},
    },
)
TABLE_1 = PublishedTable(
    source="Table 1",
    dataset="ImageNet-1K",
    accuracy={
        size: {
            label: accuracy
            for pair, accuracies in zip(BACKBONES.values(), of_size, strict=True)
            for label, accuracy in zip(pair, accuracies, strict=True)
        }
        for size, of_size in {
            "Tiny": ((0.7239, 0.7394), (0.7290, 0.7408), (0.7360, 0.7434), (0.8118, 0.8143), (0.7871, 0.7878)),
            "Base": ((0.8099, 0.8231), (0.8071, 0.8219), (0.8216, 0.8254), (0.8341, 0.8343), (0.8442, 0.8443)),
        }.items()
    },
)
ABLATIONS = (TABLE_5, TABLE_8, TABLE_7)
"""The tables that have the conditions of the studies, each in at most one, together with ViT and LocAt."""
