"""Attention with its bias, and its gradients, against float64 and its autograd."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nearsight import triton_language
from nearsight.train.fused import attention
from nearsight.train.fused.attention import attention_backward, attention_forward
from nearsight.train.fused.attention_parts import Tiling, is_supported, tiling_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.5e-2}
"""Of the largest number in a result: in the low dtypes, weights and gradients of logits are rounded."""


class Case(NamedTuple):
    tokens: int
    heads: int
    size: int
    dtype: torch.dtype = F32
    sharpness: float = 1.0
    """The deviation of logits."""
    tiling: Tiling | None = None

    def __str__(self) -> str:
        return "-".join(str(x) for x in (*self[:-1], *(self.tiling or ())))


class Inputs(NamedTuple):
    qkv_RN3Hd: Tensor
    bias_K3Hd: Tensor
    out_grad_RNHd: Tensor
    scale: float
    mask_NM: Tensor | None = None


SIZES = [
    (1, 1, 8), (16, 2, 24), (17, 1, 24), (63, 1, 32), (64, 1, 24), (65, 3, 24), (79, 1, 16), (80, 1, 48), (81, 1, 17),
    (128, 1, 32), (129, 1, 64), (144, 1, 48),
]  # fmt: skip
"""Tokens, heads, head size: for each block, whole and partial, without a tail, with part of one and with all of it."""
OTHER_SIZES = [(5, 3, 16), (33, 1, 24), (50, 1, 32), (64, 2, 24), (66, 3, 8), (101, 2, 16)]
SOME = [(16, 16), (17, 8), (50, 24), (65, 24), (101, 32), (129, 64)]
TILINGS = [
    (65, F32, Tiling(main=64, queries=16, warps=1)),
    (65, BF16, Tiling(main=64, queries=32, warps=2)),
    (65, BF16, Tiling(main=128, queries=64, warps=4, stages=1)),
    (50, F32, Tiling(main=64, queries=16, warps=1)),
    (129, BF16, Tiling(main=128, queries=32, warps=4)),
]
OTHER_TILINGS = [
    (65, BF16, Tiling(main=64, queries=64, warps=4, registers=128)),
    (50, BF16, Tiling(main=64, queries=64, warps=2)),
]
OTHER_CASES = [  # whose difference only a compiler sees
    *(Case(*size) for size in OTHER_SIZES),
    *(Case(tokens, 2, size, dtype) for tokens, size in SOME for dtype in (BF16, F16)),
    *(Case(64, 2, 24, dtype, sharpness=15) for dtype in TOLERANCE),
    *(Case(tokens, 2, 24, dtype, tiling=tiling) for tokens, dtype, tiling in OTHER_TILINGS),
]
CASES = [
    *(Case(*size) for size in SIZES),
    *(Case(tokens, 1, size, F16) for tokens, size in SOME),
    *(Case(tokens, 1, size, BF16) for tokens, size in SOME[1:4:2]),
    *(Case(65, 1, 24, dtype, sharpness=15) for dtype in TOLERANCE),
    *(Case(tokens, 1, 24, dtype, tiling=tiling) for tokens, dtype, tiling in TILINGS),
    *(pytest.param(case, marks=pytest.mark.gpu) for case in OTHER_CASES),
]


def make_inputs(case: Case, num_cells: int, images_per_cell: int, normal: Callable[..., Tensor]) -> Inputs:
    """Sixteenths, whose sums with a bias are exact in every dtype. Some logits of sharp cases are about ±60."""
    packed = 3, case.heads, case.size
    qkv = normal(num_cells * images_per_cell, case.tokens, *packed, dtype=case.dtype)
    qkv[:, :, :2] *= case.sharpness**0.5
    bias = normal(num_cells, *packed)
    for x in (qkv, bias):
        x.mul_(16).round_().clamp_(-127, 127).div_(16)
    return Inputs(qkv, bias, normal(*qkv.shape[:2], *packed[1:], dtype=case.dtype), case.size**-0.5)


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(output, gradient by the sums of qkv and bias) in float64."""
    images_per_cell = len(inputs.qkv_RN3Hd) // len(inputs.bias_K3Hd)
    exact = inputs.qkv_RN3Hd.double() + inputs.bias_K3Hd.double().repeat_interleave(images_per_cell, 0)[:, None]
    query, key, value = exact.requires_grad_().permute(2, 0, 3, 1, 4)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=inputs.mask_NM, scale=inputs.scale
    ).transpose(1, 2)
    (grad,) = torch.autograd.grad(out, exact, inputs.out_grad_RNHd.double())
    return out.detach(), grad


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    out = attention_forward(inputs.qkv_RN3Hd, inputs.bias_K3Hd, inputs.scale, inputs.mask_NM)
    return out, attention_backward(*inputs)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max() + 1e-6, f"off by {error:.1e} of {expected.abs().max():.1e}"


def check(inputs: Inputs, *, tolerance: float) -> None:
    """Assert that all results are right."""
    dtype = inputs.qkv_RN3Hd.dtype
    expected, expected_grad = reference(inputs)
    out, grad = run(inputs)
    assert (out.dtype, grad.dtype) == (dtype, dtype)
    assert out.is_contiguous()
    assert grad.is_contiguous()
    assert_near(out, expected, tolerance)
    for part in range(3):  # queries and keys have smaller gradients than values
        assert_near(grad[:, :, part], expected_grad[:, :, part], tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted = memory.device.type == "cpu"
    inputs = make_inputs(case, *((1, 1) if interpreted else (3, 12)), memory.normal)
    if case.tiling:
        monkeypatch.setattr(attention, "tiling_of", lambda *_, **__: case.tiling)
    # In float32, the error is that of the logits.
    check(inputs, tolerance=TOLERANCE[case.dtype] * (case.sharpness if case.dtype == F32 else 1))


MASKED = [
    *(
        Case(*size)
        for size in ((1, 1, 8), (17, 2, 24), (64, 1, 24), (65, 2, 24), (80, 1, 16), (81, 1, 17), (144, 1, 32))
    ),
    *(Case(65, 1, 24, dtype) for dtype in (F16, BF16)),
    *(Case(tokens, 1, 24, dtype, tiling=tiling) for tokens, dtype, tiling in TILINGS),
]


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_masks_against_float64(case: Case, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mask that leaves every query a key."""
    inputs = make_inputs(case, *((1, 1) if memory.device.type == "cpu" else (3, 12)), memory.normal)
    mask_NM = memory.normal(case.tokens, case.tokens) > 0.8
    mask_NM[:, : case.tokens // 2] &= memory.normal(case.tokens, 1) > 0  # for some, nothing in the main block
    mask_NM |= torch.eye(case.tokens, dtype=torch.bool, device=mask_NM.device)
    if case.tiling:
        monkeypatch.setattr(attention, "tiling_of", lambda *_, **__: case.tiling)
    check(inputs._replace(mask_NM=mask_NM), tolerance=TOLERANCE[case.dtype])


def test_every_cell_has_its_bias(memory: Any) -> None:
    check(make_inputs(Case(17, 1, 8), 3, 2, memory.normal), tolerance=TOLERANCE[F32])


@pytest.mark.parametrize("tokens", [5, 65])
def test_images_and_heads_are_apart(tokens: int, memory: Any) -> None:
    """NaN in one head of one image stays there."""
    inputs = make_inputs(Case(tokens, 2, 24), 1, 2, memory.normal)
    expected, expected_grad = reference(inputs)
    inputs.qkv_RN3Hd[0, :, :, 1] = math.nan
    for result, right in zip(run(inputs), (expected, expected_grad), strict=True):
        assert result[0, ..., 1, :].isnan().all()
        result[0, ..., 1, :], right[0, ..., 1, :] = 0, 0
        assert_near(result, right, TOLERANCE[F32])


@pytest.mark.parametrize("tokens", [5, 65])
def test_a_nan_in_a_value_reaches_all_queries_of_its_map(tokens: int, memory: Any) -> None:
    """And nothing else; the last token is in the tail where there is one."""
    inputs = make_inputs(Case(tokens, 2, 24), 1, 1, memory.normal)
    inputs.qkv_RN3Hd[0, -1, 2, 1, 5] = math.nan
    out, grad = run(inputs)
    assert out[0, :, 1, 5].isnan().all()
    assert out.isnan().sum() == tokens
    assert grad[0, :, :2, 1].isnan().all()
    assert not grad[0, :, 2].isnan().any()
    assert not grad[0, :, :, 0].isnan().any()


@pytest.mark.parametrize("tokens", [5, 65])
def test_the_last_token_has_by_far_the_largest_logits(tokens: int, memory: Any) -> None:
    """60, and the others −60: weights relative to the largest of the others would overflow."""
    inputs = make_inputs(Case(tokens, 1, 24), 1, 1, memory.normal)
    inputs.bias_K3Hd[:, :2] = 0
    inputs.qkv_RN3Hd[:, :, :2] = (60 / 24 / inputs.scale) ** 0.5
    inputs.qkv_RN3Hd[:, :-1, 1] *= -1
    check(inputs, tolerance=TOLERANCE[F32])


@pytest.mark.parametrize("interpreted", [False, True])
def test_what_is_supported(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_language, "triton", object())
    monkeypatch.setattr(triton_language, "INTERPRETED", interpreted)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for dtype in (BF16, F16, F32):
        assert is_supported(1, 1, dtype, gpu)
        assert is_supported(144, 64, dtype, gpu)
        assert is_supported(65, 24, dtype, cpu) == interpreted
    assert not is_supported(65, 24, torch.float64, gpu)
    assert not is_supported(145, 24, BF16, gpu)
    assert not is_supported(65, 65, BF16, gpu)
    assert not is_supported(0, 24, BF16, gpu)
    assert not is_supported(65, 0, BF16, gpu)
    monkeypatch.setattr(triton_language, "triton", None)
    assert not is_supported(65, 24, BF16, gpu)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("low", TOLERANCE, ids=str)
def test_blocks_hold_all_tokens_and_little_else(low: torch.dtype, backward: bool) -> None:
    for tokens, size in itertools.product(range(1, 145), (8, 24, 64)):
        tiling = tiling_of(tokens, size, low, backward=backward)
        assert tiling.main % tiling.queries == 0
        assert tokens <= tiling.main + 16 < max(33, 2 * tokens + 16)
    blocks = [tiling_of(tokens, 24, low, backward=backward).main for tokens in (16, 17, 64, 65, 66, 128, 129)]
    assert blocks == [16, 32, 64, 64, 64, 128, 128]


def test_the_reference_of_uniform_attention() -> None:
    """With queries of 0, outputs are the mean value, and every value's gradient is that of the mean."""
    inputs = make_inputs(Case(7, 2, 8), 1, 1, lambda *shape, dtype=F32: torch.randn(shape, dtype=dtype))
    inputs.bias_K3Hd[:, 0], inputs.qkv_RN3Hd[:, :, 0] = 0, 0
    out, grad = reference(inputs)
    value = inputs.qkv_RN3Hd[:, :, 2] + inputs.bias_K3Hd[:, None, 2]
    torch.testing.assert_close(out, value.double().mean(1, keepdim=True).expand_as(out))
    mean_grad = inputs.out_grad_RNHd.double().mean(1, keepdim=True)
    torch.testing.assert_close(grad[:, :, 2], mean_grad.expand_as(out))
    assert not grad[:, :, 1].any()
