"""What the claims about heads are judged by, seed by seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.study.results import StudyResults
from nearsight.study.statistics import energy_distance, layer_responses

EARLY_LAYERS = 2


def shared_seeds(results: StudyResults, *conditions: str) -> list[int]:
    """The seeds of which every one of the conditions has a run."""
    runs = results.runs
    seeds = [set(runs.loc[runs["condition"] == condition, "seed"]) for condition in conditions]
    return sorted(int(seed) for seed in set.intersection(*seeds))


@dataclass(frozen=True, kw_only=True, eq=False)
class RunHeads:
    """The heads of one run that exist, in the order of the table."""

    layer: NDArray[np.int64]
    mad: NDArray[np.float64]
    entropy: NDArray[np.float64]
    by_layer: Mapping[str, NDArray[np.float64]]
    """Columns of `layer_responses`, from the first layer to the last."""


def heads_of(results: StudyResults, condition: str, seed: int) -> RunHeads:
    found = _heads_by_run(results)[condition, seed]
    if not found.mad.size:
        raise InputError(f"no head of {condition}, seed {seed}, could be measured")
    return found


@lru_cache(maxsize=1)  # one study after the other is judged, by many claims each
def _heads_by_run(results: StudyResults) -> dict[tuple[str, int], RunHeads]:
    heads = results.heads.dropna(subset=["mad", "entropy"])
    of_layers = layer_responses(heads).sort_values("layer", kind="stable")
    columns = {name: heads[name].to_numpy() for name in ("layer", "mad", "entropy")}
    means = {name: of_layers[name].to_numpy(dtype=np.float64) for name in ("mean_mad", "mean_entropy")}
    rows, rows_of_layers = (frame.groupby("run").indices for frame in (heads, of_layers))
    none = np.empty(0, dtype=np.intp)
    runs = results.runs
    return {
        (condition, int(seed)): RunHeads(
            **{name: values[rows.get(run, none)] for name, values in columns.items()},
            by_layer={name: values[rows_of_layers.get(run, none)] for name, values in means.items()},
        )
        for run, condition, seed in zip(runs["run"], runs["condition"], runs["seed"], strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The heads of two conditions at one seed."""

    base: RunHeads
    full: RunHeads

    def early(self, column: str) -> tuple[float, float]:
        """The mean over the first layers, of the base and of the full protocol."""
        base, full = (float(heads.by_layer[column][:EARLY_LAYERS].mean()) for heads in (self.base, self.full))
        return base, full

    @property
    def most_local_layer(self) -> int:
        """The layer of the full protocol's most local head, from 0."""
        return int(self.full.layer[self.full.mad.argmin()])

    @property
    def first_layers(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The distances of the first layer's heads, of the base and of the full protocol."""
        base, full = (heads.mad[heads.layer == heads.layer.min()] for heads in (self.base, self.full))
        return base, full

    @property
    def depth_correlations(self) -> tuple[float, float]:
        """Spearman's correlation of depth and mean distance over layers, of the base and of the full protocol."""
        return _rank_correlation(self.base.by_layer["mean_mad"]), _rank_correlation(self.full.by_layer["mean_mad"])

    @property
    def gaps(self) -> tuple[float, float]:
        """How far the full protocol's mean distance is below the base's, in the first and in the last layer."""
        gap = self.base.by_layer["mean_mad"] - self.full.by_layer["mean_mad"]
        return float(gap[0]), float(gap[-1])

    @property
    def heads_below_the_base(self) -> tuple[int, int]:
        """Heads of the full protocol below every head of the base: in distance, and in distance and entropy at once."""
        nearer = self.full.mad < self.base.mad.min()
        return int(nearer.sum()), int((nearer & (self.full.entropy < self.base.entropy.min())).sum())


def _rank_correlation(values: NDArray[np.float64]) -> float:
    """With the place in the row; 0 where all values are alike, or there is only one."""
    from scipy import stats  # here, because it takes most of a second

    if len(values) < 2 or np.ptp(values) == 0:
        return 0.0
    return float(stats.spearmanr(np.arange(len(values)), values).statistic)


def cloud_distance(a: RunHeads, b: RunHeads) -> float:
    """How far apart two models lie in the plane of distance and entropy."""
    return energy_distance(*(np.column_stack([heads.mad, heads.entropy]) for heads in (a, b)))
