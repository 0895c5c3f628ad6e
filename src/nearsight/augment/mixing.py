"""Augmentations that mix the samples of a batch.

CutMix            a box of another image is pasted in, and the label is shared by area
CutFill           CutMix's box without CutMix's content: the control that separates occlusion from mixing
Mixup             a weighted mean of two images and of their labels
MixupOrCutMix     one of the two, by a coin: the mixing of the DeiT recipe (S2)

They share how partners are chosen, and draw once per batch or once per sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, register_augmentation
from nearsight.augment.boxes import Box, box_of_area, filling, filling_draws, snapped
from nearsight.augment.streams import Drawn, symmetric_beta
from nearsight.configuration import ADDED
from nearsight.errors import InputError, check_at_least, check_probability
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def permutation_of(draw_KB: Tensor) -> Tensor:
    """A random permutation of each cell's batch from one uniform draw per sample: [K, B], positions in the batch."""
    return draw_KB.argsort(dim=-1, stable=True)


def of_partners(values_KB: Tensor, partner_KB: Tensor) -> Tensor:
    """The values [K, B, ...] of each sample's partner."""
    num_cells, num_samples = partner_KB.shape
    cell_K1 = torch.arange(num_cells, device=partner_KB.device).unsqueeze(-1)
    if torch.compiler.is_compiling():
        # From one index into the flattened batch a program for any K takes a remainder by K for every pixel.
        return values_KB[cell_K1, partner_KB]
    # index_select on the flattened batch copies whole images; gather would need an index per pixel.
    picked = values_KB.flatten(0, 1).index_select(0, (partner_KB + cell_K1 * num_samples).flatten())
    return picked.view_as(values_KB)


def mixed_targets(targets_KBC: Tensor, partner_KB: Tensor, share_of_partner: Tensor) -> Tensor:
    """Targets mixed by `share_of_partner` [K, b]; a share of 0 returns them bit-identical."""
    share = share_of_partner.unsqueeze(-1)
    return targets_KBC * (1 - share) + of_partners(targets_KBC, partner_KB) * share


def batch_or_sample_draws(cells: Cells, drawn: Drawn, stream: str, num: int) -> Tensor:
    """The first `num` draws of the stream, [K, b, num]: b = 1 if all cells draw once per batch, otherwise B.

    Cells say which in `per_sample`. The batch's draws are the stream `{stream}.batch`.
    """
    shared_K1n = drawn.batch[f"{stream}.batch"][..., :num].unsqueeze(1)
    if not cells.largest["per_sample"]:
        return shared_K1n
    own_KBn = drawn.sample[stream][..., :num]
    return torch.where(cells["per_sample"].to(torch.bool)[:, None, None], own_KBn, shared_K1n)


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class CutMix(Augmentation):
    """Yun et al. 2019: λ ~ Beta(α, α), a box of 1 - λ of the area, clipped at the border; labels by the true area."""

    name = "cutmix"
    stage = Stage.MIXING

    alpha: float = 1.0
    """Both parameters of the Beta distribution; 1 is uniform."""
    per_sample: bool = False
    """Draw coin, λ and box for every sample instead of once per mini-batch (S1 applies it to mini-batches)."""
    patch: int = 1
    """Box edges lie on multiples of this many pixels; a model's patch size mixes whole tokens only."""
    feather: float = 0.0
    """Deviation in pixels of the Gaussian that softens the box's edge; 0 cuts sharply."""
    mix_labels: bool = field(default=True, metadata=ADDED)
    """Share the label by area; otherwise an image keeps its own, whatever part of another is pasted into it."""

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


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class CutFill(Augmentation):
    """The box is drawn exactly as CutMix draws it, then filled with noise or the mean; labels stay or are mixed."""

    name = "cutfill"
    stage = Stage.MIXING

    alpha: float = 1.0
    """Both parameters of the Beta distribution; 1 is uniform."""
    per_sample: bool = False
    """Draw coin, λ and box for every sample instead of once per mini-batch."""
    patch: int = 1
    """Box edges lie on multiples of this many pixels."""
    noise: float = 1.0
    """Deviation of the filling in units of the data set's deviation; 0 fills with the mean."""
    mix_labels: bool = False
    """Share the label with another sample's by the box's area, although nothing of that sample is seen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise InputError(f"cutfill.alpha is {self.alpha}, but must be positive")
        check_at_least("cutfill.patch", self.patch, 1)
        check_at_least("cutfill.noise", self.noise, 0)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        filled = filling_draws("cutfill.noise", cells, image_shape)
        return {"cutfill": NUM_BOX_DRAWS, "cutfill.partner": 1, **filled}

    @classmethod
    def batch_draws(cls, cells: Cells) -> dict[str, int]:
        return {"cutfill.batch": NUM_BOX_DRAWS}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        height, width = batch.images_KBCHW.shape[-2:]
        applied_Kb, box = cutmix_box(cells, drawn, "cutfill", height, width)
        hidden_Kb1HW = box.mask(height, width) & applied_Kb[..., None, None, None]
        content = filling(batch, cells, drawn, "cutfill.noise")
        images = torch.where(hidden_Kb1HW, content, batch.images_KBCHW.to(torch.float32))
        share_Kb = box.area() / (height * width) * applied_Kb * cells["mix_labels"].unsqueeze(-1)
        partner_KB = permutation_of(drawn.sample["cutfill.partner"][..., 0])
        return batch.replace(images=images, targets=mixed_targets(batch.targets_KBC, partner_KB, share_Kb))


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class Mixup(Augmentation):
    """Zhang et al. 2018: λ ~ Beta(α, α), the rest from another sample of the batch."""

    name = "mixup"
    stage = Stage.MIXING

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


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class MixupOrCutMix(Augmentation):
    """timm's `Mixup(mixup_alpha, cutmix_alpha, prob=p, switch_prob)`, with CutMix's own box (even sides)."""

    name = "mixup_or_cutmix"
    stage = Stage.MIXING

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
