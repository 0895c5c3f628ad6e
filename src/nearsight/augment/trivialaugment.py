"""TrivialAugment: one operation per image at a random strength."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.magnitudes import WIDE, magnitude_tables, magnitudes
from nearsight.augment.operations import Operation, apply_in_turn
from nearsight.augment.streams import Drawn

_NUM_BINS = 31


@dataclass(frozen=True, kw_only=True)
class TrivialAugment(Augmentation):
    """Müller & Hutter 2021, as `torchvision.transforms.v2.TrivialAugmentWide` on tensors: nearest, black fill."""

    name: ClassVar[str] = "trivialaugment"
    stage: ClassVar[Stage] = Stage.COLOUR

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"trivialaugment": 4}

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
