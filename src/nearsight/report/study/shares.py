"""The largest shares of attention near a patch, beside the smallest distance.

A head that looks at the nearest edge of the image has a small distance too, and does not look near: the shares tell the
two apart.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from nearsight.report.study.grid import patches_per_side
from nearsight.report.study.table import percent
from nearsight.study.results import StudyResults

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
