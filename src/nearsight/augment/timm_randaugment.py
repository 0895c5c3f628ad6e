"""RandAugment as timm has it, which is what the DeiT recipe and S2 train with (`rand-m9-mstd0.5-inc1`)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.noise import standard_normal
from nearsight.augment.operations import Operation, apply_in_turn
from nearsight.augment.streams import Drawn, parts_of
from nearsight.errors import check_at_least, check_probability

_STRONGEST = 10.0
_OPERATIONS = (
    Operation.AUTOCONTRAST,
    Operation.EQUALIZE,
    Operation.INVERT,
    Operation.ROTATE,
    Operation.POSTERIZE,
    Operation.SOLARIZE,
    Operation.SOLARIZE_ADD,
    Operation.COLOR,
    Operation.CONTRAST,
    Operation.BRIGHTNESS,
    Operation.SHARPNESS,
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
)
_DRAWS_PER_OPERATION = 4


@dataclass(frozen=True, kw_only=True)
class TimmRandAugment(Augmentation):
    """timm's operations, choice, noise on the magnitude and scale of magnitudes; the pixels as torchvision's tensors.

    timm works with Pillow. What differs here: nearest neighbour instead of bilinear or bicubic by chance, translations
    by whole pixels, and blends that may differ by one grey level.
    """

    name: ClassVar[str] = "timm_randaugment"
    stage: ClassVar[Stage] = Stage.COLOUR

    num_ops: int = 2
    """Operations drawn per image (n)."""
    op_p: float = 0.5
    """Probability that a drawn operation is applied (timm's prob)."""
    magnitude: float = 9.0
    """Mean strength, 0…10 (m)."""
    magnitude_std: float = 0.5
    """Deviation of the strength, drawn for each operation (mstd)."""
    increasing: bool = True
    """All operations are more severe at a larger strength (inc1); else posterize, solarize and blends go their way."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("timm_randaugment.num_ops", self.num_ops, 0)
        check_probability("timm_randaugment.op_p", self.op_p)
        check_at_least("timm_randaugment.magnitude", self.magnitude, 0)
        check_at_least("timm_randaugment.magnitude_std", self.magnitude_std, 0)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"timm_randaugment": 1 + _DRAWS_PER_OPERATION * int(cells.largest["num_ops"])}

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        return {"choices": torch.tensor(_OPERATIONS)}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("timm_randaugment", batch.images_KBCHW)
        operation_Nn, magnitude_Nn = cls.draw(cells, drawn, *images.shape[-2:])
        mean_C = batch.mean_C.round().to(torch.uint8)
        moved = apply_in_turn(images, operation_Nn, magnitude_Nn, frozenset(_OPERATIONS), fill_C=mean_C)
        return batch.replace(images=moved)

    @classmethod
    def draw(cls, cells: Cells, drawn: Drawn, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Operations and magnitudes of every image, each [N, num_ops of the cell with most]."""
        draw_KBm = drawn.sample["timm_randaugment"]
        most = int(cells.largest["num_ops"])
        which, coin, strength, sign = parts_of(draw_KBm[..., 1:], cells["num_ops"], most, _DRAWS_PER_OPERATION)
        turn_n = torch.arange(which.shape[-1], device=which.device)
        number, op_p, mean, deviation, increasing = (
            cells[name][:, None, None] for name in ("num_ops", "op_p", "magnitude", "magnitude_std", "increasing")
        )
        applied_KBn = chosen(cells, draw_KBm[..., :1]) & (turn_n < number) & (coin < op_p)
        choice_KBn = (which * len(_OPERATIONS)).to(torch.int64)
        level_KBn = (mean + deviation * standard_normal(strength)).clamp(0, _STRONGEST) / _STRONGEST
        by_choice = torch.stack(_magnitudes(level_KBn, sign, increasing.to(torch.bool), height, width), dim=-1)
        magnitude_KBn = by_choice.gather(-1, choice_KBn.unsqueeze(-1)).squeeze(-1)
        operation_KBn = torch.where(applied_KBn, cells.constants["choices"][choice_KBn], Operation.IDENTITY.value)
        return operation_KBn.flatten(0, 1), magnitude_KBn.flatten(0, 1)


def _magnitudes(level: Tensor, sign_draw: Tensor, increasing: Tensor, height: int, width: int) -> list[Tensor]:
    """The magnitude each of `_OPERATIONS` has at this level (0…1), in their order."""
    sign = torch.where(sign_draw < 0.5, -1.0, 1.0)
    none = torch.zeros_like(level)
    kept_bits = (level * 4).trunc()
    threshold = (level * 256).trunc()
    # Half a level below the whole threshold, so that dividing by 255 and back cannot move it past a grey level.
    solarize = (torch.where(increasing, 256 - threshold, threshold) - 0.5) / 255
    blend = torch.where(increasing, (sign * level * 0.9).clamp(min=-0.9), level * 1.8 - 0.9)
    return [
        none,
        none,
        none,
        sign * level * 30,
        torch.where(increasing, 4 - kept_bits, kept_bits),
        solarize,
        (level * 110).trunc().clamp(max=128),
        *[blend] * 4,
        *[sign * level * 0.3] * 2,
        sign * level * 0.45 * width,
        sign * level * 0.45 * height,
    ]
