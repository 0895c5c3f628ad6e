"""CutOut: a square of every image is hidden."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.boxes import Box
from nearsight.augment.streams import Drawn
from nearsight.errors import check_at_least


@dataclass(frozen=True, kw_only=True)
class CutOut(Augmentation):
    """DeVries & Taylor 2017: a square centred on a random pixel, clipped at the border, set to the data set's mean."""

    name: ClassVar[str] = "cutout"
    stage: ClassVar[Stage] = Stage.OCCLUSION

    size: int = 16
    """Side of the square in pixels (the paper: 16 for CIFAR-10, 8 for CIFAR-100); odd sides lose a pixel, as there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("cutout.size", self.size, 1)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"cutout": 3}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        height, width = batch.images_KBCHW.shape[-2:]
        coin_KB, row_draw_KB, column_draw_KB = drawn.sample["cutout"].unbind(-1)
        half_K1 = cells["size"].unsqueeze(-1) // 2
        row_KB = (row_draw_KB * height).to(torch.int64)
        column_KB = (column_draw_KB * width).to(torch.int64)
        box = Box(row_KB - half_K1, row_KB + half_K1, column_KB - half_K1, column_KB + half_K1)
        hidden_KB1HW = box.mask(height, width) & chosen(cells, coin_KB)[..., None, None, None]
        hidden = torch.where(hidden_KB1HW, batch.mean_C[:, None, None], batch.images_KBCHW.to(torch.float32))
        return batch.replace(images=hidden)
