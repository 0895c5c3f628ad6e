"""Weighted k-NN against scikit-learn on features of real images, and against the definition."""

import math

import numpy as np
import pytest
import torch

from nearsight.data import make_shapes
from nearsight.errors import InputError
from nearsight.models import create_model
from nearsight.probe import FeatureSpec, knn_accuracy, knn_scores, read_features
from nearsight.probe.search import ExactIndex


@pytest.fixture(scope="module")
def features():
    """CLS of an untrained ViT for the embedded images."""
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=2, embed_dim=48, num_heads=3).eval()
    parts = [make_shapes(num, image_size=32, split=split) for num, split in ((240, "train"), (80, "test"))]
    spec = FeatureSpec(place=None, tokens=None)
    return [(read_features(model, part.images_NCHW.float() / 64 - 2, spec), part.labels_N) for part in parts]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_votes_are_those_of_scikit_learn(features, device):
    neighbors = pytest.importorskip("sklearn.neighbors")
    (train, train_labels), (test, test_labels) = features
    ks, temperature = (5, 30, 200), 0.07
    index = ExactIndex(train.to(device))
    scores = knn_scores(index, train_labels, test.to(device), num_classes=10, ks=ks, temperature=temperature)
    accuracy = knn_accuracy(
        train, train_labels, test, test_labels, num_classes=10, ks=ks, temperature=temperature, device=device
    )
    for k in ks:
        reference = neighbors.KNeighborsClassifier(
            k,
            metric="cosine",
            algorithm="brute",
            weights=lambda distance: np.exp((1 - distance) / 0.07),
        ).fit(train.double().numpy(), train_labels.numpy())
        expected = torch.tensor(reference.predict_proba(test.double().numpy()))
        torch.testing.assert_close(scores[k].double().cpu(), expected, atol=1e-4, rtol=0)
        assert accuracy[k] == pytest.approx(reference.score(test.double().numpy(), test_labels.numpy()), abs=1 / 80)


def test_votes_by_hand():
    memory = torch.tensor([[1.0, 0.0], [math.cos(0.5), math.sin(0.5)], [0.0, 1.0], [-1.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 2])
    scores = knn_scores(
        ExactIndex(memory), labels, torch.tensor([[2.0, 0.0]]), num_classes=3, ks=(1, 3), temperature=0.5
    )
    votes = [math.exp(1 / 0.5), math.exp(math.cos(0.5) / 0.5) + 1.0]
    expected = torch.tensor([votes[0] / sum(votes), votes[1] / sum(votes), 0.0])
    torch.testing.assert_close(scores[3][0], expected, atol=1e-6, rtol=0)
    assert scores[1][0].tolist() == [1.0, 0.0, 0.0]


def test_bad_input_is_named(features):
    (train, labels), (test, test_labels) = features
    with pytest.raises(InputError, match="240 training samples, but 241 neighbours"):
        knn_accuracy(train, labels, test, test_labels, num_classes=10, ks=(10, 241))
    seen = labels != 3
    with pytest.raises(InputError, match="class 3 of the test samples is never seen"):
        knn_accuracy(train[seen], labels[seen], test, test_labels, num_classes=10, ks=(5,))
    with pytest.raises(InputError, match="temperature"):
        knn_accuracy(train, labels, test, test_labels, num_classes=10, ks=(5,), temperature=0.0)
