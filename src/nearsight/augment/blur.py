"""Gaussian blur, with a width of its own for every image."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_at_least

_DEVIATIONS = 4
"""How far the kernel of the widest blur reaches; beyond is less than a grey level."""
_NARROWEST = 0.01


@dataclass(frozen=True, kw_only=True)
class GaussianBlur(Augmentation):
    """`torchvision.transforms.v2.GaussianBlur` on tensors, with a kernel of 4 deviations of the widest blur."""

    name: ClassVar[str] = "blur"
    stage: ClassVar[Stage] = Stage.COLOUR

    p: float = 0.5
    """Probability that a sample is blurred."""
    min_sigma: float = 0.1
    """Smallest deviation of the Gaussian, in pixels."""
    max_sigma: float = 2.0
    """Largest deviation; it is uniform between the two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("blur.min_sigma", self.min_sigma, _NARROWEST)
        if not self.min_sigma <= self.max_sigma < math.inf:
            raise InputError(f"blur.max_sigma is {self.max_sigma}, but must be at least min_sigma, {self.min_sigma}")

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"blur": 2}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("blur", batch.images_KBCHW)
        blurred_KB111, sigma_KB = cls.draw(cells, drawn)
        # Of the cell's own widest blur: what the others do must not show.
        reach_K = (_DEVIATIONS * cells["max_sigma"]).ceil()
        vertical_KB1HH, horizontal_KB1WW = (
            blur_weights(sigma_KB, size, reach_K).unsqueeze(2) for size in images.shape[-2:]
        )
        smooth = vertical_KB1HH @ images.to(torch.float32) @ horizontal_KB1WW.mT
        rounded = smooth.round_().clamp_(0, 255).to(torch.uint8)
        return batch.replace(images=torch.where(blurred_KB111, rounded, images))

    @classmethod
    def draw(cls, cells: Cells, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Which samples are blurred, bool [K, B, 1, 1, 1], and how widely, [K, B]."""
        draw_KB2 = drawn.sample["blur"]
        least_K1, most_K1 = cells["min_sigma"].unsqueeze(-1), cells["max_sigma"].unsqueeze(-1)
        sigma_KB = least_K1 + draw_KB2[..., 1] * (most_K1 - least_K1)
        return chosen(cells, draw_KB2[..., 0])[..., None, None, None], sigma_KB


def blur_weights(sigma_KB: Tensor, size: int, reach_K: Tensor) -> Tensor:
    """Weights [K, B, size, size] that blur a row of pixels, mirrored at its ends without repeating the last pixel."""
    reach_K111 = reach_K.clamp(max=size - 1)[:, None, None, None]
    output_o1 = torch.arange(size, device=sigma_KB.device).unsqueeze(-1)
    input_i = torch.arange(size, device=sigma_KB.device)
    # An input pixel is met where it is and, except for the ends themselves, at its mirror images beyond either end.
    last = size - 1
    seen_at = ((input_i, input_i >= 0), (-input_i, input_i > 0), (2 * last - input_i, input_i < last))
    weight = torch.zeros((), device=sigma_KB.device)
    for place_i, is_there_i in seen_at:
        distance_oi = (place_i - output_o1).to(torch.float32)
        within_K1oi = is_there_i & (distance_oi.abs() <= reach_K111)
        gaussian = torch.exp(-0.5 * (distance_oi / sigma_KB[..., None, None]) ** 2)
        weight = weight + torch.where(within_K1oi, gaussian, 0.0)
    return weight / weight.sum(-1, keepdim=True)
