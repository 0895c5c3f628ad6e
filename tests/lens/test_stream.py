"""Tile by tile against the metrics on whole maps, and without the maps."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nearsight.lens import stream
from nearsight.lens.attention import ExplicitAttention, of_sdpa
from nearsight.lens.geometry import Geometry
from nearsight.lens.layout import Layout
from nearsight.lens.stream import reduce_attention
from nearsight.lens.survey import Site
from nearsight.metrics import attention_distance, attention_entropy

SPLIT_NOTHING = Layout(splits=(), images=0, windows=(), heads=(1,))


def plain_site(grid_size: tuple[int, int], prefix: int, **kwargs: object) -> Site:
    """Tokens of a plain ViT: prefix tokens, then patches row by row."""
    rows, cols = torch.meshgrid(*[torch.arange(size).double() for size in grid_size], indexing="ij")
    places = torch.stack([rows, cols], dim=-1).flatten(0, 1)
    places = torch.cat([torch.full((prefix, 2), math.nan, dtype=torch.float64), places])[None]
    return Site("layer", Geometry(SPLIT_NOTHING, grid_size, (16.0, 16.0), places, places), **kwargs)


def reduce(attention, grid_size, prefix, **kwargs):
    return reduce_attention(attention, plain_site(grid_size, prefix), dtype=torch.float64, **kwargs)


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
    for attention in (of_sdpa(*inputs), ExplicitAttention(whole, 0)):
        distance, entropy = reduce(attention, grid_size, prefix, tile_bytes=tile_bytes)
        expected = attention_distance(whole, grid_size, num_prefix_tokens=prefix)
        torch.testing.assert_close(distance, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(entropy, attention_entropy(whole, num_prefix_tokens=prefix), rtol=1e-9, atol=1e-10)


def test_masked_keys_and_queries_that_see_no_patch() -> None:
    query, key, value = random_inputs(10)
    mask = torch.rand(10, 10) > 0.4
    mask[:, 0] = True
    mask[4, 1:] = False  # this query sees CLS alone
    whole = attention_of(query, key, mask)
    expected = attention_distance(whole, (3, 3))
    visible = mask[1:, 1:].sum(-1)
    entropies = []  # of each query, divided by that of as many keys as it may attend to
    for row, count in enumerate(visible.tolist()):
        if count > 1:
            share = whole[..., 1 + row, 1:] / whole[..., 1 + row, 1:].sum(-1, keepdim=True)
            entropies.append(-torch.special.xlogy(share, share).sum(-1) / math.log(count))
        elif count == 1:
            entropies.append(torch.zeros(2, 3, dtype=torch.float64))
    added = torch.zeros(10, 10).masked_fill(~mask, -math.inf)
    low = torch.zeros(10, 10).masked_fill(~mask, -1e4)
    hidden = ~mask.expand(1, 3, 10, 10)
    for attention, site in (
        (of_sdpa(query, key, value, mask), plain_site((3, 3), 1)),
        (of_sdpa(query, key, value, added), plain_site((3, 3), 1)),
        (ExplicitAttention(whole, 0), plain_site((3, 3), 1, hidden_WHNM=hidden)),
    ):
        distance, entropy = reduce_attention(attention, site, dtype=torch.float64, tile_bytes=1)
        torch.testing.assert_close(distance, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(entropy, torch.stack(entropies).mean(0), rtol=1e-9, atol=1e-10)
    # A mask of finite numbers hides as well; a query that sees nothing else spreads over what is hidden.
    low[4, 1:] = 0
    _, entropy = reduce_attention(of_sdpa(query, key, value, low), plain_site((3, 3), 1), dtype=torch.float64)
    assert (entropy <= 1).all()


def test_causal_attention() -> None:
    query, key, value = random_inputs(9)
    whole = attention_of(query, key, torch.ones(9, 9, dtype=torch.bool).tril())
    distance, _ = reduce(of_sdpa(query, key, value, is_causal=True), (3, 3), 0, tile_bytes=1)
    torch.testing.assert_close(distance, attention_distance(whole, (3, 3), num_prefix_tokens=0), rtol=1e-12, atol=1e-14)


def test_windows_pooled_keys_and_heads_in_any_order() -> None:
    """Against a loop over windows and queries; axes are [H, B, W, tokens, d]."""
    torch.manual_seed(3)
    windows, queries, keys, heads, batch = 3, 4, 2, 2, 2
    query_places = torch.rand(windows, queries, 2, dtype=torch.float64) * 9
    key_places = torch.rand(windows, keys, 2, dtype=torch.float64) * 9
    query_places[1, 2] = math.nan  # a padded query
    key_places[2, 0] = math.nan  # a padded key
    layout = Layout(splits=(), images=1, windows=(2,), heads=(0,))
    site = Site("layer", Geometry(layout, (10, 10), (4.0, 4.0), query_places, key_places))
    query = torch.randn(heads, batch, windows, queries, 5, dtype=torch.float64)
    key = torch.randn(heads, batch, windows, keys, 5, dtype=torch.float64)
    distance, entropy = reduce_attention(of_sdpa(query, key, key), site, dtype=torch.float64)
    for image in range(batch):
        for head in range(heads):
            distances, entropies = [], []
            for window in range(windows):
                for q in range(queries):
                    if query_places[window, q].isnan().any():
                        continue
                    patches = [k for k in range(keys) if not key_places[window, k].isnan().any()]
                    logits = [
                        float(query[head, image, window, q] @ key[head, image, window, k]) / 5**0.5 for k in patches
                    ]
                    total = sum(math.exp(logit) for logit in logits)
                    shares = [math.exp(logit) / total for logit in logits]
                    places = [(query_places[window, q] - key_places[window, k]).norm() for k in patches]
                    distances.append(sum(s * float(d) for s, d in zip(shares, places, strict=True)))
                    spread = -sum(s * math.log(s) for s in shares)
                    entropies.append(spread / math.log(len(patches)) if len(patches) > 1 else 0.0)
            mean = sum(distances) / len(distances) / math.hypot(9, 9)
            assert float(distance[image, head]) == pytest.approx(mean, rel=1e-12)
            assert float(entropy[image, head]) == pytest.approx(sum(entropies) / len(entropies), rel=1e-9, abs=1e-12)


def test_a_query_that_all_but_ignores_patches_is_still_seen() -> None:
    """CLS gets all but e⁻¹⁰⁰⁰ of the attention: after the softmax nothing would be left to renormalise."""
    logits = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    logits[..., 0] = 1000.0
    logits[..., 1:, 1:] = torch.eye(4, dtype=torch.float64) * 50
    assert math.isnan(float(attention_distance(logits.softmax(-1), (2, 2))))
    query = torch.eye(5, dtype=torch.float64)[None, None]
    distance, entropy = reduce(of_sdpa(query, query, query, logits, scale=0.0), (2, 2), 1)
    assert float(distance) == pytest.approx(0, abs=1e-15)
    assert float(entropy) == pytest.approx(0, abs=1e-15)


def test_nan_stays_visible() -> None:
    query, key, value = random_inputs(10)
    query[1, 2, 5] = math.nan
    distance, entropy = reduce(of_sdpa(query, key, value), (3, 3), 1)
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
    with LargestTensor() as largest:
        reduce(of_sdpa(query, query, query), (32, 32), 1, tile_bytes=2**20)
    assert largest.numel <= 2**20 / 8
    assert largest.numel < 1025 * 1025 / 8


def test_without_a_compiler_for_the_kernel_it_goes_on_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    tried: list[object] = []
    monkeypatch.setattr(stream, "_cannot_compile", [])
    monkeypatch.setattr(
        stream, "has_kernel", lambda attention, _: not stream._cannot_compile and not tried.append(attention)
    )
    monkeypatch.setattr(stream.kernels, "fused_attention_rows", fails)
    query, key, value = (tensor.float() for tensor in random_inputs(9))
    expected = reduce(of_sdpa(query, key, value), (3, 3), 0)
    for _ in range(2):
        with pytest.warns(UserWarning, match="without its fast kernel") if not tried else nullcontext():
            distance, _ = reduce_attention(of_sdpa(query, key, value), plain_site((3, 3), 0))
        torch.testing.assert_close(distance, expected[0], rtol=1e-5, atol=0)
    assert len(tried) == 1
