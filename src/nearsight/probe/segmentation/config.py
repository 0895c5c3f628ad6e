"""How a segmentation head is trained and tested on frozen features (S2 App. A), and what each data set changes.

S2 is "Locality-Attending Vision Transformer" (arXiv 2603.04892).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nearsight.configuration import check_choices
from nearsight.data.segmentation import SEGMENTATION_SETS
from nearsight.errors import InputError, check_at_least, check_numbers, check_positive, check_probability
from nearsight.probe.settings import Place

REFERENCE_SIZE = 224
"""Side of the images that S2's models were trained on, in pixels."""
OWN_FOLDER = "own folder"
"""For whatever is not registered."""


@dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    """What affects the numbers. The defaults are S2's on ADE20K; what it does not report is mmsegmentation's habit."""

    iterations: int = 20_000
    """Training steps."""
    batch_size: int = 32
    """Crops per step."""
    crop: int = 512
    """Side of the square training crops in pixels; a multiple of what the model can take."""
    shortest: int = 512
    """What the shorter side of an image is resized to, for testing and before the random scale …"""
    longest: int = 2048
    """… unless the longer side would then exceed this."""
    square: bool = False
    """Test on images squeezed into the crop's size, for models that take one size; otherwise their shape is kept."""
    smallest_scale: float = 0.5
    """Training images are resized by a random factor, from this one …"""
    largest_scale: float = 2.0
    """… to this one."""
    largest_share: float = 0.75
    """A crop in which one class has more than this share of the labelled pixels is drawn again, ten times at most."""
    flip: float = 0.5
    """Probability of a training crop being mirrored."""
    photometric: bool = True
    """Random brightness, contrast, saturation and hue in training."""
    width: int = 512
    """Channels of the head between its two layers."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.01
    """Of AdamW."""
    rising: float = 0.25
    """Share of the steps in which the learning rate rises to its peak; it falls in the others, both linearly."""
    block: int = -1
    """Which block is read, or which stage of a hierarchical model; from the end if negative."""
    place: Place = "block"
    """Its features as it returns them, after the model's final norm, or after PRR."""
    seed: int = 0
    """Of the head's first weights, the order of the images and their crops."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("iterations", "batch_size", "crop", "shortest", "longest", "width"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("flip", "rising", "largest_share"):
            check_probability(name, getattr(self, name))
        check_at_least("weight_decay", self.weight_decay, 0.0)
        check_positive("lr", self.lr)
        if not 0 < self.smallest_scale <= self.largest_scale:
            raise InputError(
                f"the random scale goes from {self.smallest_scale} to {self.largest_scale}, but must rise from above 0"
            )
        check_numbers(self)


_CHANGES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "pascal-context": {"crop": 480, "shortest": 520, "longest": 520},
        # Not in S2. CamVid is 360×480; 20,000 steps would show each of the small VOC's 311 images 2,000 times. A folder
        # of one's own may be as small.
        "camvid": {"crop": 352, "shortest": 360},
        "voc-small": {"iterations": 2_000, "batch_size": 16},
        OWN_FOLDER: {"iterations": 2_000, "batch_size": 16},
    }
)


def default_settings(dataset: str, *, image_size: int, step: int) -> dict[str, Any]:
    """The settings of a data set for a model of images of this size, as far as they differ from those of ADE20K.

    A model of small images gets images as many times larger than its own as S2's models do: 512 / 224. What a patch
    shows, and how far positions are interpolated, is then as in S2.

    Args:
        step: sides of images have to be multiples of this.
    """
    settings = dict(_CHANGES.get(dataset if dataset in SEGMENTATION_SETS else OWN_FOLDER, {}))
    base = SegmentConfig(**settings)
    smaller = min(1.0, image_size / REFERENCE_SIZE)
    for name in ("crop", "shortest", "longest"):
        settings[name] = max(1, round(getattr(base, name) * smaller))
    settings["crop"] = -(-settings["crop"] // step) * step
    return settings
