"""Weighted k-NN against scikit-learn on features of real images and against the definition; the exact search under it
against a float64 sort of all similarities, and against FAISS where it is installed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearsight.data import make_shapes
from nearsight.errors import InputError
from nearsight.models import create_model
from nearsight.probe import FeatureSpec, knn_accuracy, knn_scores, read_features, search
from nearsight.probe.search import ExactIndex, FaissIndex, improved, largest


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


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def brute_force(queries, memory, k):
    queries, memory = (x.double() / x.double().norm(dim=1, keepdim=True) for x in (queries, memory))
    return torch.sort(queries @ memory.T, dim=1, descending=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_device", DEVICES)
@pytest.mark.parametrize(("num_memory", "k", "piece_bytes"), [(5000, 30, 4 * 37 * 700), (4099, 7, None), (40, 40, 4)])
def test_exact_search_finds_what_a_full_sort_finds(num_memory, k, piece_bytes, memory_device, device):
    generator = torch.Generator().manual_seed(num_memory)
    memory, queries = (torch.randn(num, 24, generator=generator) for num in (num_memory, 37))
    index = ExactIndex(memory.to(memory_device), piece_bytes=piece_bytes)
    found = index.search(queries.to(device), k)
    assert {one.device.type for one in found} == {device}
    similarity, position = (one.cpu() for one in found)
    value, order = brute_force(queries, memory, k)
    torch.testing.assert_close(similarity.double(), value[:, :k], atol=2e-6, rtol=0)
    # Where two similarities differ by more than float32 can confuse, their order is the true one.
    clear = (
        ((value[:, :k] - value[:, 1 : k + 1]).abs() > 1e-5) if k < num_memory else torch.ones(37, k, dtype=torch.bool)
    )
    clear[:, 1:] &= (value[:, :k] - torch.roll(value[:, :k], 1, 1)).abs()[:, 1:] > 1e-5
    assert clear.double().mean() > 0.9
    assert torch.equal(position[clear], order[:, :k][clear])


def test_the_largest_of_a_row_are_those_of_topk():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(11, 64 * 90 + 17, generator=generator)
    values[0, -17:] = 9 + torch.rand(17, generator=generator)  # in the columns that fill no group
    values[1, ::90] += 20  # all of one group
    found, columns = largest(values, 20)
    expected = values.topk(20, dim=1)
    assert torch.equal(found, expected.values)
    assert torch.equal(values.gather(1, columns), found)


@given(
    sizes=st.lists(st.sampled_from([1, 5, 63, 64, 65, 700]), min_size=2, max_size=5),
    k=st.integers(1, 40),
    seed=st.integers(0, 99),
    whole=st.booleans(),
)
def test_piece_by_piece_the_best_are_those_of_all(sizes, k, seed, whole):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(7, 64 + sum(sizes), generator=generator)
    values = values.round() if whole else values  # with many that are equal
    best, begin = largest(values[:, :64], k), 64
    for size in sizes:
        best = improved(best, values[:, begin : begin + size], begin)
        begin += size
    assert torch.equal(best[0], values.topk(k, dim=1).values)
    assert torch.equal(values.gather(1, best[1]), best[0])
    assert all(len(set(row)) == k for row in best[1].tolist())


def test_nothing_new_leaves_the_best_as_they_are():
    best = torch.tensor([[3.0, 2.0]]), torch.tensor([[7, 5]])
    for size in (0, 3, 64, 100):
        found = improved(best, torch.ones(1, size), 10)
        assert all(torch.equal(one, other) for one, other in zip(found, best, strict=True))


def test_threads_are_as_many_as_before():
    before = torch.get_num_threads()
    ExactIndex(torch.randn(30, 8)).search(torch.randn(5, 8), 5)
    assert torch.get_num_threads() == before


def test_no_more_than_a_piece_of_the_similarities_exists(monkeypatch):
    sizes = []
    monkeypatch.setattr(search, "largest", lambda values, k: sizes.append(values.nbytes) or largest(values, k))
    monkeypatch.setattr(
        search, "improved", lambda best, values, begin: sizes.append(values.nbytes) or improved(best, values, begin)
    )
    ExactIndex(torch.randn(3000, 8), piece_bytes=40_000).search(torch.randn(50, 8), 5)
    assert max(sizes) <= 40_000
    assert sum(sizes) == 4 * 3000 * 50


def test_faiss_finds_the_same():
    pytest.importorskip("faiss")
    generator = torch.Generator().manual_seed(0)
    memory, queries = (torch.randn(num, 16, generator=generator) for num in (3000, 20))
    ours, theirs = (index(memory).search(queries, 5) for index in (ExactIndex, FaissIndex))
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-6, rtol=0)
    assert torch.equal(ours[1], theirs[1])


def test_too_few_vectors_and_other_widths_are_refused():
    index = ExactIndex(torch.randn(5, 8))
    with pytest.raises(InputError, match="5 vectors in the memory, but 6 neighbours"):
        index.search(torch.randn(2, 8), 6)
    with pytest.raises(InputError, match="9 channels, but the memory has 8"):
        index.search(torch.randn(2, 9), 3)
