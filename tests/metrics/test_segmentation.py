"""Scores of segmentations against loops over pixels."""

import math

import pytest
import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.metrics.segmentation import (
    confusion_matrix,
    mean_iou,
    per_class_accuracy,
    per_class_iou,
    pixel_accuracy,
)

IGNORED = 255


def counted(prediction: Tensor, truth: Tensor, num_classes: int) -> list[list[int]]:
    counts = [[0] * num_classes for _ in range(num_classes)]
    for label, seen in zip(truth.flatten().tolist(), prediction.flatten().tolist(), strict=True):
        if label != IGNORED:
            counts[label][seen] += 1
    return counts


def iou_by_sets(prediction: Tensor, truth: Tensor, label: int) -> float:
    known = [place for place, value in enumerate(truth.flatten().tolist()) if value != IGNORED]
    is_there = {place for place in known if truth.flatten()[place] == label}
    is_seen = {place for place in known if prediction.flatten()[place] == label}
    return len(is_there & is_seen) / len(is_there | is_seen) if is_there | is_seen else math.nan


def random_masks(num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # The last class is in neither, the one before only predicted.
    prediction = torch.randint(num_classes - 1, (3, 11, 13), generator=generator)
    truth = torch.randint(num_classes - 2, (3, 11, 13), generator=generator).to(torch.uint8)
    truth[torch.rand(truth.shape, generator=generator) < 0.2] = IGNORED
    return prediction, truth


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_loops(seed: int) -> None:
    num_classes = 6
    prediction, truth = random_masks(num_classes, seed)
    confusion = confusion_matrix(prediction, truth, num_classes, IGNORED)
    assert confusion.tolist() == counted(prediction, truth, num_classes)
    expected = [iou_by_sets(prediction, truth, label) for label in range(num_classes)]
    assert per_class_iou(confusion).tolist() == pytest.approx(expected, abs=1e-15, nan_ok=True)
    assert math.isnan(expected[-1])
    assert expected[-2] == 0.0
    assert float(mean_iou(confusion)) == pytest.approx(sum(expected[:-1]) / (num_classes - 1), abs=1e-15)
    known = truth != IGNORED
    assert float(pixel_accuracy(confusion)) == pytest.approx(float((prediction == truth)[known].double().mean()))
    found = [float((prediction == label)[truth == label].double().mean()) for label in range(num_classes)]
    assert per_class_accuracy(confusion).tolist() == pytest.approx(found, nan_ok=True)


def test_matrices_of_parts_add_up_and_images_are_not_averaged() -> None:
    prediction, truth = random_masks(5, seed=7)
    parts = [confusion_matrix(*pair, 5, IGNORED) for pair in zip(prediction, truth, strict=True)]
    whole = confusion_matrix(prediction, truth, 5, IGNORED)
    assert torch.equal(torch.stack(parts).sum(0), whole)
    assert not torch.allclose(mean_iou(whole), torch.stack([mean_iou(part) for part in parts]).mean())


@pytest.mark.parametrize(
    ("prediction", "truth", "words"),
    [
        ([0, 1], [0, 1, 2], "same size"),
        ([0.0, 1.0], [0, 1], "class numbers are needed"),
        ([0, 3], [0, 1], "the prediction has labels from 0 to 3, but 3 classes have 0 to 2"),
        ([0, 1], [0, -1], "the truth has labels from -1 to 0"),
        ([0, 1], [0, 200], "or 255 to ignore"),
    ],
)
def test_labels_that_do_not_fit_are_refused(prediction: list[float], truth: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        confusion_matrix(torch.tensor(prediction), torch.tensor(truth), 3, IGNORED)


def test_matrices_that_say_nothing_are_refused() -> None:
    ignored = torch.full((4, 4), IGNORED)
    with pytest.raises(InputError, match="counts no pixel: all are ignored"):
        mean_iou(confusion_matrix(torch.zeros(4, 4, dtype=torch.int64), ignored, 3, IGNORED))
    with pytest.raises(InputError, match=r"\[C, C\] is needed"):
        mean_iou(torch.ones(2, 3))
    with pytest.raises(InputError, match="not 0 or more"):
        per_class_iou(torch.tensor([[1, -1], [0, 1]]))
