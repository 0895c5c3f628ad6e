"""What changes colours or sharpness, and moves nothing.

ColorJitter       brightness, contrast, saturation and hue, in an order of its own for every image
RandomGrey        some images lose their colours
GaussianBlur      a blur with a width of its own for every image
Solarize          bright levels are inverted, as on overexposed film
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, register_augmentation, require_grey_levels
from nearsight.augment.operations import Operation, apply_in_turn
from nearsight.augment.pixels import greyscale
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_at_least
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {
    "brightness": Operation.BRIGHTNESS,
    "contrast": Operation.CONTRAST,
    "saturation": Operation.COLOR,
    "hue": Operation.HUE,
}
LARGEST_HUE = 0.5
"""Half the circle, either way."""


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class ColorJitter(Augmentation):
    """`torchvision.transforms.v2.ColorJitter` on tensors. Strengths of 0 switch a part off."""

    name = "colorjitter"
    stage = Stage.COLOUR
    num_draws = 2 + len(_KINDS)

    brightness: float = 0.4
    """The factor is uniform in [max(0, 1 - b), 1 + b]."""
    contrast: float = 0.4
    """As for brightness."""
    saturation: float = 0.4
    """As for brightness."""
    hue: float = 0.1
    """The shift is uniform in [-h, h] of the hue circle; at most 0.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _KINDS:
            check_at_least(f"colorjitter.{name}", getattr(self, name), 0)
        if self.hue > LARGEST_HUE:
            raise InputError(f"colorjitter.hue is {self.hue}, but at most {LARGEST_HUE} of the circle makes sense")

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        return {
            "orders": torch.tensor(list(itertools.permutations(range(len(_KINDS))))),
            "operations": torch.tensor(list(_KINDS.values())),
        }

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("colorjitter", batch.images_KBCHW)
        operation_N4, magnitude_N4 = cls.draw(cells, drawn)
        possible = frozenset(operation for name, operation in _KINDS.items() if cells.largest[name] > 0)
        return batch.replace(images=apply_in_turn(images, operation_N4, magnitude_N4, possible))

    @classmethod
    def draw(cls, cells: Cells, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """The four operations of every image in their order, and their magnitudes (factors less 1), each [N, 4]."""
        draw_KB6 = drawn.sample["colorjitter"]
        strength_K14 = torch.stack([cells[name].to(torch.float32) for name in _KINDS], dim=-1).unsqueeze(1)
        # Factors stop at 0, which is a magnitude of -1; the hue's strength never reaches there.
        weakest_K14 = -strength_K14.clamp(max=1)
        magnitude_KB4 = weakest_K14 + draw_KB6[..., 2:] * (strength_K14 - weakest_K14)
        # Factor 1 and shift 0 change nothing except by the rounding of hue, so a part that is off is left out.
        applied_KB4 = chosen(cells, draw_KB6[..., :1]) & (strength_K14 > 0)
        operation_KB4 = torch.where(applied_KB4, cells.constants["operations"], Operation.IDENTITY.value)
        orders = cells.constants["orders"]
        order_KB4 = orders[(draw_KB6[..., 1] * len(orders)).to(torch.int64)]
        return operation_KB4.gather(-1, order_KB4).flatten(0, 1), magnitude_KB4.gather(-1, order_KB4).flatten(0, 1)


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class RandomGrey(Augmentation):
    """`torchvision.transforms.v2.RandomGrayscale` on tensors."""

    name = "grey"
    stage = Stage.COLOUR

    p: float = 0.2
    """Probability that a sample becomes grey."""

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("grey", batch.images_KBCHW)
        grey_KB1HW = greyscale(images.flatten(0, 1)).to(torch.uint8).unflatten(0, images.shape[:2])
        turned_KB111 = chosen(cells, drawn.sample["grey"])[..., None, None]
        return batch.replace(images=torch.where(turned_KB111, grey_KB1HW, images))


_DEVIATIONS = 4
"""How far the kernel of the widest blur reaches; beyond is less than a grey level."""
_NARROWEST = 0.01


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class GaussianBlur(Augmentation):
    """`torchvision.transforms.v2.GaussianBlur` on tensors, with a kernel of 4 deviations of the widest blur."""

    name = "blur"
    stage = Stage.COLOUR
    num_draws = 2

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
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("blur", batch.images_KBCHW)
        blurred_KB111, sigma_KB = cls.draw(cells, drawn)
        # Of the cell's own widest blur: other cells must not change the result.
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


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class Solarize(Augmentation):
    """`torchvision.transforms.v2.RandomSolarize` on tensors."""

    name = "solarize"
    stage = Stage.COLOUR

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
