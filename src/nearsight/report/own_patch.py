"""Own-patch heads, found by their distance alone, and the distances of a run's other heads.

What a head does not spend on the query's own patch it spends at the distance of the next patch or farther. So its mean
distance says, without the maps, what its own patch gets at least: 1 − distance / distance of the next patch. Below half
of that distance it gets more than all others together.
"""

from typing import Final

import pandas as pd

from nearsight.errors import InputError
from nearsight.metrics import next_patch_distance
from nearsight.report.responses import patches_per_side
from nearsight.study.results import StudyResults

OWN_PATCH: Final = 0.5
"""Of the distance to the next patch: a head below it spends more on the query's own patch than on all others."""


HEADS, OTHERS = "own_patch_heads", "min_mad_of_others"


def grid_of(results: StudyResults) -> tuple[int, int]:
    """Rows and columns of the patches that all runs see."""
    side = patches_per_side(results.settings)
    if side is None or side < 2:
        raise InputError("its runs do not share one grid of patches")
    return side, side


def own_patch_bound(results: StudyResults) -> float:
    """The distance below which a head is an own-patch head."""
    return OWN_PATCH * next_patch_distance(grid_of(results))


def own_patch_heads(results: StudyResults) -> pd.DataFrame:
    """The own-patch heads of all runs."""
    heads = results.heads
    here = heads["run"].isin(results.runs["run"])
    return heads[here & (heads["mad"] < own_patch_bound(results))]


def with_own_patch(results: StudyResults) -> pd.DataFrame:
    """The runs whose heads were measured: how many of these are own-patch heads, and the most local of the others."""
    bound = own_patch_bound(results)
    heads = results.heads.dropna(subset=["mad"])
    runs = results.runs[results.runs["run"].isin(heads["run"])]
    if runs.empty:
        raise InputError("no run has measured heads")
    counts = heads[heads["mad"] < bound].groupby("run").size()
    others = heads[heads["mad"] >= bound].groupby("run")["mad"].min()
    return runs.assign(**{HEADS: runs["run"].map(counts).fillna(0).astype("int64"), OTHERS: runs["run"].map(others)})
