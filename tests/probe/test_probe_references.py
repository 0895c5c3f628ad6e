"""Both probes of classes beside scikit-learn, on the features that a ViT gives of real images: handwritten digits."""

import numpy as np
import pytest
import torch

from nearsight.models import create_model
from nearsight.probe import FeatureSpec, LinearConfig, knn_right, linear_probe, read_features

NUM_TRAIN = 1000


@pytest.fixture(scope="module")
def digits():
    """(features, labels) to learn from and to test on: all patches of an untrained ViT, one after the other."""
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn: pip install 'nearsight[dev]'")
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.manual_seed(0)
    model = create_model("compact_vit", patch_size=8, depth=1, embed_dim=12, num_heads=3).eval()
    maps = read_features(model, (images / 8 - 1).expand(-1, 3, -1, -1), FeatureSpec(tokens="patches"))
    features = maps.flatten(1)
    features = (features - features.mean(0)) / features.std(0)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    parts = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return [(features[part], torch.from_numpy(labels)[part]) for part in parts]


def test_knn_is_right_where_scikit_learn_is(digits):
    neighbors = pytest.importorskip("sklearn.neighbors")
    (train, train_labels), (test, test_labels) = digits
    right = knn_right(train, train_labels, test, test_labels, num_classes=10, ks=(1, 20), temperature=0.07)
    for k in (1, 20):
        reference = neighbors.KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.07)
        ).fit(train.double().numpy(), train_labels.numpy())
        expected = reference.predict(test.double().numpy()) == test_labels.numpy()
        assert expected.mean() > 0.6  # there is something to agree about
        assert (right[k].numpy() != expected).sum() <= 1  # a tie that rounding decides


def test_the_linear_probe_is_as_good_as_scikit_learns_logistic_regression(digits):
    linear_model = pytest.importorskip("sklearn.linear_model")
    (train, train_labels), (test, test_labels) = digits
    config = LinearConfig(batch_size=128, num_epochs=60)
    found = linear_probe(train, train_labels, test, test_labels, num_classes=10, config=config)
    reference = linear_model.LogisticRegression(max_iter=2000).fit(train.numpy(), train_labels.numpy())
    expected = reference.predict(test.numpy()) == test_labels.numpy()
    assert expected.mean() > 0.7
    assert found.test_accuracy == pytest.approx(expected.mean(), abs=0.03)
    assert found.test_accuracy == float(found.right_N.double().mean())
    # They are right about the same images, too, not only about as many.
    assert (found.right_N.numpy() == expected).mean() > 0.93
