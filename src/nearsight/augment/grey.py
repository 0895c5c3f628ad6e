"""Random grey: some images lose their colours."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.blends import greyscale
from nearsight.augment.streams import Drawn


@dataclass(frozen=True, kw_only=True)
class RandomGrey(Augmentation):
    """`torchvision.transforms.v2.RandomGrayscale` on tensors."""

    name: ClassVar[str] = "grey"
    stage: ClassVar[Stage] = Stage.COLOUR

    p: float = 0.2
    """Probability that a sample becomes grey."""

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("grey", batch.images_KBCHW)
        grey_KB1HW = greyscale(images.flatten(0, 1)).to(torch.uint8).unflatten(0, images.shape[:2])
        turned_KB111 = chosen(cells, drawn.sample["grey"])[..., None, None]
        return batch.replace(images=torch.where(turned_KB111, grey_KB1HW, images))
