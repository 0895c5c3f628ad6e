"""The kernel against a dense float64 computation, without a GPU. `test_kernels_gpu.py` runs the same cases compiled."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nearsight.lens import kernels
from nearsight.metrics import uniform_attention_distance
from nearsight.triton_language import triton

NAN = math.nan


class Size(NamedTuple):
    batch: int = 1
    heads: int = 2
    grid: tuple[int, int] = (9, 8)
    width: int = 16


Inputs = dict[str, Any]
"""The arguments of `fused_attention_rows`."""
CASES: dict[str, Callable[[Size], Inputs]] = {}


def case(make: Callable[[Size], Inputs]) -> Callable[[Size], Inputs]:
    CASES[make.__name__] = make
    return make


def places_of(grid: tuple[int, int], prefix: int = 0) -> Tensor:
    """[1, N, 2]: prefix tokens, then patches row by row."""
    y, x = torch.meshgrid(torch.arange(float(grid[0])), torch.arange(float(grid[1])), indexing="ij")
    return torch.cat([torch.full((prefix, 2), NAN), torch.stack([y, x], -1).flatten(0, 1)])[None]


def self_attention(size: Size, *, prefix: int = 1, dtype: torch.dtype = torch.float32, sharpness: float = 2) -> Inputs:
    """Queries and keys as timm packs them: views into one [B, N, 3, H, d] tensor."""
    torch.manual_seed(0)
    batch, heads, grid, width = size
    tokens = grid[0] * grid[1] + prefix
    qkv = sharpness**0.5 * torch.randn(batch, tokens, 3 * heads * width)
    query, key, _ = qkv.to(dtype).reshape(batch, 1, tokens, 3, heads, width).permute(3, 0, 1, 4, 2, 5).unbind(0)
    places = places_of(grid, prefix)
    return {
        "query_BWHNd": query,
        "key_BWHMd": key,
        "scale": width**-0.5,
        "query_places_WN2": places,
        "key_places_WM2": places,
        "bias": None,
    }


def with_bias(size: Size, make: Callable[[list[int]], Tensor], *, dtype: torch.dtype = torch.float32) -> Inputs:
    inputs = self_attention(size, dtype=dtype)
    tokens = inputs["query_places_WN2"].shape[1]
    inputs["bias"] = make([size.batch, 1, size.heads, tokens, tokens])
    return inputs


@case
def float32(size: Size) -> Inputs:
    return self_attention(size._replace(batch=2))


@case
def bfloat16(size: Size) -> Inputs:
    return self_attention(size._replace(batch=2), dtype=torch.bfloat16)


@case
def float16(size: Size) -> Inputs:
    return self_attention(size, dtype=torch.float16)


@case
def sharp_float32(size: Size) -> Inputs:
    """Logits up to about ±60."""
    return self_attention(size, sharpness=15)


@case
def sharp_bfloat16(size: Size) -> Inputs:
    return self_attention(size, sharpness=15, dtype=torch.bfloat16)


@case
def sharp_float16(size: Size) -> Inputs:
    return self_attention(size, sharpness=15, dtype=torch.float16)


@case
def no_prefix_tokens(size: Size) -> Inputs:
    return self_attention(size, prefix=0)


@case
def more_prefix_tokens_than_a_tile(size: Size) -> Inputs:
    return self_attention(size, prefix=130)


@case
def whole_tiles_of_keys_after_five_prefix_tokens(size: Size) -> Inputs:
    return self_attention(size._replace(grid=(16, 12)), prefix=5, dtype=torch.bfloat16)


@case
def one_patch(size: Size) -> Inputs:
    return self_attention(size._replace(grid=(1, 1)))


@case
def width_8(size: Size) -> Inputs:
    return self_attention(size._replace(width=8))


@case
def width_24(size: Size) -> Inputs:
    return self_attention(size._replace(width=24), dtype=torch.bfloat16)


@case
def width_72(size: Size) -> Inputs:
    return self_attention(size._replace(width=72))


@case
def width_80(size: Size) -> Inputs:
    return self_attention(size._replace(width=80), dtype=torch.float16)


@case
def width_128(size: Size) -> Inputs:
    return self_attention(size._replace(width=128), dtype=torch.bfloat16)


@case
def width_160(size: Size) -> Inputs:
    return self_attention(size._replace(width=160))


@case
def an_odd_number_of_maps(size: Size) -> Inputs:
    return self_attention(size._replace(batch=1, heads=3, grid=(5, 5)), dtype=torch.bfloat16)


@case
def scattered_tokens_that_are_no_patches(size: Size) -> Inputs:
    inputs = self_attention(size)
    inputs["key_places_WM2"] = inputs["key_places_WM2"].clone()
    inputs["key_places_WM2"][:, 5::7] = NAN
    inputs["query_places_WN2"] = inputs["query_places_WN2"].clone()
    inputs["query_places_WN2"][:, 3::5] = NAN
    return inputs


@case
def windows_of_different_places(size: Size) -> Inputs:
    """Four windows, the last of which is half padding; heads and windows swap places in memory."""
    torch.manual_seed(0)
    batch, heads, _, width = size._replace(batch=2)
    query, key = (2**0.5 * torch.randn(batch, heads, 4, 49, width).bfloat16().transpose(1, 2) for _ in range(2))
    places = places_of((7, 7)) + torch.tensor([[0, 0], [0, 7], [7, 0], [7, 7]])[:, None]
    places[3, 21:] = NAN
    return {
        "query_BWHNd": query,
        "key_BWHMd": key,
        "scale": 0.3,
        "query_places_WN2": places,
        "key_places_WM2": places,
        "bias": torch.randn(heads, 49, 49),
    }


@case
def pooled_keys(size: Size) -> Inputs:
    inputs = self_attention(size)
    rows, cols = size.grid[0] // 2, size.grid[1] // 2
    inputs["key_BWHMd"] = inputs["key_BWHMd"][:, :, :, : 1 + rows * cols]
    inputs["key_places_WM2"] = places_of((rows, cols), 1) * 2 + 0.5
    return inputs


@case
def grouped_heads(size: Size) -> Inputs:
    inputs = self_attention(size._replace(heads=6))
    inputs["key_BWHMd"] = inputs["key_BWHMd"][:, :, ::3]
    return inputs


@case
def no_axis_of_stride_1(size: Size) -> Inputs:
    inputs = self_attention(size)
    for name in ("query_BWHNd", "key_BWHMd"):
        inputs[name] = inputs[name].transpose(-1, -2).contiguous().transpose(-1, -2)
    return inputs


@case
def negative_scale(size: Size) -> Inputs:
    return self_attention(size) | {"scale": -0.7}


@case
def scale_0_and_masked_keys(size: Size) -> Inputs:
    return with_bias(size, lambda shape: torch.rand(shape[-1]) > 0.5) | {"scale": 0.0}


@case
def bias_of_heads(size: Size) -> Inputs:
    return with_bias(size, lambda shape: torch.randn(shape[2:]), dtype=torch.bfloat16)


@case
def bfloat16_bias_of_images(size: Size) -> Inputs:
    size = size._replace(batch=2)
    return with_bias(size, lambda shape: torch.randn(shape[0], 1, 1, *shape[3:]).bfloat16())


@case
def bias_along_queries_first(size: Size) -> Inputs:
    return with_bias(size, lambda shape: torch.randn(shape[4], shape[3]).mT)


@case
def mask_of_keys(size: Size) -> Inputs:
    size = size._replace(batch=2)
    return with_bias(size, lambda shape: torch.rand(shape[0], 1, 1, 1, shape[4]) > 0.3)


@case
def causal_mask(size: Size) -> Inputs:
    """The first query sees no patch, the second one only."""
    return with_bias(size, lambda shape: torch.ones(shape[3:], dtype=torch.bool).tril(), dtype=torch.bfloat16)


@case
def whole_tiles_masked_before_the_first_key(size: Size) -> Inputs:
    size = size._replace(grid=(14, 12))
    return with_bias(size, lambda shape: torch.ones(shape[3:], dtype=torch.bool).triu(), dtype=torch.float16)


@case
def whole_tiles_of_minus_infinity_before_the_first_key(size: Size) -> Inputs:
    def make(shape: list[int]) -> Tensor:
        return torch.randn(shape[3:]).masked_fill(torch.ones(shape[3:], dtype=torch.bool).tril(-1), -math.inf)

    return with_bias(size._replace(grid=(14, 12)), make, dtype=torch.bfloat16)


@case
def strong_bias(size: Size) -> Inputs:
    return with_bias(size, lambda shape: 10 * torch.randn(shape[2:]))


@case
def bias_of_minus_infinity(size: Size) -> Inputs:
    """Some keys of all queries, and all patches of some queries."""

    def make(shape: list[int]) -> Tensor:
        bias = torch.randn(shape[3:])
        bias[:, 2::3] = -math.inf
        bias[:, 4] = torch.finfo(torch.float32).min
        bias[7:9, 1:] = -math.inf
        return bias

    return with_bias(size, make, dtype=torch.bfloat16)


@case
def mask_of_all_keys(size: Size) -> Inputs:
    return with_bias(size, lambda shape: torch.zeros(1, dtype=torch.bool))


@case
def nan_in_a_query(size: Size) -> Inputs:
    inputs = self_attention(size)
    inputs["query_BWHNd"][0, 0, 1, 5, 3] = NAN
    return inputs


@case
def nan_in_a_key(size: Size) -> Inputs:
    inputs = self_attention(size, dtype=torch.bfloat16)
    inputs["key_BWHMd"][0, 0, 1, 5, 3] = NAN
    return inputs


@case
def nan_in_a_key_that_is_no_patch(size: Size) -> Inputs:
    inputs = self_attention(size)
    inputs["key_BWHMd"][0, 0, 1, 0] = NAN
    return inputs


@case
def nan_in_a_bias(size: Size) -> Inputs:
    def make(shape: list[int]) -> Tensor:
        bias = torch.randn(shape[3:])
        bias[5, 8] = NAN
        bias[:, 0] = NAN  # of a key that is no patch
        return bias

    return with_bias(size, make, dtype=torch.bfloat16)


@case
def hidden_keys(size: Size) -> Inputs:
    """Of the second head alone; of the first nothing is computed."""
    inputs = self_attention(size._replace(batch=2), dtype=torch.bfloat16)
    hidden = torch.rand(2, 1, size.heads, inputs["key_BWHMd"].shape[3]) < 0.2
    hidden[:, :, 0] = False
    return inputs | {"hidden_BWHM": hidden}


@case
def hidden_keys_behind_a_mask(size: Size) -> Inputs:
    """All keys of one map, and some of the others."""
    inputs = with_bias(size, lambda shape: torch.rand(shape[3:]) > 0.3)
    hidden = torch.rand(size.batch, 1, size.heads, inputs["key_BWHMd"].shape[3]) < 0.4
    hidden[:, :, 1] = True
    return inputs | {"hidden_BWHM": hidden}


@case
def hidden_keys_of_some_windows(size: Size) -> Inputs:
    """The other windows are part of the same heads, and are computed."""
    inputs = windows_of_different_places(size)
    hidden = torch.rand(2, 4, size.heads, 49) < 0.3
    hidden[:, 1:3] = False
    return inputs | {"hidden_BWHM": hidden}


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """All maps at once, in float64."""
    query, key, bias = inputs["query_BWHNd"].double(), inputs["key_BWHMd"].double(), inputs["bias"]
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    logits = query @ key.transpose(-1, -2) * inputs["scale"]
    if bias is not None:
        logits = logits.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else logits + bias.double()
    query_places, key_places = inputs["query_places_WN2"].double(), inputs["key_places_WM2"].double()
    hidden = inputs.get("hidden_BWHM")
    if hidden is not None:
        nothing = ~hidden.any(-1)[..., None, None] & (hidden.shape[1] == 1)
        logits = logits.masked_fill(hidden.unsqueeze(-2) | nothing, -math.inf)
    logits = logits.masked_fill(key_places[:, None, None, :, 0].isnan(), -math.inf)
    share = logits.softmax(-1)  # NaN in rows of nothing but −∞
    difference = query_places[:, :, None] - key_places.nan_to_num()[:, None]
    distance = (share * difference.square().sum(-1).sqrt()[:, None]).sum(-1)
    entropy = torch.special.entr(share).sum(-1)
    return distance, entropy.masked_fill(query_places[:, None, :, 0].isnan(), NAN)


def check(name: str, size: Size, device: str) -> dict[str, float]:
    """Asserts that a case's results are right; the worst relative errors of a query and of a head's mean."""
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in CASES[name](size).items()}
    worst = {}
    results = kernels.fused_attention_rows(**inputs)
    for kind, found, expected in zip(("distance", "entropy"), results, reference(inputs), strict=True):
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        assert torch.equal(found.isnan(), expected.isnan()), f"{kind}: NaN in the wrong places"
        assert not (found < 0).any(), kind
        error = ((found - expected).abs() - 1e-7).clamp(min=0)
        # A query that looks at one key alone has an entropy of all but 0: there is no relative error to speak of.
        row = (error / (expected + 1e-2)).nan_to_num().max()
        head = (error.nanmean(-1) / expected.nanmean(-1)).nan_to_num().max()
        worst |= {f"{kind} of a query": float(row), f"{kind} of a head": float(head)}
    assert all(error < (5e-5 if "query" in what else 1e-5) for what, error in worst.items()), worst
    return worst


pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not installed")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    check(name, Size(), "cpu")


def test_the_reference_of_uniform_attention() -> None:
    inputs = self_attention(Size(batch=2, heads=3, grid=(6, 8))) | {"scale": 0.0}
    distance, entropy = (x[..., 1:] for x in reference(inputs))
    expected = torch.full([2, 1, 3], uniform_attention_distance((6, 8)) * math.hypot(5, 7), dtype=torch.float64)
    torch.testing.assert_close(distance.mean(-1), expected)
    torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(48)))
