"""Mixup: a weighted mean of two images and of their labels."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.beta import symmetric_beta
from nearsight.augment.partners import batch_or_sample_draws, mixed_targets, of_partners, permutation_of
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Mixup(Augmentation):
    """Zhang et al. 2018: λ ~ Beta(α, α), the rest from another sample of the batch."""

    name: ClassVar[str] = "mixup"
    stage: ClassVar[Stage] = Stage.MIXING

    alpha: float = 0.8
    """Both parameters of the Beta distribution."""
    per_sample: bool = False
    """Draw coin and λ for every sample instead of once per mini-batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise InputError(f"mixup.alpha is {self.alpha}, but must be positive")

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"mixup": 3, "mixup.partner": 1}

    @classmethod
    def batch_draws(cls, cells: Cells) -> dict[str, int]:
        return {"mixup.batch": 3}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        draw_Kb3 = batch_or_sample_draws(cells, drawn, "mixup", 3)
        kept_Kb = symmetric_beta(draw_Kb3[..., 1:], cells["alpha"].unsqueeze(-1))
        share_Kb = torch.where(chosen(cells, draw_Kb3[..., 0]), 1 - kept_Kb, 0.0)
        partner_KB = permutation_of(drawn.sample["mixup.partner"][..., 0])
        share_Kb111 = share_Kb[..., None, None, None]
        images = batch.images_KBCHW.to(torch.float32)
        mixed = images * (1 - share_Kb111) + of_partners(images, partner_KB) * share_Kb111
        return batch.replace(images=mixed, targets=mixed_targets(batch.targets_KBC, partner_KB, share_Kb))
