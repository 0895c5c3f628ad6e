"""Pure functions on tensors, each with its paper in its docstring; no models, no files."""

from nearsight.metrics.attention import (
    attention_distance,
    attention_entropy,
    grid_distances,
    uniform_attention_distance,
)
from nearsight.metrics.features import linear_cka, locality_score, patch_cls_similarity
from nearsight.metrics.moments import Moments

__all__ = [
    "Moments",
    "attention_distance",
    "attention_entropy",
    "grid_distances",
    "linear_cka",
    "locality_score",
    "patch_cls_similarity",
    "uniform_attention_distance",
]
