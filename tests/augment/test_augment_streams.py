"""One call of the generator gives what `Draws` gives stream by stream."""

import dataclasses

import torch

from nearsight.augment.streams import Drawn, parts_of


def test_equal_to_draws(make_draws):
    draws = make_draws(3, 11, seed=2**33 + 1)
    sample_nums = {"a": 1, "b": 4, "c": 5, "d": 23}
    batch_nums = {"a.batch": 6, "e": 2}
    drawn = Drawn.of(draws, sample_nums, batch_nums)
    assert list(drawn.sample) == list(sample_nums)
    assert list(drawn.batch) == list(batch_nums)
    for name, num in sample_nums.items():
        assert torch.equal(drawn.sample[name], draws.per_sample(name, num)), name
    for name, num in batch_nums.items():
        assert torch.equal(drawn.batch[name], draws.per_batch(name, num)), name


def test_no_streams(make_draws):
    assert Drawn.of(make_draws(2, 3), {}, {}) == Drawn({}, {})


def test_cells_in_different_epochs(make_draws):
    draws = dataclasses.replace(make_draws(3, 5), epoch=torch.tensor([4, 0, 9]))
    drawn = Drawn.of(draws, {"a": 5}, {"b": 3})
    assert torch.equal(drawn.sample["a"], draws.per_sample("a", 5))
    assert torch.equal(drawn.batch["b"], draws.per_batch("b", 3))
    for cell, epoch in enumerate((4, 0, 9)):
        alone = dataclasses.replace(make_draws(3, 5), epoch=torch.tensor(epoch))
        assert torch.equal(drawn.sample["a"][cell], alone.per_sample("a", 5)[cell])


def test_parts_are_where_a_cell_alone_has_them(make_draws):
    """As many draws as each cell needs, cut into equal parts, whatever the others need."""
    nums, num_parts = [2, 0, 5, 3], 3
    draws = make_draws(len(nums), 7)
    parts = report_of(draws.per_sample("a", num_parts * max(nums)), torch.tensor(nums), max(nums), num_parts)
    for cell, num in enumerate(nums):
        alone = draws.per_sample("a", num_parts * num)[cell].tensor_split(num_parts, dim=-1)
        for part, expected in zip(parts, alone, strict=True):
            assert part.shape == (len(nums), 7, max(nums))
            assert torch.equal(part[cell, :, :num], expected)
