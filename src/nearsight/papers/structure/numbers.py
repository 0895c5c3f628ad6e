"""What S3 published about real images, as data, to stand beside ours.

S3 is "Vision Transformers provably learn spatial structure" (NeurIPS 2022, arXiv 2210.09221). Its numbers are read off
its figures, and how it trained is not known; ours train for few epochs. So what can be compared is which way a
difference goes. Accuracies are fractions, as in all data of this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PAPER = "S3 (arXiv 2210.09221)"
SHUFFLED, POSITIONAL = "S3, permuted CIFAR-100", "S3, positional attention"

# The networks and tiles of the studies, in the words of their recipes.
VIT, POSITIONAL_VIT, RESNET = "ViT", "Positional ViT", "ResNet-18"
UNSHUFFLED, LARGE_TILES, PIXELS = "1×1", "4×4", "32×32"


@dataclass(frozen=True, kw_only=True)
class PublishedCurve:
    """Accuracy at the ends of a curve over the number of tiles."""

    network: str
    """As S3 calls it."""
    first: float
    last: float

    @property
    def change(self) -> float:
        return self.last - self.first


FIRST_TILES, LAST_TILES = 2, 32
"""Along a side, at the ends of S3's curves."""
CURVES: Mapping[str, PublishedCurve] = {
    VIT: PublishedCurve(network="ViT, patch 2", first=0.64, last=0.64),
    RESNET: PublishedCurve(network="ResNet", first=0.80, last=0.57),
    "VGG": PublishedCurve(network="VGG", first=0.76, last=0.47),
}
"""By the network of ours that it stands beside; we train no VGG."""


@dataclass(frozen=True, kw_only=True)
class PublishedPair:
    dataset: str
    accuracy: Mapping[str, float]
    """By model, over 10 seeds, read off box plots."""

    @property
    def difference(self) -> float:
        return self.accuracy[POSITIONAL_VIT] - self.accuracy[VIT]


def _pair(dataset: str, vanilla: float, positional: float) -> PublishedPair:
    return PublishedPair(dataset=dataset, accuracy={VIT: vanilla, POSITIONAL_VIT: positional})


PAIRS: Mapping[str, PublishedPair] = {
    "positional-cifar10": _pair("CIFAR-10", 0.902, 0.905),
    "positional-cifar100": _pair("CIFAR-100", 0.68, 0.68),
    "positional-svhn": _pair("SVHN", 0.982, 0.973),
}
"""By the name of the study."""
