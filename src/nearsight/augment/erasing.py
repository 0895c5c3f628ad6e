"""Random erasing: a rectangle of the image is replaced by noise or the mean."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.boxes import Box
from nearsight.augment.noise import filling, filling_draws
from nearsight.augment.rectangles import NUM_RECTANGLE_DRAWS, offset, random_sides
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_at_least


@dataclass(frozen=True, kw_only=True)
class RandomErasing(Augmentation):
    """Zhong et al. 2020. The rectangle as torchvision and timm draw it; the filling as timm's, relative to normalised
    images: `noise=1` is its mode "pixel" (S2), `noise=0` its mode "const"."""

    name: ClassVar[str] = "erasing"
    stage: ClassVar[Stage] = Stage.OCCLUSION

    p: float = 0.25
    """Probability that a sample is erased."""
    min_area: float = 0.02
    """Smallest share of the image."""
    max_area: float = 1 / 3
    """Largest share of the image."""
    min_ratio: float = 0.3
    """Smallest aspect ratio, rows to columns."""
    max_ratio: float = 1 / 0.3
    """Largest aspect ratio."""
    noise: float = 1.0
    """Deviation of the filling in units of the data set's deviation; 0 fills with the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self.name, self.min_area, self.max_area, self.min_ratio, self.max_ratio)
        check_at_least("erasing.noise", self.noise, 0)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"erasing": 3 + NUM_RECTANGLE_DRAWS, **filling_draws("erasing.noise", cells, image_shape)}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        height, width = batch.images_KBCHW.shape[-2:]
        draw_KBn = drawn.sample["erasing"]
        # The aspect ratio here is rows to columns, so the axes change places; sides are smaller than the image's.
        fits_KB, columns_KB, rows_KB = random_sides(draw_KBn[..., 3:], cells, width, height, margin=1)
        top_KB = offset(draw_KBn[..., 1], rows_KB, height)
        left_KB = offset(draw_KBn[..., 2], columns_KB, width)
        box = Box(top_KB, top_KB + rows_KB, left_KB, left_KB + columns_KB)
        applied_KB = chosen(cells, draw_KBn[..., 0]) & fits_KB
        erased_KB1HW = box.mask(height, width) & applied_KB[..., None, None, None]
        content = filling(batch, cells, drawn, "erasing.noise")
        return batch.replace(images=torch.where(erased_KB1HW, content, batch.images_KBCHW.to(torch.float32)))


def check_ranges(name: str, min_area: float, max_area: float, min_ratio: float, max_ratio: float) -> None:
    if not 0 < min_area <= max_area <= 1:
        raise InputError(f"{name} has areas from {min_area} to {max_area}, but they are shares with 0 < min ≤ max ≤ 1")
    if not 0 < min_ratio <= max_ratio:
        raise InputError(f"{name} has aspect ratios from {min_ratio} to {max_ratio}, but they need 0 < min ≤ max")
