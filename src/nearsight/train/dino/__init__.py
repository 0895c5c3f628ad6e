"""DINO (Caron et al. 2021): a student learns, without labels, to say of crops what its own running mean says."""

from nearsight.train.dino.config import CropsConfig, DinoConfig, DinoProtocol, ImagesConfig
from nearsight.train.dino.running import COLLAPSED_BELOW, DinoFolder, DinoListener, DinoRow, pretrain
from nearsight.train.dino.training import DinoTraining

__all__ = [
    "COLLAPSED_BELOW",
    "CropsConfig",
    "DinoConfig",
    "DinoFolder",
    "DinoListener",
    "DinoProtocol",
    "DinoRow",
    "DinoTraining",
    "ImagesConfig",
    "pretrain",
]
