"""Kinds of heads: shares against loops in float64, pure patterns by name, and mixtures with uniform attention."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearsight.errors import InputError
from nearsight.metrics import KindShares, edge_attention_distance, head_kinds, kind_shares, uniform_attention_distance
from nearsight.metrics.kinds import ENOUGH, KINDS, OTHER

GRIDS = st.tuples(st.integers(5, 9), st.integers(5, 9))
"""On which all kinds differ: half of a row of 4 patches lies within 3×3 around the query."""


def places(grid: tuple[int, int]) -> list[tuple[int, int]]:
    return [(row, col) for row in range(grid[0]) for col in range(grid[1])]


def at_edge(place: tuple[int, int], grid: tuple[int, int]) -> bool:
    return place[0] in (0, grid[0] - 1) or place[1] in (0, grid[1] - 1)


def is_there(name: str, query: tuple[int, int], key: tuple[int, int], grid: tuple[int, int]) -> bool:
    down, right = abs(query[0] - key[0]), abs(query[1] - key[1])
    return {
        "own": query == key,
        "near": down <= 1 and right <= 1,
        "row": down == 0,
        "column": right == 0,
        "edge": at_edge(key, grid),
        "sink": key == (1, 1),
        "breadth": True,
    }[name]


def pattern(name: str, grid: tuple[int, int]) -> Tensor:
    """The map of a head that does this alone, [1, 1 + P, 1 + P], with a class token that gets nothing."""
    num = math.prod(grid)
    attn = torch.zeros(1 + num, 1 + num, dtype=torch.float64)
    attn[0, 0] = 1.0
    for i, query in enumerate(places(grid)):
        keys = [j for j, key in enumerate(places(grid)) if is_there(name, query, key, grid)]
        for j in keys:
            attn[1 + i, 1 + j] = 1 / len(keys)
    return attn[None]


def by_loop(attn: np.ndarray, grid: tuple[int, int], prefix: int) -> dict[str, float]:
    """Of one map [N, N]."""
    cells = places(grid)
    looking = [i for i in range(len(cells)) if attn[prefix + i, prefix:].sum() > 0]
    found = {}
    for name in ("own", "near", "row", "column", "edge"):
        share = uniform = 0.0
        for i in looking:
            total = sum(attn[prefix + i, prefix + j] for j in range(len(cells)))
            for j, key in enumerate(cells):
                if is_there(name, cells[i], key, grid):
                    share += attn[prefix + i, prefix + j] / total / len(looking)
                    uniform += 1 / len(cells) / len(looking)
        found[name] = (share - uniform) / (1 - uniform) if uniform < 1 - 1e-12 else math.nan
    received = sorted((sum(attn[prefix + i, prefix + j] for i in looking) for j in range(len(cells))), reverse=True)
    few = math.ceil(len(cells) / 50)
    on_prefix = sum(attn[prefix + i, j] for i in looking for j in range(prefix))
    sink = (sum(received[:few]) + on_prefix) / len(looking)
    found["sink"] = (sink - few / len(cells)) / (1 - few / len(cells)) if few < len(cells) else math.nan
    breadth = 0.0
    for i in looking:
        total = attn[prefix + i, prefix:].sum()
        entropy = -sum(p * math.log(p) for p in attn[prefix + i, prefix:] / total if p > 0)
        breadth += (math.exp(entropy) - 1) / (len(cells) - 1) / len(looking) if len(cells) > 1 else math.nan
    found["breadth"] = breadth
    return found


@given(
    grid=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    prefix=st.integers(0, 3),
    scale=st.floats(0.0, 8.0),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_shares_are_those_of_a_loop(grid: tuple[int, int], prefix: int, scale: float, seed: int) -> None:
    num = prefix + math.prod(grid)
    generator = torch.Generator().manual_seed(seed)
    attn = (scale * torch.randn(2, 3, num, num, generator=generator, dtype=torch.float64)).softmax(-1)
    attn[0, 0, prefix, prefix:] = 0.0  # a query that looks nowhere
    found = kind_shares(attn, grid, num_prefix_tokens=prefix)
    for image, head in ((0, 0), (1, 2)):
        if math.prod(grid) == 1 and (image, head) == (0, 0):
            continue  # without any other query
        expected = by_loop(attn[image, head].numpy(), grid, prefix)
        measured = {name: float(getattr(found, name)[image, head]) for name in KindShares._fields}
        assert measured == pytest.approx(expected, abs=1e-12, nan_ok=True)


NAMES = {
    "own": "own patch",
    "near": "neighbour",
    "row": "row/column",
    "column": "row/column",
    "edge": "edge",
    "sink": "sink",
    "breadth": "global",
}


@given(grid=GRIDS, name=st.sampled_from(sorted(NAMES)))
@settings(deadline=None)
def test_every_pure_pattern_has_its_own_name(grid: tuple[int, int], name: str) -> None:
    shares = kind_shares(pattern(name, grid), grid)
    assert head_kinds(shares).tolist() == [NAMES[name]]
    assert set(NAMES.values()) == set(KINDS)
    assert float(getattr(shares, name)) == pytest.approx(1.0, abs=1e-12)


def test_a_head_that_attends_to_other_tokens_is_a_sink_whatever_is_left_does() -> None:
    attn = 0.4 * pattern("own", (6, 6))
    attn[:, :, 0] += 0.6
    assert head_kinds(kind_shares(attn, (6, 6))).tolist() == ["sink"]
    attn = 0.6 * pattern("own", (6, 6))
    attn[:, :, 0] += 0.4
    assert head_kinds(kind_shares(attn, (6, 6))).tolist() == ["own patch"]


@given(grid=GRIDS, name=st.sampled_from(sorted(NAMES)), parts=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2))
@settings(deadline=None)
def test_a_mixture_with_uniform_attention_has_its_part_and_more_of_it_never_takes_the_name_away(
    grid: tuple[int, int], name: str, parts: list[float]
) -> None:
    less, more = sorted(parts)
    uniform = pattern("breadth", grid)
    kinds = []
    for part in (less, more):
        shares = kind_shares(part * pattern(name, grid) + (1 - part) * uniform, grid)
        if name != "breadth":
            assert float(getattr(shares, name)) == pytest.approx(part, abs=1e-9)
        kinds.append(head_kinds(shares).item())
    if name != "breadth":
        assert kinds[0] != NAMES[name] or kinds[1] == NAMES[name]
        assert (kinds[1] == NAMES[name]) == (more >= ENOUGH) or abs(more - ENOUGH) < 1e-6
    else:
        assert kinds == ["global", "global"]


@given(grid=GRIDS, seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_a_head_gets_its_kind_whatever_the_order_of_images_and_heads(grid: tuple[int, int], seed: int) -> None:
    num = 1 + math.prod(grid)
    generator = torch.Generator().manual_seed(seed)
    attn = (4 * torch.randn(2, 3, num, num, generator=generator, dtype=torch.float64)).softmax(-1)
    kinds = head_kinds(kind_shares(attn, grid))
    np.testing.assert_array_equal(head_kinds(kind_shares(attn.flip(0, 1), grid)), kinds[::-1, ::-1])


def test_what_is_none_of_them_is_other_and_what_is_not_there_has_no_kind() -> None:
    half = 0.34 * (pattern("own", (8, 8)) + pattern("sink", (8, 8))) + 0.32 * pattern("breadth", (8, 8))
    shares = kind_shares(half, (8, 8))
    assert head_kinds(shares).tolist() == [OTHER]
    numbers = {name: np.array([float(value), math.nan]) for name, value in shares._asdict().items()}
    assert head_kinds(numbers).tolist() == [OTHER, ""]


def test_one_patch_has_no_kind() -> None:
    shares = kind_shares(torch.full((1, 2, 2), 0.5), (1, 1))
    assert all(math.isnan(value) for value in shares)
    assert head_kinds(shares).tolist() == [""]


@given(grid=st.tuples(st.integers(1, 9), st.integers(1, 9)))
@settings(deadline=None)
def test_edge_seeking_heads_have_the_distances_of_a_loop(grid: tuple[int, int]) -> None:
    cells = places(grid)
    edge = [place for place in cells if at_edge(place, grid)]
    diagonal = math.hypot(grid[0] - 1, grid[1] - 1) or 1.0
    to_all = sum(math.dist(one, other) for one in cells for other in edge) / len(cells) / len(edge) / diagonal
    to_nearest = sum(min(math.dist(one, other) for other in edge) for one in cells) / len(cells) / diagonal
    assert edge_attention_distance(grid) == pytest.approx(to_all, abs=1e-12)
    assert edge_attention_distance(grid, nearest=True) == pytest.approx(to_nearest, abs=1e-12)


def test_an_edge_seeking_head_may_be_as_near_as_a_local_one_or_farther_than_uniform() -> None:
    assert edge_attention_distance((8, 8)) == pytest.approx(0.479186, abs=1e-6)
    assert edge_attention_distance((8, 8)) > uniform_attention_distance((8, 8))
    assert edge_attention_distance((8, 8), nearest=True) == pytest.approx(0.088388, abs=1e-6)


def test_tokens_must_fit_the_grid() -> None:
    with pytest.raises(InputError, match="9 tokens do not fit a 3×3 grid with 1 prefix tokens"):
        kind_shares(torch.full((1, 9, 9), 1 / 9), (3, 3))
    with pytest.raises(InputError, match="at least one row"):
        edge_attention_distance((0, 4))
