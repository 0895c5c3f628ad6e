"""DINO (Caron et al. 2021): without labels, a student learns to predict the output of its own running mean."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
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

open_room(__name__)
