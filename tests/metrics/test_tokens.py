"""Outliers, sinks, the Gini coefficient and the share of the background, against loops and cases known by thought."""

import math

import pytest
import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.metrics import (
    attention_distance,
    background_share,
    gini,
    outlier_tokens,
    patch_coverage,
    received_attention,
    sink_patches,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quantile(values: list[float], level: float) -> float:
    values = sorted(values)
    at = level * (len(values) - 1)
    low, high = values[math.floor(at)], values[math.ceil(at)]
    return low + (at - math.floor(at)) * (high - low)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 24, 196])
def test_outliers_are_those_of_the_loop(count: int) -> None:
    norms = random(6, count) + 1
    norms[1:, 0] += 9
    norms[2:, -1] += torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    found = outlier_tokens(norms)
    for image, values in enumerate(norms.tolist()):
        quarter, median, three = (quantile(values, level) for level in (0.25, 0.5, 0.75))
        expected = [value > three + 3 * (three - quarter) and value > 2 * median for value in values]
        assert found[image].tolist() == expected
    assert bool(found[1, 0]) == (count > 4)


def test_never_a_quarter_of_the_patches_are_outliers_nor_what_differs_by_rounding() -> None:
    for share in (0.1, 0.2, 0.24, 0.26, 0.4, 0.5):
        norms = 10 + random(200)
        norms[: round(200 * share)] *= 10
        assert float(outlier_tokens(norms).double().mean()) == (share if share < 0.25 else 0)
    equal = torch.ones(196, dtype=torch.float64)
    equal[7] += 1e-12
    assert not outlier_tokens(equal).any()
    assert outlier_tokens(equal, ratio=1.0)[7]
    normal = 10 + torch.randn(1000, 196, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(outlier_tokens(normal, ratio=1.0).double().mean()) < 1e-4
    with pytest.raises(InputError, match="ratio"):
        outlier_tokens(equal, ratio=0.5)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_received_attention_and_sinks_are_those_of_the_loop(prefix: int) -> None:
    attn = (random(2, 3, prefix + 24, prefix + 24) * 4).softmax(-1)
    attn[0, 0, :, prefix + 5] += 2
    attn = attn / attn.sum(-1, keepdim=True)
    found = received_attention(attn, num_prefix_tokens=prefix)
    for image in range(2):
        for head in range(3):
            for key in range(prefix + 24):
                expected = sum(float(attn[image, head, query, key]) for query in range(prefix, prefix + 24)) / 24
                assert float(found[image, head, key]) == pytest.approx(expected, rel=1e-12)
    sinks = sink_patches(found[..., prefix:])
    assert sinks.nonzero().tolist() == [[0, 0, 5]]
    assert not sink_patches(found[..., prefix:], times=23).any()
    # As what a map is without them: the others are renormalised.
    without = attn.clone()
    without[..., prefix:][sinks[..., None, :].expand_as(without[..., prefix:])] = 0
    assert float(attention_distance(without, (4, 6), num_prefix_tokens=prefix)[0, 0]) > 0


def test_the_gini_coefficient_is_half_the_mean_difference() -> None:
    values = random(3, 17)
    for row, found in zip(values.tolist(), gini(values).tolist(), strict=True):
        differences = [abs(one - other) for one in row for other in row]
        assert found == pytest.approx(sum(differences) / 17**2 / 2 / (sum(row) / 17), rel=1e-12)
    assert float(gini(torch.ones(9))) == pytest.approx(0, abs=1e-15)
    assert float(gini(torch.tensor([0.0, 0, 0, 5]))) == pytest.approx(0.75)
    assert math.isnan(float(gini(torch.zeros(4))))


def test_the_share_of_the_background() -> None:
    masks = random(2, 8, 12) > 0.5
    covered = patch_coverage(masks, (2, 3))
    weights = random(2, 4, 6, seed=1)
    found = background_share(weights, covered[:, None])
    for image in range(2):
        parts = [
            float(masks[image, 4 * row : 4 * row + 4, 4 * col : 4 * col + 4].double().mean())
            for row in range(2)
            for col in range(3)
        ]
        assert covered[image].tolist() == pytest.approx(parts, rel=1e-12)
        for head in range(4):
            row = weights[image, head].tolist()
            expected = sum(weight * part for weight, part in zip(row, parts, strict=True)) / sum(row)
            assert float(found[image, head]) == pytest.approx(expected, rel=1e-12)
    uniform = background_share(torch.ones(2, 6), covered)
    torch.testing.assert_close(uniform, covered.mean(-1))
    with pytest.raises(InputError, match="multiples of 3×3"):
        patch_coverage(masks, (3, 3))
    with pytest.raises(InputError, match="5 weights do not fit 6 patches"):
        background_share(torch.ones(5), covered)


def test_bad_shapes_are_named() -> None:
    with pytest.raises(InputError, match="heads, N, N"):
        received_attention(torch.ones(2, 3, 4))
    with pytest.raises(InputError, match="leave no patch"):
        received_attention(torch.ones(2, 4, 4), num_prefix_tokens=4)
    with pytest.raises(InputError, match="times"):
        sink_patches(torch.ones(4), times=0.5)
