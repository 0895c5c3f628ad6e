"""What is done to a batch of images: tensor in, tensor out, the same on CPU and CUDA, with strengths per cell.

A new augmentation is one file and one line in `AUGMENTATIONS`.
"""

from nearsight.augment.autoaugment import AutoAugment
from nearsight.augment.base import Augmentation, Batch, Cells, Stage
from nearsight.augment.blur import GaussianBlur
from nearsight.augment.colorjitter import ColorJitter
from nearsight.augment.compiled import CompiledPipeline
from nearsight.augment.crop import RandomCrop
from nearsight.augment.cutfill import CutFill
from nearsight.augment.cutmix import CutMix
from nearsight.augment.cutout import CutOut
from nearsight.augment.erasing import RandomErasing
from nearsight.augment.flip import HorizontalFlip
from nearsight.augment.grey import RandomGrey
from nearsight.augment.mixup import Mixup
from nearsight.augment.mixup_or_cutmix import MixupOrCutMix
from nearsight.augment.pipeline import Pipeline, grey_levels, normalize
from nearsight.augment.randaugment import RandAugment
from nearsight.augment.resizedcrop import ResizedCrop
from nearsight.augment.smoothing import smooth_targets
from nearsight.augment.solarize import Solarize
from nearsight.augment.tileshuffle import TileShuffle
from nearsight.augment.timm_randaugment import TimmRandAugment
from nearsight.augment.trivialaugment import TrivialAugment

AUGMENTATIONS: dict[str, type[Augmentation]] = {
    kind.name: kind
    for kind in (
        RandomCrop,
        ResizedCrop,
        HorizontalFlip,
        AutoAugment,
        RandAugment,
        TimmRandAugment,
        TrivialAugment,
        ColorJitter,
        RandomGrey,
        GaussianBlur,
        Solarize,
        TileShuffle,
        CutOut,
        RandomErasing,
        CutMix,
        CutFill,
        Mixup,
        MixupOrCutMix,
    )
}
"""Name → class of every augmentation."""

__all__ = [
    "AUGMENTATIONS",
    "Augmentation",
    "AutoAugment",
    "Batch",
    "Cells",
    "ColorJitter",
    "CompiledPipeline",
    "CutFill",
    "CutMix",
    "CutOut",
    "GaussianBlur",
    "HorizontalFlip",
    "Mixup",
    "MixupOrCutMix",
    "Pipeline",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomGrey",
    "ResizedCrop",
    "Solarize",
    "Stage",
    "TileShuffle",
    "TimmRandAugment",
    "TrivialAugment",
    "grey_levels",
    "normalize",
    "smooth_targets",
]
