"""Horizontal flip."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.streams import Drawn


@dataclass(frozen=True, kw_only=True)
class HorizontalFlip(Augmentation):
    """Mirrors left and right (torchvision's `RandomHorizontalFlip`)."""

    name: ClassVar[str] = "flip"
    stage: ClassVar[Stage] = Stage.GEOMETRY

    p: float = 0.5
    """Probability that a sample is mirrored."""

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = batch.images_KBCHW
        flipped_KB111 = chosen(cells, drawn.sample["flip"])[..., None, None]
        return batch.replace(images=torch.where(flipped_KB111, images.flip(-1), images))
