"""CutMix: a box of another image is pasted in, and the label is shared by area."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.beta import symmetric_beta
from nearsight.augment.boxes import Box, box_of_area, snapped
from nearsight.augment.partners import batch_or_sample_draws, mixed_targets, of_partners, permutation_of
from nearsight.augment.streams import Drawn
from nearsight.configuration import ADDED
from nearsight.errors import InputError, check_at_least


@dataclass(frozen=True, kw_only=True)
class CutMix(Augmentation):
    """Yun et al. 2019: λ ~ Beta(α, α), a box of 1 - λ of the area, clipped at the border; labels by the true area."""

    name: ClassVar[str] = "cutmix"
    stage: ClassVar[Stage] = Stage.MIXING

    alpha: float = 1.0
    """Both parameters of the Beta distribution; 1 is uniform."""
    per_sample: bool = False
    """Draw coin, λ and box for every sample instead of once per mini-batch (S1 applies it to mini-batches)."""
    patch: int = 1
    """Box edges lie on multiples of this many pixels; a model's patch size mixes whole tokens only."""
    feather: float = 0.0
    """Deviation in pixels of the Gaussian that softens the box's edge; 0 cuts sharply."""
    mix_labels: bool = field(default=True, metadata=ADDED)
    """Share the label by area; else an image keeps its own, whatever part of another is pasted into it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise InputError(f"cutmix.alpha is {self.alpha}, but must be positive")
        check_at_least("cutmix.patch", self.patch, 1)
        check_at_least("cutmix.feather", self.feather, 0)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"cutmix": NUM_BOX_DRAWS, "cutmix.partner": 1}

    @classmethod
    def batch_draws(cls, cells: Cells) -> dict[str, int]:
        return {"cutmix.batch": NUM_BOX_DRAWS}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = batch.images_KBCHW
        height, width = images.shape[-2:]
        applied_Kb, box = cutmix_box(cells, drawn, "cutmix", height, width)
        partner_KB = permutation_of(drawn.sample["cutmix.partner"][..., 0])
        pasted = of_partners(images, partner_KB)
        if cells.largest["feather"] > 0:
            mask_Kb1HW = soft_mask(box, cells["feather"].unsqueeze(-1), height, width)
            mask_Kb1HW = mask_Kb1HW * applied_Kb[..., None, None, None]
            base = images.to(torch.float32)
            # Grey levels are small integers, so this is exact where the mask is 0 or 1.
            mixed = base + mask_Kb1HW * (pasted - base)
            share_Kb = mask_Kb1HW.mean((-3, -2, -1))
        else:
            mixed = torch.where(box.mask(height, width) & applied_Kb[..., None, None, None], pasted, images)
            share_Kb = box.area() / (height * width) * applied_Kb
        share_Kb = share_Kb * cells["mix_labels"].unsqueeze(-1)
        return batch.replace(images=mixed, targets=mixed_targets(batch.targets_KBC, partner_KB, share_Kb))


NUM_BOX_DRAWS = 5
"""Uniform draws that `cutmix_box` takes from its stream: the coin, two for λ, two for the box's centre."""


def cutmix_box(cells: Cells, drawn: Drawn, stream: str, height: int, width: int) -> tuple[Tensor, Box]:
    """Whether the cell's coin says yes [K, b], and the box to cut."""
    draw_Kb5 = batch_or_sample_draws(cells, drawn, stream, NUM_BOX_DRAWS)
    kept_Kb = symmetric_beta(draw_Kb5[..., 1:3], cells["alpha"].unsqueeze(-1))
    box = box_of_area(1 - kept_Kb, draw_Kb5[..., 3:5], height, width)
    return chosen(cells, draw_Kb5[..., 0]), snapped(box, cells["patch"].unsqueeze(-1), height, width)


def soft_mask(box: Box, deviation: Tensor, height: int, width: int) -> Tensor:
    """The box blurred by a Gaussian of `deviation` [K, 1] pixels, 0 leaves it sharp: [K, b, 1, H, W] in [0, 1]."""
    sharp = box.axis_masks(height, width)
    soft = []
    edges = ((box.top, box.bottom), (box.left, box.right))
    for hard, (start, end) in zip(sharp, edges, strict=True):
        centre = torch.arange(hard.shape[-1], device=deviation.device) + 0.5
        scale = (math.sqrt(2) * deviation.clamp(min=1e-3)).unsqueeze(-1)
        blurred = 0.5 * (
            torch.erf((centre - start.unsqueeze(-1)) / scale) - torch.erf((centre - end.unsqueeze(-1)) / scale)
        )
        soft.append(torch.where(deviation.unsqueeze(-1) > 0, blurred, hard.to(torch.float32)))
    return (soft[0].unsqueeze(-1) * soft[1].unsqueeze(-2)).unsqueeze(-3)
