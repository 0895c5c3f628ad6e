"""Intervals of scores over test images: against closed forms, and against resampling image by image."""

import numpy as np
import pytest
import torch
from scipy import stats

from nearsight.data import make_shapes
from nearsight.errors import InputError
from nearsight.metrics import confusion_matrix, mean_iou
from nearsight.models import create_model
from nearsight.probe import FeatureSpec, knn_accuracy, knn_right, read_features
from nearsight.probe.scores import accuracy_score, image_counts, miou_score


def test_the_interval_of_a_knn_accuracy_is_the_binomials():
    """A resampled accuracy is binomial: as many tries as images, each right with the accuracy that was found."""
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=1, embed_dim=24, num_heads=3).eval()
    (train, labels), (test, test_labels) = (
        (read_features(model, part.images_NCHW.float() / 64 - 2, FeatureSpec(place=None, tokens=None)), part.labels_N)
        for part in (make_shapes(300, image_size=32, split="train"), make_shapes(200, image_size=32, split="test"))
    )
    right = knn_right(train, labels, test, test_labels, num_classes=10, ks=(5, 20))
    accuracy = knn_accuracy(train, labels, test, test_labels, num_classes=10, ks=(5, 20))
    for k in (5, 20):
        assert right[k].dtype == torch.bool
        score = accuracy_score(right[k], num_resamples=40_000)
        assert score.value == accuracy[k]
        assert 0.05 < score.value < 0.95  # otherwise this would be no test
        expected = stats.binom.ppf([0.025, 0.975], 200, score.value) / 200
        # The last percentile may fall on either side of a step of the binomial.
        assert [score.low, score.high] == pytest.approx(expected, abs=1 / 200 + 1e-12)
        assert score.num_images == 200


def test_the_interval_of_an_miou_is_that_of_resampling_image_by_image():
    generator = torch.Generator().manual_seed(1)
    matrices = []
    for number in range(12):
        truth = torch.randint(4 if number else 5, (30,), generator=generator)  # class 4 is in the first image alone
        taken = torch.where(torch.rand(30, generator=generator) < 0.2 + 0.06 * number, truth, truth.roll(1))
        matrices.append(confusion_matrix(taken, truth, 6, None))  # class 5 is nowhere
    counts = torch.stack([image_counts(matrix) for matrix in matrices])
    score = miou_score(counts, num_resamples=300, seed=5)
    assert score.value == pytest.approx(float(mean_iou(sum(matrices))), abs=1e-12)
    draws = np.random.default_rng(5).integers(12, size=(300, 12))
    slow = [float(mean_iou(sum(matrices[image] for image in draw))) for draw in draws]
    assert [score.low, score.high] == pytest.approx(np.quantile(slow, [0.025, 0.975]), abs=1e-12)
    assert score == miou_score(counts, num_resamples=300, seed=5)
    assert score != miou_score(counts, num_resamples=300, seed=6)


def test_more_images_than_are_drawn_at_once(monkeypatch):
    right = torch.arange(1000) % 3 == 0
    whole = accuracy_score(right, num_resamples=50)
    monkeypatch.setattr("nearsight.probe.scores._DRAWN_AT_ONCE", 3000)
    assert accuracy_score(right, num_resamples=50) == whole


def test_one_image_has_no_interval_and_none_no_score():
    one = accuracy_score(torch.tensor([True]))
    assert (one.value, one.low, one.high, one.num_images) == (1.0, None, None, 1)
    with pytest.raises(InputError, match="no test images"):
        accuracy_score(torch.zeros(0, dtype=torch.bool))
