"""RandAugment: a few operations per image, drawn from one set, all at one strength."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.magnitudes import STANDARD, magnitude_tables, magnitudes
from nearsight.augment.operations import Operation, apply_in_turn
from nearsight.augment.streams import Drawn, parts_of
from nearsight.errors import InputError, check_at_least

NUM_BINS = 31


@dataclass(frozen=True, kw_only=True)
class RandAugment(Augmentation):
    """Cubuk et al. 2020, as `torchvision.transforms.v2.RandAugment` on tensors: nearest neighbour, black fill."""

    name: ClassVar[str] = "randaugment"
    stage: ClassVar[Stage] = Stage.COLOUR

    num_ops: int = 2
    """Operations per image."""
    magnitude: int = 9
    """Strength of all of them, 0…30."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("randaugment.num_ops", self.num_ops, 0)
        if not 0 <= self.magnitude < NUM_BINS:
            raise InputError(f"randaugment.magnitude is {self.magnitude}, but lies in 0…{NUM_BINS - 1}")

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"randaugment": 1 + 2 * int(cells.largest["num_ops"])}

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        return {"choices": torch.tensor(list(STANDARD)), **magnitude_tables(STANDARD, NUM_BINS)}

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
