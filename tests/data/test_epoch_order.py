"""Epoch orders: permutations per cell that do not depend on the company."""

import pytest
import torch

from nearsight.data import epoch_batches
from nearsight.errors import InputError


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
