"""Scores of probes: how far they would move on other test images like these, and how they are kept.

The images are drawn again and again, with replacement. A score of a data set is a function of sums over its images:
right answers for an accuracy; hits, true and predicted pixels of each class for an mIoU. So a resample is a row of
counts, and all of them are one matrix product in float64. The ends of an interval are percentiles of the resampled
scores (Efron 1979). The same seed and number of images draw the same images, whatever is scored.

On disk there is a file for each probe, named by everything its numbers depend on: results/PROBE-IDENTITY.json has the
scores with their intervals, and what they are of. The identity is that of the model (weights, and settings that no
weight shows, such as the number of heads), the data and the options. So a probe that was done once is found again,
whatever the model is called, and never mistaken for another.

Shape suffixes: N images, D numbers of each, R resamples, C classes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearsight.configuration import decode
from nearsight.errors import InputError, check_at_least
from nearsight.files import canonical_hash, write_json

LEVEL = 0.95
NUM_RESAMPLES = 2000
_DRAWN_AT_ONCE = 2**22

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number over test images and its 95 % interval."""

    value: float
    low: float | None
    high: float | None
    """None where there is one image, which has no spread to learn from."""
    num_images: int

    def as_json(self) -> dict[str, float | int | None]:
        return asdict(self)


def accuracy_score(right_N: Tensor, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Score:
    """The share of right answers."""
    numbers_N1 = right_N.double().cpu().numpy()[:, None]
    return bootstrapped(numbers_N1, lambda sums_R1: sums_R1[:, 0] / len(right_N), num_resamples, seed)


def image_counts(confusion_CC: Tensor) -> Tensor:
    """What an mIoU needs of an image's confusion matrix: hits, true and predicted pixels of each class, [3, C]."""
    return torch.stack([confusion_CC.diagonal(), confusion_CC.sum(1), confusion_CC.sum(0)])


def miou_score(
    counts_N3C: Tensor, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0, count_absent: bool = False
) -> Score:
    """The mean IoU over the data set.

    A class that a resample neither has nor predicts is left out of its mean, as in the whole data set. With few images
    that lifts resamples without the rare, hard classes, and the interval reaches further up than down. Or they
    `count_absent` classes with 0.
    """
    num_classes = counts_N3C.shape[2]

    def mean_iou(sums_RD: Array) -> Array:
        hits_RC, truth_RC, predicted_RC = sums_RD.reshape(-1, 3, num_classes).transpose(1, 0, 2)
        union_RC = truth_RC + predicted_RC - hits_RC
        present_RC = union_RC > 0
        ious_RC = hits_RC / np.where(present_RC, union_RC, 1.0)
        # Images without a single labelled pixel alone have no mIoU; percentiles leave it out.
        num_present_R = np.full(len(hits_RC), num_classes) if count_absent else present_RC.sum(1)
        return np.where(num_present_R > 0, ious_RC.sum(1) / np.maximum(num_present_R, 1), np.nan)

    return bootstrapped(counts_N3C.double().flatten(1).cpu().numpy(), mean_iou, num_resamples, seed)


def bootstrapped(numbers_ND: Array, score: Callable[[Array], Array], num_resamples: int, seed: int) -> Score:
    """`score`: from sums over images [R, D] to the score of each, [R]."""
    check_at_least("num_resamples", num_resamples, 1)
    num_images = len(numbers_ND)
    if num_images == 0:
        raise InputError("there are no test images, so there is no score")
    value = float(score(numbers_ND.sum(0, keepdims=True))[0])
    if num_images == 1:
        return Score(value=value, low=None, high=None, num_images=1)
    resampled_R = score(_resampled_sums(numbers_ND, num_resamples, seed))
    low, high = np.nanquantile(resampled_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Score(value=value, low=float(low), high=float(high), num_images=num_images)


def _resampled_sums(numbers_ND: Array, num_resamples: int, seed: int) -> Array:
    """[R, D]."""
    num_images, generator = len(numbers_ND), np.random.default_rng(seed)
    parts = []
    at_once = max(1, _DRAWN_AT_ONCE // num_images)
    for begin in range(0, num_resamples, at_once):
        num = min(at_once, num_resamples - begin)
        drawn_RN = generator.integers(num_images, size=(num, num_images))
        drawn_RN += num_images * np.arange(num)[:, None]
        times_RN = np.bincount(drawn_RN.ravel(), minlength=num * num_images).reshape(num, num_images)
        parts.append(times_RN.astype(np.float64) @ numbers_ND)
    return np.concatenate(parts)


VERSION = 1
"""Raise it whenever the same key would mean other numbers."""


@dataclass(frozen=True, kw_only=True)
class ProbeKey:
    """What the numbers of a probe depend on."""

    probe: str
    """knn, linear, retrieve or segment."""
    model: str
    """Its `nearsight.probe.frozen.model_identity`."""
    preparation: Mapping[str, Any]
    """How its images are prepared."""
    data: str
    """Fingerprint of the data set."""
    settings: Mapping[str, Any]
    """Everything else."""

    @property
    def identity(self) -> str:
        # Through JSON, in which a tuple is a list.
        return canonical_hash({"version": VERSION, **json.loads(json.dumps(vars(self)))})


@dataclass(frozen=True, kw_only=True)
class StoredProbe:
    """What a probe found."""

    probe: str
    identity: str
    scores: Mapping[str, Score]
    """By the name of what is measured."""
    told: Mapping[str, Any]
    """Whose features these are and which, the data set, the settings, and further numbers."""


class ProbeStore:
    """The results in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: ProbeKey) -> Path:
        return self._folder / f"{key.probe}-{key.identity}.json"

    def read(self, key: ProbeKey) -> StoredProbe | None:
        """The stored probe; None where there is none, or a damaged one."""
        try:
            held = json.loads(self.path(key).read_text(encoding="utf-8"))
            scores = {name: decode(Score, score) for name, score in held.pop("scores").items()}
            if (held.pop("probe"), held.pop("identity")) != (key.probe, key.identity):
                return None
        except (OSError, ValueError, KeyError, AttributeError, RecursionError):  # an InputError is a ValueError
            return None
        return StoredProbe(probe=key.probe, identity=key.identity, scores=scores, told=held)

    def write(self, key: ProbeKey, scores: Mapping[str, Score], told: Mapping[str, Any]) -> StoredProbe:
        """Write it atomically."""
        of_scores = {name: score.as_json() for name, score in scores.items()}
        write_json(
            self.path(key), {"probe": key.probe, "identity": key.identity, "scores": of_scores, **told}, allow_nan=False
        )
        return StoredProbe(probe=key.probe, identity=key.identity, scores=scores, told=told)
