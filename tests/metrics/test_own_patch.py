"""Own-patch heads with a leak: what a MAD says of them, against attention maps made and measured."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nearsight.errors import InputError
from nearsight.metrics import (
    attention_distance,
    attention_entropy,
    grid_distances,
    least_share_on_itself,
    next_patch_distance,
    own_patch_head,
)
from nearsight.metrics.own_patch import Leak

LEAKS: tuple[Leak, ...] = ("everywhere", "to neighbours")


def attention(share: float, grid: tuple[int, int], leak: Leak) -> Tensor:
    """The map itself, [1, 1 + P, 1 + P] with a class token that gets and gives something, by loops."""
    rows, cols = grid
    places = [(row, col) for row in range(rows) for col in range(cols)]
    attn = torch.zeros(1 + len(places), 1 + len(places), dtype=torch.float64)
    attn[0] = 1 / (1 + len(places))
    for query, (row, col) in enumerate(places):
        if leak == "everywhere":
            keys = [key for key in range(len(places)) if key != query]
        else:
            keys = [key for key, (r, c) in enumerate(places) if abs(r - row) + abs(c - col) == 1]
        attn[1 + query, 1 + query] = share
        for key in keys:
            attn[1 + query, 1 + key] = (1 - share) / len(keys)
    attn[1:, 1:] *= 0.7  # the rest goes to the class token, which does not count
    attn[1:, 0] = 0.3
    return attn[None]


@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)).filter(lambda grid: math.prod(grid) > 1),
    share=st.floats(0.0, 1.0),
    leak=st.sampled_from(LEAKS),
)
def test_share_and_entropy_are_those_of_the_map_of_this_distance(
    grid: tuple[int, int], share: float, leak: Leak
) -> None:
    attn = attention(share, grid, leak)
    distance = float(attention_distance(attn, grid))
    found = own_patch_head(distance, grid, leak=leak)
    assert found.share == pytest.approx(share, abs=1e-9)
    assert found.entropy == pytest.approx(float(attention_entropy(attn, eps=0.0)), abs=1e-7)


def own_farthest(grid: tuple[int, int], leak: Leak) -> float:
    """The MAD of a head that keeps nothing."""
    if leak == "to neighbours":
        return next_patch_distance(grid)
    distances = grid_distances(grid)
    return float(distances.sum() / (distances != 0).sum())


@pytest.mark.parametrize("leak", LEAKS)
def test_no_head_of_this_kind_is_farther_than_one_that_keeps_nothing(leak: Leak) -> None:
    most = own_farthest((8, 8), leak)
    assert own_patch_head(most, (8, 8), leak=leak).share == pytest.approx(0, abs=1e-9)
    for distance in (1.001 * most, -0.001):
        assert all(math.isnan(number) for number in own_patch_head(distance, (8, 8), leak=leak))


def test_uniform_attention_leaks_to_all_others_alike() -> None:
    attn = torch.full((1, 64, 64), 1 / 64, dtype=torch.float64)
    found = own_patch_head(float(attention_distance(attn, (8, 8), num_prefix_tokens=0)), (8, 8), leak="everywhere")
    assert found == pytest.approx((1 / 64, 1.0))


def test_a_leak_to_neighbours_leaves_the_least_share_and_one_to_all_leaves_more() -> None:
    for distance in (0.0, 0.008, 0.03, 0.1):
        near, far = (own_patch_head(distance, (8, 8), leak=leak) for leak in ("to neighbours", "everywhere"))
        assert near.share == pytest.approx(least_share_on_itself(distance, (8, 8)))
        assert far.share >= near.share


@pytest.mark.parametrize(
    ("distance", "share", "everywhere", "neighbours"),
    [
        (0.008, 0.981, 0.041, 0.090),
        (0.009, 0.979, 0.046, 0.099),
        (0.021, 0.951, 0.097, 0.185),
        (0.024, 0.943, 0.109, 0.202),
    ],
)
def test_numbers_on_the_grid_of_the_paper(distance: float, share: float, everywhere: float, neighbours: float) -> None:
    found = own_patch_head(distance, (8, 8), leak="everywhere")
    assert found == pytest.approx((share, everywhere), abs=0.0006)
    assert own_patch_head(distance, (8, 8), leak="to neighbours").entropy == pytest.approx(neighbours, abs=0.0006)


def test_a_single_patch_keeps_everything() -> None:
    for leak in LEAKS:
        assert own_patch_head(0.0, (1, 1), leak=leak) == (1.0, 0.0)
        assert math.isnan(own_patch_head(0.1, (1, 1), leak=leak).share)
    with pytest.raises(InputError, match="at least one row"):
        own_patch_head(0.1, (-2, -2), leak="everywhere")
