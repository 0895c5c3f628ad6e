"""What tables ask of a run: the smallest distance, the early layers, entropy, accuracy, and shares near a patch.

A head that looks at the nearest edge of the image has a small distance too, and does not look near: the largest shares
of attention near a patch tell the two apart.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import pandas as pd

from nearsight.data.loading import dataset_spec
from nearsight.report.tables import percent
from nearsight.study.results import StudyResults
from nearsight.study.statistics import layer_responses


def patches_per_side(settings: Mapping[str, object]) -> int | None:
    """From what all cells share; None where that does not say it."""
    name, patch = settings.get("data.name"), settings.get("model.patch_size")
    if not isinstance(name, str) or not isinstance(patch, int) or "data.image_size" not in settings:
        return None
    size = settings["data.image_size"] or dataset_spec(name).image_size
    assert isinstance(size, int)
    return size // patch


Told = TypeVar("Told")

SHARES: Mapping[str, str] = {"max_share_self": "max share on itself", "max_share_near": "max share on 3×3"}
"""Column of a run → what it is called. Fractions, shown in per cent."""


def known_shares(results: StudyResults) -> Mapping[str, str]:
    """`SHARES` where every run with heads has them, else none: runs of earlier versions have not."""
    runs = results.runs
    if not set(SHARES) <= set(runs.columns):
        return {}
    measured = runs.loc[runs["min_mad"].notna(), list(SHARES)]
    return SHARES if len(measured) and measured.notna().all(axis=None) else {}


def with_shares(results: StudyResults, told: Mapping[str, Told], tell: Callable[[str], Told]) -> dict[str, Told]:
    """What is told of a run, by column, with the shares that are known after the smallest distance.

    `tell`: from what a share is called to how it is told.
    """
    found: dict[str, Told] = {}
    for column, words in told.items():
        found[column] = words
        if column == "min_mad":
            found |= {share: tell(title) for share, title in known_shares(results).items()}
    return found


def share_notes(results: StudyResults) -> list[str]:
    """What the shares are, under a table that has them."""
    if not known_shares(results):
        return []
    told = (
        "Max share: the part of its attention that a patch spends on itself, and on itself and the up to 8 patches "
        "around it (3×3), mean over patches and images, in the head that spends most there. More is nearer. Where it "
        "is small though min MAD is small too, the head of that MAD looks elsewhere, as at the nearest edge of the "
        "image."
    )
    side = patches_per_side(results.settings)
    if side:
        near = (3 * side - 2) ** 2 / side**2  # patches, on average: those at the edge have fewer neighbours
        even = (percent(count / side**2) for count in (1, near))
        told += f" Spread evenly over all patches it would be {' and '.join(even)} %, less what CLS takes."
    return [told]


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
