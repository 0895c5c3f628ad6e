"""ColorJitter: brightness, contrast, saturation and hue, in an order of its own for every image."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.operations import Operation, apply_in_turn
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_at_least

_KINDS = {
    "brightness": Operation.BRIGHTNESS,
    "contrast": Operation.CONTRAST,
    "saturation": Operation.COLOR,
    "hue": Operation.HUE,
}
LARGEST_HUE = 0.5
"""Half the circle, either way."""


@dataclass(frozen=True, kw_only=True)
class ColorJitter(Augmentation):
    """`torchvision.transforms.v2.ColorJitter` on tensors. Strengths of 0 switch a part off."""

    name: ClassVar[str] = "colorjitter"
    stage: ClassVar[Stage] = Stage.COLOUR

    brightness: float = 0.4
    """The factor is uniform in [max(0, 1 - b), 1 + b]."""
    contrast: float = 0.4
    """Likewise."""
    saturation: float = 0.4
    """Likewise."""
    hue: float = 0.1
    """The shift is uniform in [-h, h] of the hue circle; at most 0.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _KINDS:
            check_at_least(f"colorjitter.{name}", getattr(self, name), 0)
        if self.hue > LARGEST_HUE:
            raise InputError(f"colorjitter.hue is {self.hue}, but at most {LARGEST_HUE} of the circle makes sense")

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"colorjitter": 2 + len(_KINDS)}

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
        # Factor 1 and shift 0 change nothing but for the rounding of hue, so a part that is off is left out.
        applied_KB4 = chosen(cells, draw_KB6[..., :1]) & (strength_K14 > 0)
        operation_KB4 = torch.where(applied_KB4, cells.constants["operations"], Operation.IDENTITY.value)
        orders = cells.constants["orders"]
        order_KB4 = orders[(draw_KB6[..., 1] * len(orders)).to(torch.int64)]
        return operation_KB4.gather(-1, order_KB4).flatten(0, 1), magnitude_KB4.gather(-1, order_KB4).flatten(0, 1)
