"""Locality for models that people already use (S2, LocAt): Gaussian-augmented attention and patch refinement."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.locat.attach import add_locat
    from nearsight.locat.gaussian import GaussianConfig, GaussianHeads, Grid
    from nearsight.locat.refine import refine, refined_map
    from nearsight.locat.registered import BACKBONES, load_official

__all__ = [
    "BACKBONES",
    "GaussianConfig",
    "GaussianHeads",
    "Grid",
    "add_locat",
    "load_official",
    "refine",
    "refined_map",
]

open_room(__name__)
