"""Tile by tile against the metrics on whole maps, and without the maps."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nearsight.lens.capture import _attention_of_sdpa, _attention_of_softmax
from nearsight.lens.stream import reduce_attention
from nearsight.metrics import attention_distance, attention_entropy


def random_inputs(num_tokens: int, sharpness: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(sharpness * torch.randn(2, 3, num_tokens, 8, dtype=torch.float64) for _ in range(3))


def attention_of(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return (logits if mask is None else logits.masked_fill(~mask, -math.inf)).softmax(-1)


@pytest.mark.parametrize("tile_bytes", [1, 5 * 8 * 6 * 22, 2**25])
@pytest.mark.parametrize(("grid_size", "prefix"), [((4, 5), 2), ((3, 7), 1), ((1, 22), 0)])
def test_any_tile_gives_the_numbers_of_the_whole_map(tile_bytes: int, grid_size: tuple[int, int], prefix: int) -> None:
    inputs = random_inputs(grid_size[0] * grid_size[1] + prefix)
    whole = attention_of(*inputs[:2])
    for attention in (_attention_of_sdpa("layer", *inputs), _attention_of_softmax("layer", whole)):
        distance, entropy = reduce_attention(attention, grid_size, prefix, tile_bytes=tile_bytes)
        expected = attention_distance(whole, grid_size, num_prefix_tokens=prefix)
        torch.testing.assert_close(distance, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(entropy, attention_entropy(whole, num_prefix_tokens=prefix), rtol=1e-9, atol=1e-10)


def test_masked_keys_and_queries_that_see_no_patch() -> None:
    query, key, value = random_inputs(10)
    mask = torch.rand(10, 10) > 0.4
    mask[:, 0] = True
    mask[4, 1:] = False  # this query sees CLS alone
    whole = attention_of(query, key, mask)
    distance, entropy = reduce_attention(_attention_of_sdpa("layer", query, key, value, mask), (3, 3), 1, tile_bytes=1)
    torch.testing.assert_close(distance, attention_distance(whole, (3, 3)), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(entropy, attention_entropy(whole), rtol=1e-9, atol=1e-10)


def test_a_query_that_all_but_ignores_patches_is_still_seen() -> None:
    """CLS gets all but e⁻¹⁰⁰⁰ of the attention: after the softmax nothing would be left to renormalise."""
    logits = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    logits[..., 0] = 1000.0
    logits[..., 1:, 1:] = torch.eye(4, dtype=torch.float64) * 50
    assert math.isnan(float(attention_distance(logits.softmax(-1), (2, 2))))
    query = torch.eye(5, dtype=torch.float64)[None, None]
    attention = _attention_of_sdpa("layer", query, query, query, logits, scale=0.0)
    distance, entropy = reduce_attention(attention, (2, 2), 1)
    assert float(distance) == pytest.approx(0, abs=1e-15)
    assert float(entropy) == pytest.approx(0, abs=1e-15)


def test_nan_stays_visible() -> None:
    query, key, value = random_inputs(10)
    query[1, 2, 5] = math.nan
    distance, entropy = reduce_attention(_attention_of_sdpa("layer", query, key, value), (3, 3), 1)
    for result in (distance, entropy):
        assert torch.isnan(result).nonzero().tolist() == [[1, 2]]


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return output


def test_no_map_is_ever_in_memory() -> None:
    query = torch.randn(1, 2, 1025, 8)
    attention = _attention_of_sdpa("layer", query, query, query)
    with LargestTensor() as largest:
        reduce_attention(attention, (32, 32), 1, tile_bytes=2**20)
    assert largest.numel <= 2**20 / 8
    assert largest.numel < 1025 * 1025 / 8
