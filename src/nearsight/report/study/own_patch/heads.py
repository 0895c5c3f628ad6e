"""Heads that look at their own patch, told by their distance alone, and how near the others of a run look.

What a head does not spend on the query's own patch it spends at the distance of the next patch or farther. So its mean
distance says, without the maps, what its own patch gets at least: 1 − distance / distance of the next patch. Below half
of that distance it gets more than all others together.
"""

import math

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.grid import patches_per_side
from nearsight.study.results import StudyResults

NEAR = 0.5
"""Of the distance of the next patch: below it, a head looks at its own patch."""
HEADS, OTHERS = "own_patch_heads", "min_mad_of_others"


def next_patch(results: StudyResults) -> float:
    """How far the next patch is, as a fraction of the grid's diagonal."""
    side = patches_per_side(results.settings)
    if side is None or side < 2:
        raise InputError("its runs do not share one grid of patches")
    return distance_of_next_patch(side)


def distance_of_next_patch(side: int) -> float:
    """On a square grid of so many patches a side."""
    return 1 / (math.sqrt(2) * (side - 1))


def least_share(distance: float, step: float) -> float:
    """What a head of this distance spends on the query's own patch at least, of its attention on patches."""
    return max(0.0, 1 - distance / step)


def own_patch_heads(results: StudyResults) -> pd.DataFrame:
    """The heads of all runs that look at their own patch."""
    heads = results.heads
    here = heads["run"].isin(results.runs["run"])
    return heads[here & (heads["mad"] < NEAR * next_patch(results))]


def with_own_patch(results: StudyResults) -> pd.DataFrame:
    """The runs whose heads were measured: how many of these look at their own patch, and the nearest of the others."""
    bound = NEAR * next_patch(results)
    heads = results.heads.dropna(subset=["mad"])
    runs = results.runs[results.runs["run"].isin(heads["run"])]
    if runs.empty:
        raise InputError("no run has measured heads")
    counts = heads[heads["mad"] < bound].groupby("run").size()
    others = heads[heads["mad"] >= bound].groupby("run")["mad"].min()
    return runs.assign(**{HEADS: runs["run"].map(counts).fillna(0).astype("int64"), OTHERS: runs["run"].map(others)})
