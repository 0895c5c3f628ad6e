"""Policies that choose operations image by image.

AutoAugment       one of 25 learned pairs of operations per image
RandAugment       a few operations per image, drawn from one set, all at one strength
TimmRandAugment   the same as timm has it, which is what the DeiT recipe and S2 train with (`rand-m9-mstd0.5-inc1`)
TrivialAugment    one operation per image at a random strength
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, register_augmentation, require_grey_levels
from nearsight.augment.operations import Operation, apply_in_turn
from nearsight.augment.policies import POLICIES, STANDARD, WIDE, magnitude_tables, magnitudes
from nearsight.augment.streams import Drawn, parts_of, standard_normal
from nearsight.errors import InputError, check_at_least, check_probability, unknown_name
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LEARNED_BINS = 10
_NUM_BINS = 31
"""Of AutoAugment, and of those that draw a strength."""


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class AutoAugment(Augmentation):
    """Cubuk et al. 2019, as `torchvision.transforms.v2.AutoAugment` on tensors: nearest neighbour, black fill."""

    name = "autoaugment"
    stage = Stage.COLOUR
    shared = ("policy",)
    num_draws = 6

    policy: str = "cifar10"
    """The data set the policy was learned on: cifar10, imagenet or svhn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in POLICIES:
            raise unknown_name("AutoAugment policy", self.policy, POLICIES)

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        operation, probability, strength = zip(
            *[zip(*pair, strict=True) for pair in POLICIES[choices["policy"]]], strict=True
        )
        return {
            "operation": torch.tensor(operation),
            "probability": torch.tensor(probability),
            "bin": torch.tensor(strength),
            **magnitude_tables(STANDARD, _LEARNED_BINS),
        }

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("autoaugment", batch.images_KBCHW)
        operation_N2, magnitude_N2 = cls.draw(cells, drawn, *images.shape[-2:])
        possible = frozenset(
            operation for pair in POLICIES[cells.choices["policy"]] for operation, probability, _ in pair if probability
        )
        return batch.replace(images=apply_in_turn(images, operation_N2, magnitude_N2, possible))

    @classmethod
    def draw(cls, cells: Cells, drawn: Drawn, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Both operations of every image and their magnitudes, each [N, 2]; an operation left out is the identity."""
        draw_KB6 = drawn.sample["autoaugment"]
        draw_N6 = draw_KB6.flatten(0, 1)
        tables = cells.constants
        pair_N = (draw_N6[:, 0] * len(tables["operation"])).to(torch.int64)
        applied_N2 = (draw_N6[:, 1:3] < tables["probability"][pair_N]) & chosen(cells, draw_KB6[..., 5:]).flatten(0, 1)
        operation_N2 = torch.where(applied_N2, tables["operation"][pair_N], Operation.IDENTITY.value)
        return operation_N2, magnitudes(tables, operation_N2, tables["bin"][pair_N], draw_N6[:, 3:5], height, width)


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class RandAugment(Augmentation):
    """Cubuk et al. 2020, as `torchvision.transforms.v2.RandAugment` on tensors: nearest neighbour, black fill."""

    name = "randaugment"
    stage = Stage.COLOUR

    num_ops: int = 2
    """Operations per image."""
    magnitude: int = 9
    """Strength of all of them, 0…30."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("randaugment.num_ops", self.num_ops, 0)
        if not 0 <= self.magnitude < _NUM_BINS:
            raise InputError(f"randaugment.magnitude is {self.magnitude}, but lies in 0…{_NUM_BINS - 1}")

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"randaugment": 1 + 2 * int(cells.largest["num_ops"])}

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        return {"choices": torch.tensor(list(STANDARD)), **magnitude_tables(STANDARD, _NUM_BINS)}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("randaugment", batch.images_KBCHW)
        operation_Nn, magnitude_Nn = cls.draw(cells, drawn, *images.shape[-2:])
        return batch.replace(images=apply_in_turn(images, operation_Nn, magnitude_Nn, frozenset(STANDARD)))

    @classmethod
    def draw(cls, cells: Cells, drawn: Drawn, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Operations and magnitudes of every image, each [N, num_ops of the cell with most]."""
        draw_KBm = drawn.sample["randaugment"]
        which_KBn, sign_KBn = parts_of(draw_KBm[..., 1:], cells["num_ops"], int(cells.largest["num_ops"]), 2)
        turn_n = torch.arange(which_KBn.shape[-1], device=which_KBn.device)
        applied_KBn = chosen(cells, draw_KBm[..., :1]) & (turn_n < cells["num_ops"][:, None, None])
        choices = cells.constants["choices"]
        operation_KBn = choices[(which_KBn * len(choices)).to(torch.int64)]
        operation_KBn = torch.where(applied_KBn, operation_KBn, Operation.IDENTITY.value)
        bin_KBn = cells["magnitude"][:, None, None].expand_as(operation_KBn)
        magnitude_KBn = magnitudes(cells.constants, operation_KBn, bin_KBn, sign_KBn, height, width)
        return operation_KBn.flatten(0, 1), magnitude_KBn.flatten(0, 1)


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


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class TimmRandAugment(Augmentation):
    """timm's operations, choice, noise on the magnitude and scale of magnitudes; the pixels as torchvision's tensors.

    timm works with Pillow. What differs here: nearest neighbour instead of bilinear or bicubic at random, translations
    by whole pixels, and blends that may differ by one grey level.
    """

    name = "timm_randaugment"
    stage = Stage.COLOUR

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


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class TrivialAugment(Augmentation):
    """Müller & Hutter 2021, as `torchvision.transforms.v2.TrivialAugmentWide` on tensors: nearest, black fill."""

    name = "trivialaugment"
    stage = Stage.COLOUR
    num_draws = 4

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        return {"choices": torch.tensor(list(WIDE)), **magnitude_tables(WIDE, _NUM_BINS)}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("trivialaugment", batch.images_KBCHW)
        operation_N, magnitude_N = cls.draw(cells, drawn, *images.shape[-2:])
        changed = apply_in_turn(images, operation_N.unsqueeze(-1), magnitude_N.unsqueeze(-1), frozenset(WIDE))
        return batch.replace(images=changed)

    @classmethod
    def draw(cls, cells: Cells, drawn: Drawn, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Operation and magnitude of every image, each [N]."""
        coin_KB, which_KB, strength_KB, sign_KB = drawn.sample["trivialaugment"].unbind(-1)
        choices = cells.constants["choices"]
        operation_KB = choices[(which_KB * len(choices)).to(torch.int64)]
        operation_KB = torch.where(chosen(cells, coin_KB), operation_KB, Operation.IDENTITY.value)
        bin_KB = (strength_KB * _NUM_BINS).to(torch.int64)
        magnitude_KB = magnitudes(cells.constants, operation_KB, bin_KB, sign_KB, height, width)
        return operation_KB.flatten(), magnitude_KB.flatten()
