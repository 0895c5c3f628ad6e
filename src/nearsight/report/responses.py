"""What tables ask of a run and of its layers: accuracy, how far and how evenly heads look, and what tokens are like.

A head that attends to the nearest edge of the image has a small distance too, and is not local: the largest shares of
attention near a patch separate the two.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pandas as pd

from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.report.tables import Row, columns_of, percent, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, layer_responses, mean_interval
from nearsight.study.statistics.intervals import by_seed


def patches_per_side(settings: Mapping[str, object]) -> int | None:
    """From what all cells share; None where that does not say it."""
    name, patch = settings.get("data.name"), settings.get("model.patch_size")
    if not isinstance(name, str) or not isinstance(patch, int) or "data.image_size" not in settings:
        return None
    size = settings["data.image_size"] or dataset_spec(name).image_size
    assert isinstance(size, int)
    return size // patch


Shown = TypeVar("Shown")

SHARES: Mapping[str, str] = {"max_share_self": "max share on itself", "max_share_near": "max share on 3×3"}
"""Column of a run → what it is called. Fractions, shown in per cent."""


def known_shares(results: StudyResults) -> Mapping[str, str]:
    """`SHARES` where every run with heads has them, otherwise none: runs of earlier versions lack them."""
    runs = results.runs
    if not set(SHARES) <= set(runs.columns):
        return {}
    measured = runs.loc[runs["min_mad"].notna(), list(SHARES)]
    return SHARES if len(measured) and measured.notna().all(axis=None) else {}


def with_shares(
    results: StudyResults, shown: Mapping[str, Shown], of_share: Callable[[str], Shown]
) -> dict[str, Shown]:
    """What is shown of a run, by column, with the shares that are known after the smallest distance.

    `of_share`: from a share's title to how it is shown.
    """
    found: dict[str, Shown] = {}
    for column, words in shown.items():
        found[column] = words
        if column == "min_mad":
            found |= {share: of_share(title) for share, title in known_shares(results).items()}
    return found


def share_notes(results: StudyResults) -> list[str]:
    """What the shares are, under a table that has them."""
    if not known_shares(results):
        return []
    text = (
        "Max share: the part of its attention that a patch spends on itself, and on itself and the up to 8 patches "
        "around it (3×3), mean over patches and images, in the head that spends most there. More is more local. "
        "Where it is small although min MAD is small too, the head of that MAD attends elsewhere, for example to the "
        "nearest edge of the image."
    )
    side = patches_per_side(results.settings)
    if side:
        near = (3 * side - 2) ** 2 / side**2  # patches, on average: those at the edge have fewer neighbours
        even = (percent(count / side**2) for count in (1, near))
        text += f" Spread evenly over all patches it would be {' and '.join(even)} %, less what CLS takes."
    return [text]


EARLY_LAYERS = 2
"""The first layers of a model."""
EARLY = "early_mad"

Response = tuple[str, float, int]
"""What it is called, the factor it is shown with, and its decimals."""
RESPONSES: Mapping[str, Response] = {
    "min_mad": ("min MAD", 1.0, 3),
    EARLY: ("MAD, early layers", 1.0, 3),
    "min_entropy": ("min entropy", 1.0, 3),
    "test_acc": ("accuracy, points", 100.0, 2),
}
"""By the column of a run."""


def responses_of(results: StudyResults) -> dict[str, Response]:
    """`RESPONSES`, with the shares of attention near a patch where all runs have them."""
    return with_shares(results, RESPONSES, lambda title: (f"{title}, points", 100.0, 2))


def with_early_layers(results: StudyResults) -> pd.DataFrame:
    """The runs with one more column: the mean distance over the heads of the first layers."""
    layers = layer_responses(results.heads)
    early = layers[layers["layer"] < EARLY_LAYERS].groupby("run")["mean_mad"].mean()
    return results.runs.assign(**{EARLY: results.runs["run"].map(early)})


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a number of a run or of a layer is, and how a table has its mean over seeds."""

    title: str
    is_share: bool = False
    """Kept as a fraction, shown in per cent; a difference in points."""

    def in_words(self, interval: Estimate, *, signed: bool = False) -> str:
        scale, digits = (100, 2) if self.is_share else (1, 3)
        return with_interval(interval, scale=scale, digits=digits, signed=signed)

    def put(self, row: Row, column: str, interval: Estimate, *, unit: str = "%", signed: bool = False) -> None:
        """Into a row of a table, with the unit of a share in its title."""
        row.keep(**columns_of(column, interval))
        row.show(f"{self.title}, {unit}" if self.is_share else self.title, self.in_words(interval, signed=signed))


OF_LAYERS = {
    "mean_mad": Measure(title="mean MAD"),
    "min_mad": Measure(title="min MAD"),
    "mean_entropy": Measure(title="mean entropy"),
    "locality_score": Measure(title="locality score"),
    "patch_cls_similarity": Measure(title="patch–CLS similarity"),
}
"""Column → what it is, of a layer of a run: MAD and entropy over its heads, the others of the tokens it gives."""
OF_RUNS = {
    "test_acc": Measure(title="test accuracy", is_share=True),
    **{"min_mad": OF_LAYERS["min_mad"], "mean_mad": OF_LAYERS["mean_mad"]},
    **OF_LAYERS,
}
"""Column → what it is, of a run: MAD and entropy over all its heads, the score and the similarity over its layers."""
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


def interval_of(runs: pd.DataFrame, condition: str, column: str) -> Estimate:
    """Over the seeds of a condition that have it."""
    return mean_interval(runs.loc[runs["condition"] == condition, column].dropna())


def of_shared_seeds(runs: pd.DataFrame, column: str, conditions: Sequence[str], title: str) -> pd.DataFrame:
    """A column per condition, a row per seed that has them all. None such is an `InputError`; `title`: the measure."""
    shared = by_seed(runs, column).reindex(columns=list(conditions)).dropna()
    if shared.empty:
        raise InputError(f"no seed has runs with a {title} of all of these: {', '.join(conditions)}")
    return shared
