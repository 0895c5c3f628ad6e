"""When heads become local: the course of training of every run, in numbers.

A head is local while its distance is below the smallest that the paper found in any condition without CutMix, 0.210; on
the 8×8 grid that is half the distance of uniform attention.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.papers.protocol.numbers import PUBLISHED, without_cutmix
from nearsight.report.own_patch import OWN_PATCH
from nearsight.study.results import StudyResults
from nearsight.study.statistics.intervals import LOCALITY_MARGIN

Array = NDArray[np.float64]

LOCAL = min(float(PUBLISHED["ablation-cifar100"].conditions[label].min_mad or 1.0) for label in without_cutmix())
# A head is global again well above that line, not just across it.
GLOBAL_AGAIN = LOCAL + LOCALITY_MARGIN
# Measurements in a row that make a state rather than a flicker.
LASTING = 3


class Turn(NamedTuple):
    """When a head came below some distance, and stayed so for a while."""

    epoch: int
    layer: int
    """From 0."""
    lasted: float
    """Epochs since it was last as far as some other distance, or farther; NaN where it never was."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, L{self.layer}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """One run while it trained. Shapes: E measured epochs, L layers, H heads."""

    condition: str
    seed: int
    epochs_E: Array
    mad_ELH: Array
    entropy_ELH: Array
    accuracy: pd.Series
    """Validation accuracy by epoch, from 0, at which it counts as 0."""

    @property
    def smallest(self) -> Array:
        """The distance of the most local head [E]."""
        return np.asarray(np.nanmin(self.mad_ELH, axis=(1, 2)))

    def first_local(self) -> Turn | None:
        """Of the first head that becomes local."""
        return self._first_below(LOCAL, LOCAL)

    def first_own_patch(self, step: float) -> Turn | None:
        """Of the first head that turns to its own patch; `step`: the distance of the next one."""
        return self._first_below(OWN_PATCH * step, step)

    def _first_below(self, bound: float, far: float) -> Turn | None:
        """Of the first head that is below a distance and stays so for a while; `far`: since when its way is counted."""
        for place in range(len(self.epochs_E) - LASTING + 1):
            stays_LH = (self.mad_ELH[place : place + LASTING] < bound).all(axis=0)
            if stays_LH.any():
                distance_LH = np.where(stays_LH, self.mad_ELH[place], np.inf)
                layer, head = np.unravel_index(distance_LH.argmin(), distance_LH.shape)
                (farther,) = np.nonzero(self.mad_ELH[:place, layer, head] >= far)
                lasted = self.epochs_E[place] - self.epochs_E[farther[-1]] if farther.size else float("nan")
                return Turn(int(self.epochs_E[place]), int(layer), float(lasted))
        return None

    def num_local(self) -> int:
        """Heads that are local at the end."""
        return int((self.mad_ELH[-1] < LOCAL).sum())

    def turned(self) -> tuple[int, int]:
        """Heads that were local for a while, and those of them that were global again for a while."""
        _, num_layers, num_heads = self.mad_ELH.shape
        became = again = 0
        for layer, head in np.ndindex(num_layers, num_heads):
            mad_E = self.mad_ELH[:, layer, head]
            since = _first_run(mad_E < LOCAL)
            if since is not None:
                became += 1
                again += _first_run(mad_E[since:] >= GLOBAL_AGAIN) is not None
        return became, again

    def locality_half(self) -> float:
        """The epoch at which the smallest distance has made half of its way down; NaN where it went up."""
        return half_way(self.epochs_E, self.smallest) if self.smallest[-1] < self.smallest[0] else float("nan")

    def accuracy_half(self) -> float:
        """Likewise of the validation accuracy."""
        return half_way(self.accuracy.index.to_numpy(dtype=np.float64), self.accuracy.to_numpy(dtype=np.float64))


def _first_run(is_so_E: NDArray[np.bool_]) -> int | None:
    """Where something begins to be so `LASTING` times in a row."""
    for place in range(len(is_so_E) - LASTING + 1):
        if is_so_E[place : place + LASTING].all():
            return place
    return None


def half_way(epochs_E: Array, values_E: Array) -> float:
    """When a course first reaches the middle between its first and last value; between epochs by a straight line."""
    middle = (values_E[0] + values_E[-1]) / 2
    sign = np.sign(values_E[-1] - values_E[0])
    if sign == 0:
        return float("nan")
    for place, (before, after) in enumerate(pairwise(values_E)):
        if sign * (after - middle) >= 0:
            share = (middle - before) / (after - before)
            return float(epochs_E[place] + share * (epochs_E[place + 1] - epochs_E[place]))
    return float("nan")


def courses(results: StudyResults) -> list[Course]:
    """Those of all runs that were measured while they trained."""
    found = []
    for row in results.runs.itertuples(index=False):
        heads = results.course[results.course["run"] == row.run]
        if heads.empty:
            continue
        epochs = np.sort(heads["epoch"].unique()).astype(np.float64)
        history = results.history[results.history["run"] == row.run].set_index("epoch")["val_acc"]
        found.append(
            Course(
                condition=str(row.condition),
                seed=int(str(row.seed)),
                epochs_E=epochs,
                mad_ELH=_cube(heads, "mad"),
                entropy_ELH=_cube(heads, "entropy"),
                accuracy=pd.concat([pd.Series({0: 0.0}), history]),
            )
        )
    if not found:
        raise InputError("no run was measured while it trained")
    depths = {course.mad_ELH.shape[1]: course for course in found}
    if len(depths) > 1:
        words = " and ".join(f"{each.condition}, seed {each.seed}, {depth}" for depth, each in sorted(depths.items()))
        raise InputError(f"runs compared while they train need the same number of layers, but these differ: {words}")
    return found


def _cube(heads: pd.DataFrame, column: str) -> Array:
    """A number per epoch, layer and head [E, L, H]; NaN for heads that do not exist."""
    names = ("epoch", "layer", "head")
    known, places = zip(*(np.unique(heads[name], return_inverse=True) for name in names), strict=True)
    cube = np.full([len(values) for values in known], np.nan)
    cube[places] = heads[column]
    return cube


def conditions_of(found: Iterable[Course]) -> list[str]:
    return list(dict.fromkeys(course.condition for course in found))
