"""What is asked of a run in tables of our own questions."""

from collections.abc import Mapping

import pandas as pd

from nearsight.report.study.measures import EARLY_LAYERS
from nearsight.study.results import StudyResults
from nearsight.study.statistics import layer_responses

EARLY = "early_mad"

RESPONSES: Mapping[str, tuple[str, float, int]] = {
    "min_mad": ("min MAD", 1.0, 3),
    EARLY: ("MAD, early layers", 1.0, 3),
    "min_entropy": ("min entropy", 1.0, 3),
    "test_acc": ("accuracy, points", 100.0, 2),
}
"""Column → what it is called, the factor it is shown with, and its decimals."""


def with_early_layers(results: StudyResults) -> pd.DataFrame:
    """The runs with one more column: the mean distance over the heads of the first layers."""
    layers = layer_responses(results.heads)
    early = layers[layers["layer"] < EARLY_LAYERS].groupby("run")["mean_mad"].mean()
    return results.runs.assign(**{EARLY: results.runs["run"].map(early)})
