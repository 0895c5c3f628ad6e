"""Random crop of the zero-padded image, at the image's own size."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.streams import Drawn
from nearsight.errors import check_at_least


@dataclass(frozen=True, kw_only=True)
class RandomCrop(Augmentation):
    """Pads with black on all sides and cuts the original size out again (torchvision's `RandomCrop(size, padding)`)."""

    name: ClassVar[str] = "crop"
    stage: ClassVar[Stage] = Stage.GEOMETRY

    padding: int = 4
    """Black pixels added on each side; the picture moves by up to this many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("crop.padding", self.padding, 0)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"crop": 3}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = batch.images_KBCHW
        channels, height, width = images.shape[-3:]
        draw_KB3 = drawn.sample["crop"]
        padding_K11 = cells["padding"][:, None, None]
        shift_KB2 = (draw_KB3[..., 1:] * (2 * padding_K11 + 1)).to(torch.int64) - padding_K11
        shift_KB2 = shift_KB2 * chosen(cells, draw_KB3[..., :1])
        row_KBH = torch.arange(height, device=images.device) + shift_KB2[..., :1]
        column_KBW = torch.arange(width, device=images.device) + shift_KB2[..., 1:]
        inside_KBHW = _within(row_KBH, height).unsqueeze(-1) & _within(column_KBW, width).unsqueeze(-2)
        source_KBHW = row_KBH.clamp(0, height - 1).unsqueeze(-1) * width + column_KBW.clamp(0, width - 1).unsqueeze(-2)
        index = source_KBHW.flatten(-2).unsqueeze(-2).expand(*images.shape[:2], channels, -1)
        moved = images.flatten(-2).gather(-1, index).view_as(images)
        return batch.replace(images=moved.mul_(inside_KBHW.unsqueeze(-3)))


def _within(position: torch.Tensor, size: int) -> torch.Tensor:
    return (position >= 0) & (position < size)
