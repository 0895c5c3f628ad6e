"""What probes measure, by the names of their scores, and how tables and figures call it."""

import re
from collections.abc import Iterable

USUAL_K = 20
"""Of k-NN, where one number has to stand for all: DINO's choice."""
_TITLES = {
    "linear": "linear",
    "retrieve_miou": "retrieval mIoU",
    "segment_miou": "segmentation mIoU",
}
_KNN = "knn_"


def knn_measure(k: int) -> str:
    return f"{_KNN}{k}"


def is_measure(name: str) -> bool:
    return name in _TITLES or re.fullmatch(rf"{_KNN}[0-9]{{1,9}}", name) is not None


def title_of(measure: str) -> str:
    """In words: knn_20 is "k-NN, k = 20"."""
    return f"k-NN, k = {measure.removeprefix(_KNN)}" if measure.startswith(_KNN) else _TITLES[measure]


def ordered(measures: Iterable[str]) -> list[str]:
    """k-NN by k, then linear, retrieval and segmentation."""
    known = set(measures)
    knn = sorted((name for name in known if name.startswith(_KNN)), key=lambda name: int(name.removeprefix(_KNN)))
    return [*knn, *(name for name in _TITLES if name in known)]


def main_measures(measures: Iterable[str]) -> list[str]:
    """One of each probe; of k-NN that of the usual k or, where it is not there, of the smallest."""
    names = ordered(measures)
    knn = [name for name in names if name.startswith(_KNN)]
    kept = [knn_measure(USUAL_K)] if knn_measure(USUAL_K) in knn else knn[:1]
    return [*kept, *names[len(knn) :]]
