"""Patch association against loops that nobody could get wrong, scipy, closed forms and properties."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor

from nearsight.errors import InputError
from nearsight.metrics import gram_distance_correlation, neighbour_association, patch_association


@st.composite
def grams(draw: st.DrawFn, num_patches: int) -> Tensor:
    """Matrices of numbers, or of few whole numbers, among which ties are the rule."""
    seed = draw(st.integers(0, 10_000))
    drawn = np.random.default_rng(seed).normal(size=(num_patches, num_patches))
    gram = np.round(drawn) if draw(st.booleans()) else drawn
    return torch.from_numpy(gram + gram.T if draw(st.booleans()) else gram)


def largest(row: list[float], number: int) -> set[int]:
    """Entries with fewer than `number` others as large."""
    return {j for j, entry in enumerate(row) if sum(other >= entry for m, other in enumerate(row) if m != j) < number}


def components(top: list[set[int]]) -> list[int]:
    """A label for each patch by walking along mutual choices."""
    label = [-1] * len(top)
    for start in range(len(top)):
        waiting = [start] if label[start] < 0 else []
        while waiting:
            i = waiting.pop()
            label[i] = start
            waiting += [j for j in top[i] if i in top[j] and label[j] < 0]
    return label


def adjusted_rand_index(one: list[int], other: list[int]) -> float:
    """From the table of how many patches have which pair of labels."""
    table = {pair: list(zip(one, other, strict=True)).count(pair) for pair in zip(one, other, strict=True)}
    both = sum(math.comb(count, 2) for count in table.values())
    left = sum(math.comb(one.count(label), 2) for label in set(one))
    right = sum(math.comb(other.count(label), 2) for label in set(other))
    expected = left * right / math.comb(len(one), 2)
    return 1.0 if (left + right) / 2 == expected else (both - expected) / ((left + right) / 2 - expected)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(-1, 3), min_size=2, max_size=9))
def test_patch_association_equals_the_loop(data: st.DataObject, labels: list[int]) -> None:
    gram = torch.stack([data.draw(grams(len(labels))) for _ in range(2)])
    if data.draw(st.booleans()):  # near the truth
        gram = gram + 2.0 * torch.tensor([[a == b for b in labels] for a in labels])
    found = patch_association(gram, labels)
    assert found.fraction.shape == found.rand_index.shape == (2,)
    for which in range(2):
        sets = [{j for j, other in enumerate(labels) if other == label} for label in labels]
        rows = gram[which].tolist()
        associated = []
        for row, members in zip(rows, sets, strict=True):
            outside = [entry for j, entry in enumerate(row) if j not in members]
            associated.append(min(row[j] for j in members) > max(outside, default=-math.inf))
        assert found.per_patch[which].tolist() == associated
        assert float(found.fraction[which]) == pytest.approx(sum(associated) / len(labels), rel=1e-12)
        recovered = components([largest(row, len(s)) for row, s in zip(rows, sets, strict=True)])
        assert float(found.rand_index[which]) == pytest.approx(adjusted_rand_index(labels, recovered), abs=1e-12)


def test_a_gram_matrix_of_its_sets_is_associated_until_something_ties() -> None:
    sets = [(0, 3, 5), (1,), (4, 2)]
    label = torch.tensor([0, 1, 2, 0, 2, 0])
    gram = (label[:, None] == label).to(torch.float32)
    for partition in (sets, label, label.numpy(), label.tolist(), [torch.tensor(s) for s in sets]):
        assert patch_association(gram, partition).per_patch.all()
        assert float(patch_association(gram, partition).rand_index) == 1.0
    gram[0, 1] = 1.0  # as large as its own: patch 0 no longer stands by its set alone
    tied = patch_association(gram, sets)
    assert tied.per_patch.tolist() == [False, True, True, True, True, True]
    assert float(tied.fraction) == pytest.approx(5 / 6)
    assert tied.fraction.dtype == tied.rand_index.dtype == torch.float64


def test_rows_of_a_matrix_are_sets_and_alike_sets_are_found_by_chance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    gram = torch.randn(200, 40, 40, generator=generator)
    found = patch_association(gram, torch.arange(40).view(10, 4))
    assert float(found.fraction.mean()) < 0.01
    assert abs(float(found.rand_index.mean())) < 0.01


def test_partitions_that_choose_nothing() -> None:
    gram = torch.eye(4)
    assert patch_association(gram, [0, 0, 0, 0]).per_patch.all()  # one set: whatever the entries
    assert float(patch_association(gram, [0, 0, 0, 0]).rand_index) == 1.0
    assert float(patch_association(gram, range(4)).rand_index) == 1.0
    assert float(patch_association(torch.ones(1, 1), [0]).rand_index) == 1.0


def neighbour_loop(gram: Tensor, grid_size: tuple[int, int]) -> tuple[list[float], list[float]]:
    rows, cols = grid_size
    places = list(itertools.product(range(rows), range(cols)))
    shares, chances = [], []
    for i, (row, col) in enumerate(places):
        near = {j for j, (r, c) in enumerate(places) if j != i and abs(r - row) <= 1 and abs(c - col) <= 1}
        others = [j for j in range(len(places)) if j != i]
        top = {others[j] for j in largest([float(gram[i, j]) for j in others], len(near))}
        shares.append(len(top & near) / len(near))
        chances.append(len(near) / len(others))
    return shares, chances


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([(3, 4), (1, 5), (2, 2), (5, 1), (1, 2)]))
def test_neighbour_association_equals_the_loop(data: st.DataObject, grid_size: tuple[int, int]) -> None:
    gram = data.draw(grams(grid_size[0] * grid_size[1]))
    found = neighbour_association(gram, grid_size)
    shares, chances = neighbour_loop(gram, grid_size)
    np.testing.assert_allclose(found.per_patch, shares, rtol=1e-12)
    np.testing.assert_allclose(found.chance_per_patch, chances, rtol=1e-12)
    assert float(found.fraction) == pytest.approx(sum(shares) / len(shares), rel=1e-12)
    assert found.chance == pytest.approx(sum(chances) / len(chances), rel=1e-12)


def test_random_positions_have_neighbours_by_chance_and_smooth_ones_all() -> None:
    generator = torch.Generator().manual_seed(1)
    found = neighbour_association(torch.randn(400, 36, 36, generator=generator), (6, 6))
    assert float(found.fraction.mean()) == pytest.approx(found.chance, abs=0.005)
    row, col = torch.arange(36) // 6, torch.arange(36) % 6
    # Largest absolute coordinate difference: all 8 neighbours are at one distance.
    apart = torch.maximum((row[:, None] - row).abs(), (col[:, None] - col).abs())
    assert float(neighbour_association(-apart, (6, 6)).fraction) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([(3, 4), (1, 5), (2, 2), (4, 3)]))
def test_distance_correlation_equals_scipy(data: st.DataObject, grid_size: tuple[int, int]) -> None:
    gram = torch.stack([data.draw(grams(grid_size[0] * grid_size[1])) for _ in range(2)])
    found = gram_distance_correlation(gram, grid_size)
    places = list(itertools.product(range(grid_size[0]), range(grid_size[1])))
    pairs = list(itertools.permutations(range(len(places)), 2))
    distances = [math.dist(places[i], places[j]) for i, j in pairs]
    for which in range(2):
        entries = [float(gram[which, i, j]) for i, j in pairs]
        if len(set(entries)) > 1:
            assert float(found[which]) == pytest.approx(spearmanr(entries, distances).statistic, abs=1e-9)
        else:
            assert math.isnan(float(found[which]))


def test_what_has_no_neighbours_or_distances_is_not_a_number() -> None:
    alone = torch.ones(2, 1, 1)
    assert neighbour_association(alone, (1, 1)).fraction.isnan().tolist() == [True, True]
    assert gram_distance_correlation(alone, (1, 1)).isnan().tolist() == [True, True]
    assert gram_distance_correlation(torch.rand(2, 2), (1, 2)).isnan()


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([0, 1], "2 labels do not fit a Gram matrix of 3 patches"),
        ([[0, 1]], "patch 2 is in none of the sets"),
        ([[0, 1], [1, 2]], "patch 1 occurs twice"),
        ([[0, 1], [2, 3]], "name patch 3, but the Gram matrix has 3 patches"),
        ([[0, 1], 2], "a vector of integer labels, or a sequence of index sequences"),
        ([0.0, 1.0, 2.0], "a vector of integer labels, or a sequence of index sequences"),
        ([[0.0, 1.0], [2.0]], "a vector of integer labels, or a sequence of index sequences"),
        (torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "a vector of integer labels, or a sequence of index sequences"),
        ([[[0], [1]], [[2]]], "a vector of integer labels, or a sequence of index sequences"),
        (["ab", "c"], "a vector of integer labels, or a sequence of index sequences"),
        (torch.tensor(3), "a vector of integer labels, or a sequence of index sequences"),
        (None, "a vector of integer labels, or a sequence of index sequences"),
    ],
)
def test_what_is_no_partition_is_named(sets: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        patch_association(torch.eye(3), sets)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InputError, match=r"\[..., D, D\] is needed, not \[2, 3\]"):
        patch_association(torch.ones(2, 3), [0, 1])
    with pytest.raises(InputError, match="NaN or infinite"):
        patch_association(torch.tensor([[1.0, math.nan], [0.0, 1.0]]), [0, 1])
    with pytest.raises(InputError, match="6 patches does not fit a 2×2 grid"):
        neighbour_association(torch.eye(6), (2, 2))
    with pytest.raises(InputError, match="at least one row and one column, not -2×-2"):
        gram_distance_correlation(torch.eye(4), (-2, -2))
