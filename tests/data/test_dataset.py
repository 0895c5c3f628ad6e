"""Splits and epoch orders are integers from a hash: the fingerprints must hold on every machine and torch version."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearsight.data import balanced_subset, epoch_batches, measuring_subset, stratified_split
from nearsight.errors import InputError


def digest(index: Tensor) -> str:
    return hashlib.sha256(index.numpy().astype("<i8").tobytes()).hexdigest()[:16]


CIFAR_LIKE = torch.arange(50_000) * 7919 % 100


@pytest.mark.parametrize(
    ("seed", "train", "held_out"),
    [
        (0, "88cae860bd8a8ed9", "898d2ca5891e49e4"),
        (1, "b94662706a091ae6", "baa1d253be9b9844"),
        (2**40, "df8731271871011f", "d0df27f6bac319e6"),
    ],
)
def test_the_80_20_split_is_the_same_everywhere(seed: int, train: str, held_out: str) -> None:
    assert [digest(part) for part in stratified_split(CIFAR_LIKE, 0.2, seed)] == [train, held_out]


@pytest.mark.parametrize(("seed", "expected"), [(0, "205df637f847cb7b"), (1, "fe85f2e38c607d18")])
def test_the_measuring_subset_is_the_same_everywhere(seed: int, expected: str) -> None:
    chosen = measuring_subset(10_000, 5_000, seed)
    assert chosen.dtype == torch.int64
    assert digest(chosen) == expected


def test_the_balanced_subset_is_the_same_everywhere() -> None:
    assert digest(balanced_subset(CIFAR_LIKE, 5_000)) == "85b177e9c83780e3"


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=2, max_size=300),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_split_is_a_partition_in_proportion(labels: list[int], fraction: float, seed: int) -> None:
    labels_N = torch.tensor(labels)
    num_held_out = round(len(labels) * fraction)
    if not 0 < num_held_out < len(labels):
        with pytest.raises(InputError, match="one part would be empty; take more of them, or hold out another share"):
            stratified_split(labels_N, fraction, seed)
        return
    train, held_out = stratified_split(labels_N, fraction, seed)
    assert train.dtype == held_out.dtype == torch.int64
    assert torch.equal(torch.cat([train, held_out]).sort().values, torch.arange(len(labels)))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(held_out, held_out.sort().values)
    assert len(held_out) == num_held_out
    for label in set(labels):
        ideal = labels.count(label) * num_held_out / len(labels)
        assert abs(int((labels_N[held_out] == label).sum()) - ideal) < 1


def test_another_seed_gives_another_split() -> None:
    first, second = (stratified_split(CIFAR_LIKE, 0.2, seed)[1] for seed in (0, 1))
    shared = len(set(first.tolist()) & set(second.tolist()))
    assert 1_700 < shared < 2_300  # 2,000 expected by chance; deviation about 36


def test_few_available_images_are_all_measured() -> None:
    assert measuring_subset(7, 5_000).tolist() == list(range(7))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fractions_outside_0_1(fraction: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        stratified_split(CIFAR_LIKE, fraction, 0)


@pytest.mark.parametrize("num", [0, -3])
def test_measuring_nothing(num: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        measuring_subset(10, num)


@pytest.mark.parametrize("num", [0, 11])
def test_a_subset_larger_than_the_set(num: int) -> None:
    with pytest.raises(InputError, match="1 to 10"):
        balanced_subset(torch.zeros(10, dtype=torch.int64), num)


def test_every_image_is_visited_at_most_once_and_none_is_invented() -> None:
    index = epoch_batches(torch.tensor([3, 4]), 0, num=103, batch_size=10)
    assert index.shape == (10, 2, 10)
    for cell in range(2):
        visited = index[:, cell].flatten()
        assert len(visited.unique()) == 100
        assert 0 <= int(visited.min()) <= int(visited.max()) < 103


def test_a_cell_sees_the_same_batches_alone_and_stacked() -> None:
    together = epoch_batches(torch.tensor([5, 9, 2]), 7, num=200, batch_size=32)
    for cell, seed in enumerate((5, 9, 2)):
        alone = epoch_batches(torch.tensor([seed]), 7, num=200, batch_size=32)
        assert torch.equal(together[:, cell], alone[:, 0])


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_batches(torch.tensor([seed]), epoch, 64, 64) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.flatten().tolist()) for order in orders}) == 4


def test_a_tensor_epoch_is_the_same_as_a_number() -> None:
    seed_K = torch.tensor([1])
    assert torch.equal(epoch_batches(seed_K, 3, 50, 7), epoch_batches(seed_K, torch.tensor(3), 50, 7))


def test_the_order_is_the_same_everywhere() -> None:
    assert epoch_batches(torch.tensor([0]), 0, 12, 4)[:, 0].tolist() == [[1, 2, 10, 7], [6, 3, 8, 4], [5, 0, 11, 9]]


@pytest.mark.parametrize(("num", "batch_size", "message"), [(5, 6, "at most 5"), (5, 0, "at least 1")])
def test_bad_input(num: int, batch_size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        epoch_batches(torch.tensor([0]), 0, num, batch_size)
