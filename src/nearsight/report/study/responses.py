"""What is asked of a run in tables of our own questions."""

from collections.abc import Mapping

import pandas as pd

from nearsight.report.study.measures import EARLY_LAYERS
from nearsight.report.study.shares import with_shares
from nearsight.study.results import StudyResults
from nearsight.study.statistics import layer_responses

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
