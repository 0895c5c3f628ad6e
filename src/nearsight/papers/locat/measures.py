"""What the LocAt studies are judged by: accuracy, where heads look and what tokens are like, per run and per layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.responses import with_shares
from nearsight.report.tables import with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, layer_responses, mean_interval


@dataclass(frozen=True, kw_only=True)
class Measure:
    title: str
    """In tables and figures."""
    is_share: bool = False
    """Kept as a fraction, shown in per cent; a difference in points."""

    def told(self, interval: MeanInterval, *, signed: bool = False) -> str:
        scale, digits = (100, 2) if self.is_share else (1, 3)
        return with_interval(interval, scale=scale, digits=digits, signed=signed)


MIN_MAD, MEAN_MAD, MEAN_ENTROPY = Measure(title="min MAD"), Measure(title="mean MAD"), Measure(title="mean entropy")
LOCALITY, SIMILARITY = Measure(title="locality score"), Measure(title="patch–CLS similarity")
OF_RUNS = {
    "test_acc": Measure(title="test accuracy", is_share=True),
    "min_mad": MIN_MAD,
    "mean_mad": MEAN_MAD,
    "mean_entropy": MEAN_ENTROPY,
    "locality_score": LOCALITY,
    "patch_cls_similarity": SIMILARITY,
}
"""Column → what it is, of a run: MAD and entropy over all its heads, the score and the similarity over its layers."""
OF_LAYERS = {
    "mean_mad": MEAN_MAD,
    "min_mad": MIN_MAD,
    "mean_entropy": MEAN_ENTROPY,
    "locality_score": LOCALITY,
    "patch_cls_similarity": SIMILARITY,
}
"""Column → what it is, of a layer of a run: MAD and entropy over its heads, the others of the tokens it gives."""
_OF_TOKENS = ["locality_score", "patch_cls_similarity"]


def measures_of(results: StudyResults, measures: Mapping[str, Measure] = OF_RUNS) -> dict[str, Measure]:
    """These measures, with the shares of attention near a patch where all runs have them."""
    return with_shares(results, measures, lambda title: Measure(title=title, is_share=True))


def run_measures(results: StudyResults) -> pd.DataFrame:
    """The runs with every column of `OF_RUNS`; NaN where a run was not measured so."""
    heads = results.heads.groupby("run").agg(mean_mad=("mad", "mean"), mean_entropy=("entropy", "mean"))
    tokens = results.layers.groupby("run")[_OF_TOKENS].mean()
    table = results.runs.join(heads, on="run").join(tokens, on="run")
    return table.astype(dict.fromkeys(OF_RUNS, "float64"))


def layer_measures(results: StudyResults) -> pd.DataFrame:
    """Per run and layer (from 0): condition, seed and every column of `OF_LAYERS`; NaN as in `run_measures`."""
    layers = layer_responses(results.heads.dropna(subset=["mad", "entropy"]))
    tokens = results.layers[["run", "layer", *_OF_TOKENS]]
    both = layers.merge(tokens.astype({"layer": layers["layer"].dtype}), on=["run", "layer"], how="left")
    table = results.runs[["run", "condition", "seed"]].merge(both, on="run")
    return table.astype(dict.fromkeys(OF_LAYERS, "float64"))


def by_seed(runs: pd.DataFrame, column: str, conditions: Sequence[str]) -> pd.DataFrame:
    """A column per condition, a row per seed that has them all. None such is an `InputError`."""
    values = runs[runs["condition"].isin(conditions)].pivot_table(index="seed", columns="condition", values=column)
    shared = values.reindex(columns=list(conditions)).dropna()
    if shared.empty:
        title = OF_RUNS[column].title
        raise InputError(f"no seed of which all have a {title}: {', '.join(conditions)}")
    return shared


def by_layer(layers: pd.DataFrame, column: str, conditions: Sequence[str]) -> pd.DataFrame:
    """A column per condition, a row per seed and layer, of the seeds that have it in all layers of all conditions."""
    wanted = layers[layers["condition"].isin(conditions)]
    values = wanted.pivot_table(index=["seed", "layer"], columns="condition", values=column, dropna=False)
    values = values.reindex(columns=list(conditions))
    shared = values[values.notna().all(axis=1).groupby("seed").transform("all")]
    if shared.empty:
        title = OF_LAYERS[column].title
        raise InputError(f"no seed of which all have a {title} in every layer: {', '.join(conditions)}")
    return shared


def interval_of(runs: pd.DataFrame, condition: str, column: str) -> MeanInterval:
    """Over the seeds of a condition that have it."""
    return mean_interval(runs.loc[runs["condition"] == condition, column].dropna())
