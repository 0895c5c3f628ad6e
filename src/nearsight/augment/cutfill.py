"""CutMix's box without CutMix's content: the control that separates occlusion from mixing."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage
from nearsight.augment.cutmix import NUM_BOX_DRAWS, cutmix_box
from nearsight.augment.noise import filling, filling_draws
from nearsight.augment.partners import mixed_targets, permutation_of
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_at_least


@dataclass(frozen=True, kw_only=True)
class CutFill(Augmentation):
    """The box is drawn exactly as CutMix draws it, then filled with noise or the mean; labels stay or are mixed."""

    name: ClassVar[str] = "cutfill"
    stage: ClassVar[Stage] = Stage.MIXING

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
