"""Mixup or CutMix, by a coin: the mixing of the DeiT recipe (S2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.beta import symmetric_beta
from nearsight.augment.boxes import box_of_area
from nearsight.augment.partners import batch_or_sample_draws, mixed_targets, of_partners, permutation_of
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_probability


@dataclass(frozen=True, kw_only=True)
class MixupOrCutMix(Augmentation):
    """timm's `Mixup(mixup_alpha, cutmix_alpha, prob=p, switch_prob)`, with CutMix's own box (even sides)."""

    name: ClassVar[str] = "mixup_or_cutmix"
    stage: ClassVar[Stage] = Stage.MIXING

    mixup_alpha: float = 0.8
    """Both parameters of Mixup's Beta distribution."""
    cutmix_alpha: float = 1.0
    """Both parameters of CutMix's Beta distribution."""
    switch_p: float = 0.5
    """Probability of CutMix rather than Mixup."""
    per_sample: bool = False
    """Draw coins, λ and box for every sample instead of once per mini-batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("mixup_or_cutmix.switch_p", self.switch_p)
        if not (self.mixup_alpha > 0 and self.cutmix_alpha > 0):
            raise InputError(
                f"mixup_or_cutmix has alphas {self.mixup_alpha} and {self.cutmix_alpha}, but both must be positive"
            )

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"mixup_or_cutmix": 6, "mixup_or_cutmix.partner": 1}

    @classmethod
    def batch_draws(cls, cells: Cells) -> dict[str, int]:
        return {"mixup_or_cutmix.batch": 6}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = batch.images_KBCHW.to(torch.float32)
        height, width = images.shape[-2:]
        draw_Kb6 = batch_or_sample_draws(cells, drawn, "mixup_or_cutmix", 6)
        cut_Kb = draw_Kb6[..., 1] < cells["switch_p"].unsqueeze(-1)
        alpha_Kb = torch.where(cut_Kb, cells["cutmix_alpha"].unsqueeze(-1), cells["mixup_alpha"].unsqueeze(-1))
        share_Kb = 1 - symmetric_beta(draw_Kb6[..., 2:4], alpha_Kb)
        box = box_of_area(share_Kb, draw_Kb6[..., 4:6], height, width)
        # Per pixel: CutMix takes all of the partner inside the box, Mixup the same share everywhere.
        weight_Kb1HW = torch.where(
            cut_Kb[..., None, None, None], box.mask(height, width).to(torch.float32), share_Kb[..., None, None, None]
        )
        share_Kb = torch.where(cut_Kb, box.area() / (height * width), share_Kb)
        applied_Kb = chosen(cells, draw_Kb6[..., 0])
        weight_Kb1HW = weight_Kb1HW * applied_Kb[..., None, None, None]
        partner_KB = permutation_of(drawn.sample["mixup_or_cutmix.partner"][..., 0])
        mixed = images * (1 - weight_Kb1HW) + of_partners(images, partner_KB) * weight_Kb1HW
        return batch.replace(images=mixed, targets=mixed_targets(batch.targets_KBC, partner_KB, share_Kb * applied_Kb))
