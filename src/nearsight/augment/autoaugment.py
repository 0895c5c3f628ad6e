"""AutoAugment: one of 25 learned pairs of operations per image."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.magnitudes import STANDARD, magnitude_tables, magnitudes
from nearsight.augment.operations import Operation, apply_in_turn
from nearsight.augment.policies import POLICIES
from nearsight.augment.streams import Drawn
from nearsight.errors import unknown_name

_NUM_BINS = 10


@dataclass(frozen=True, kw_only=True)
class AutoAugment(Augmentation):
    """Cubuk et al. 2019, as `torchvision.transforms.v2.AutoAugment` on tensors: nearest neighbour, black fill."""

    name: ClassVar[str] = "autoaugment"
    stage: ClassVar[Stage] = Stage.COLOUR
    shared: ClassVar[tuple[str, ...]] = ("policy",)

    policy: str = "cifar10"
    """The data set the policy was learned on: cifar10, imagenet or svhn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in POLICIES:
            raise unknown_name("AutoAugment policy", self.policy, POLICIES)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"autoaugment": 6}

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        operation, probability, strength = zip(
            *[zip(*pair, strict=True) for pair in POLICIES[choices["policy"]]], strict=True
        )
        return {
            "operation": torch.tensor(operation),
            "probability": torch.tensor(probability),
            "bin": torch.tensor(strength),
            **magnitude_tables(STANDARD, _NUM_BINS),
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
