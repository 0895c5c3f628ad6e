"""What is done to a batch of images: tensor in, tensor out, the same on CPU and CUDA, with strengths per cell.

A new augmentation is one file here, or anywhere else: a class under `@register_augmentation`.
"""

import importlib
import pkgutil

from nearsight.augment.autoaugment import AutoAugment, RandAugment, TimmRandAugment, TrivialAugment
from nearsight.augment.base import AUGMENTATIONS, Augmentation, Batch, Cells, Stage, chosen, register_augmentation
from nearsight.augment.colour import ColorJitter, GaussianBlur, RandomGrey, Solarize
from nearsight.augment.geometry import HorizontalFlip, RandomCrop, ResizedCrop
from nearsight.augment.mixing import CutFill, CutMix, Mixup, MixupOrCutMix
from nearsight.augment.occlusion import CutOut, RandomErasing, TileShuffle
from nearsight.augment.pipeline import CompiledPipeline, Pipeline, grey_levels, normalize, smooth_targets
from nearsight.augment.streams import Drawn

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"nearsight.augment.{_module.name}")  # which registers what it defines

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
    "Drawn",
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
    "chosen",
    "grey_levels",
    "normalize",
    "register_augmentation",
    "smooth_targets",
]
