"""What a study's runs say, as pure functions on data frames with a row per run (or per head of a run)."""

from nearsight.study.statistics.effects import Effects, LeastSquares, factorial_effects, least_squares
from nearsight.study.statistics.intervals import (
    Estimate,
    by_condition,
    correlations,
    dissociations,
    energy_distance,
    layer_responses,
    mean_interval,
    paired_difference,
    sorted_heads,
)
from nearsight.study.statistics.permutation import Separation, separation

__all__ = [
    "Effects",
    "Estimate",
    "LeastSquares",
    "Separation",
    "by_condition",
    "correlations",
    "dissociations",
    "energy_distance",
    "factorial_effects",
    "layer_responses",
    "least_squares",
    "mean_interval",
    "paired_difference",
    "separation",
    "sorted_heads",
]
