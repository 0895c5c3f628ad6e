"""What a study's runs say, as pure functions on data frames with a row per run (or per head of a run)."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
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
    from nearsight.study.statistics.significance import holm, p_of_sign, p_within, share_interval

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
    "holm",
    "layer_responses",
    "least_squares",
    "mean_interval",
    "p_of_sign",
    "p_within",
    "paired_difference",
    "separation",
    "share_interval",
    "sorted_heads",
]

open_room(__name__)
