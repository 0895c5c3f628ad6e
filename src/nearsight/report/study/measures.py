"""What the claims about heads are judged by, seed by seed."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from nearsight.study.results import StudyResults
from nearsight.study.statistics import energy_distance, layer_responses

EARLY_LAYERS = 2


def shared_seeds(results: StudyResults, *conditions: str) -> list[int]:
    """The seeds of which every one of the conditions has a run."""
    runs = results.runs
    seeds = [set(runs.loc[runs["condition"] == condition, "seed"]) for condition in conditions]
    return sorted(int(seed) for seed in set.intersection(*seeds))


def heads_of(results: StudyResults, condition: str, seed: int) -> pd.DataFrame:
    """The heads of one run that exist."""
    runs = results.runs
    here = runs.loc[(runs["condition"] == condition) & (runs["seed"] == seed), "run"]
    return results.heads[results.heads["run"].isin(here)].dropna(subset=["mad", "entropy"])


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The heads of two conditions at one seed."""

    base: pd.DataFrame
    full: pd.DataFrame

    def early(self, column: str) -> tuple[float, float]:
        """The mean over the first layers, of the base and of the full protocol."""
        base, full = (float(_by_layer(heads, column)[:EARLY_LAYERS].mean()) for heads in (self.base, self.full))
        return base, full

    @property
    def most_local_layer(self) -> int:
        """The layer of the full protocol's most local head, from 0."""
        return int(self.full["layer"].iloc[int(self.full["mad"].argmin())])

    @property
    def first_layers(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The distances of the first layer's heads, of the base and of the full protocol."""
        base, full = (
            heads.loc[heads["layer"] == heads["layer"].min(), "mad"].to_numpy(dtype=np.float64)
            for heads in (self.base, self.full)
        )
        return base, full

    @property
    def depth_correlations(self) -> tuple[float, float]:
        """Spearman's correlation of depth and mean distance over layers, of the base and of the full protocol."""
        base, full = (_by_layer(heads, "mean_mad") for heads in (self.base, self.full))
        return _rank_correlation(base), _rank_correlation(full)

    @property
    def gaps(self) -> tuple[float, float]:
        """How far the full protocol's mean distance is below the base's, in the first and in the last layer."""
        gap = _by_layer(self.base, "mean_mad") - _by_layer(self.full, "mean_mad")
        return float(gap[0]), float(gap[-1])

    @property
    def heads_below_the_base(self) -> tuple[int, int]:
        """Heads of the full protocol below every head of the base: in distance, and in distance and entropy at once."""
        nearer = self.full["mad"] < self.base["mad"].min()
        return int(nearer.sum()), int((nearer & (self.full["entropy"] < self.base["entropy"].min())).sum())


def _by_layer(heads: pd.DataFrame, column: str) -> NDArray[np.float64]:
    """A number per layer, from the first to the last."""
    return layer_responses(heads).sort_values("layer")[column].to_numpy(dtype=np.float64)


def _rank_correlation(values: NDArray[np.float64]) -> float:
    """With the place in the row; 0 where all values are alike, or there is only one."""
    if len(values) < 2 or np.ptp(values) == 0:
        return 0.0
    return float(stats.spearmanr(np.arange(len(values)), values).statistic)


def cloud_distance(a: pd.DataFrame, b: pd.DataFrame) -> float:
    """How far apart two models lie in the plane of distance and entropy."""
    return energy_distance(a[["mad", "entropy"]], b[["mad", "entropy"]])
