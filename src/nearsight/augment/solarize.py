"""Solarisation: bright levels are inverted, as on a film that saw too much light."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.streams import Drawn
from nearsight.errors import check_at_least


@dataclass(frozen=True, kw_only=True)
class Solarize(Augmentation):
    """`torchvision.transforms.v2.RandomSolarize` on tensors."""

    name: ClassVar[str] = "solarize"
    stage: ClassVar[Stage] = Stage.COLOUR

    p: float = 0.2
    """Probability that a sample is solarised."""
    threshold: int = 128
    """Levels from this one on are inverted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("solarize.threshold", self.threshold, 0)

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("solarize", batch.images_KBCHW)
        bright = images >= cells["threshold"].view(-1, 1, 1, 1, 1)
        chosen_KB111 = chosen(cells, drawn.sample["solarize"])[..., None, None]
        return batch.replace(images=torch.where(chosen_KB111 & bright, 255 - images, images))
