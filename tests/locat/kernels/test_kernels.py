"""Attention with a local bias, and its gradients, against all pairs at once in float64 and its autograd."""

import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight import triton_language
from nearsight.locat.gaussian import Grid
from nearsight.locat.kernels import attention, is_supported, radial_attention
from nearsight.locat.kernels.attention import Geometry, Inputs, Tiling

shared = runpy.run_path(str(Path(__file__).with_name("gaussian_reference.py")))
Case, make_inputs, reference = shared["Case"], shared["make_inputs"], shared["reference"]
assert_near, assert_all_near, TOLERANCE = shared["assert_near"], shared["assert_all_near"], shared["TOLERANCE"]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

SHAPES = ("laplace", "inverse", "distance")
FEW, SOME = Grid(3, 5, 1), Grid(5, 9, 5)
GRIDS = [FEW, Grid(3, 5, 0), Grid(3, 5, 40), Grid(8, 8, 0), Grid(8, 8, 1), Grid(1, 1, 0), Grid(3, 33, 1)]
"""Less than a tile of keys; with none and with many prefix tokens; whole tiles, and those that prefix tokens add."""
OTHER_GRIDS = [
    *(Grid(rows, cols, 1) for rows, cols in ((4, 4), (7, 9), (1, 1), (1, 19))),
    *(Grid(3, 5, 5), Grid(8, 8, 5), Grid(19, 1, 2), Grid(2, 40, 3)),
]
OTHER_CASES = [  # whose difference only a compiler sees
    *(Case(grid, 16) for grid in OTHER_GRIDS),
    *(Case(Grid(4, 4, 1), size) for size in (32, 48, 96)),
    *(Case(SOME, size, F16) for size in (16, 64)),
    Case(SOME, 16, precision=1e-3),
    Case(SOME, 16, strength=0),
    Case(SOME, 16, largest_half_square=18.1, precision=0.1),
    Case(Grid(3, 9, 1), 16, F16, largest_half_square=2, precision=0.1),
]
CASES = [
    *(Case(grid, 16) for grid in GRIDS),
    *(Case(Grid(4, 4, 1), size) for size in (1, 24, 64, 80, 128)),
    *(Case(SOME, size, F16) for size in (24, 96)),
    Case(FEW, 16, precision=0),
    Case(FEW, 16, precision=1e4),
    Case(FEW, 16, strength=40),
    Case(FEW, 16, sharpness=15),
    Case(FEW, 16, F16, sharpness=15),
    Case(SOME, 16, largest_half_square=4.5, precision=0.1),
    *(Case(SOME, 16, shape=shape) for shape in SHAPES),
    *(Case(FEW, 24, F16, strength=0.5, shape=shape) for shape in SHAPES),
    Case(SOME, 16, largest_half_square=4.5, precision=0.1, shape="laplace"),
    Case(SOME, 16, shape="none", reach=(1.5,)),
    Case(FEW, 16, shape="none", reach=(1.0, 2.3)),
    Case(Grid(8, 8, 0), 64, F16, shape="none", reach=(2.0,)),
    Case(SOME, 16, shape="distance", reach=(2.9,)),
    Case(SOME, 16, largest_half_square=4.5, precision=0.1, reach=(4.2,)),
    *(pytest.param(case, marks=pytest.mark.gpu) for case in OTHER_CASES),
]
TILINGS = [
    (Grid(4, 8, 1), Tiling(queries=64, rows=2, cols=8, warps=4)),
    (Grid(5, 8, 1), Tiling(queries=32, rows=1, cols=16, warps=4)),
    (Grid(3, 9, 5), Tiling(queries=16, rows=16, cols=4, warps=4)),
    (Grid(7, 9, 5), Tiling(queries=128, rows=4, cols=32, warps=4)),
    (Grid(2, 33, 1), Tiling(queries=64, rows=1, cols=32, warps=4)),
    (Grid(3, 9, 5), Tiling(queries=64, rows=2, cols=16, warps=4, one_loop=True)),
    (Grid(2, 18, 1), Tiling(queries=64, rows=2, cols=16, warps=4, one_loop=True)),
]


def run(
    inputs: Inputs, geometry: Geometry, out_grad: Tensor, reach_BH: Tensor | None = None, wanted: int = 2
) -> tuple[Tensor, Inputs]:
    out, log_sum = attention.forward(inputs, geometry, reach_BH)
    return out, attention.backward(inputs, geometry, out, log_sum, out_grad, reach_BH, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Any, memory: Any) -> None:
    num_heads = 2 if case.grid == FEW or memory.device.type == "cuda" else 1
    inputs, out_grad = make_inputs(case, 1, num_heads, memory.normal)
    reach_BH = case.reaches(1, num_heads, memory.device)
    out, grads = run(inputs, case.geometry, out_grad, reach_BH, case.wanted)
    assert out.dtype == case.dtype
    assert [grad.dtype for grad in grads] == [case.dtype] * 3 + [F32] * 2
    assert all(rows.transpose(1, 2).is_contiguous() for rows in (out, *grads[:3]))
    tolerance = TOLERANCE[case.dtype] * (case.sharpness if case.dtype == F32 else 1)  # the error is that of logits
    assert_all_near((out, grads), reference(inputs, case.geometry, out_grad, reach_BH), out_grad, tolerance)


@pytest.mark.parametrize("shape", ["gaussian", "distance"])
def test_gradients_that_nobody_wants_are_not_made(shape: Any, memory: Any) -> None:
    case = Case(FEW, 16, shape=shape)
    inputs, out_grad = make_inputs(case, 1, 1, memory.normal)
    _, whole = run(inputs, case.geometry, out_grad)
    _, some = run(inputs, case.geometry, out_grad, wanted=1)
    _, none = run(inputs, case.geometry, out_grad, wanted=0)
    assert [len(grad.flatten()) for grad in (*some[3:], *none[3:])] == [0, whole.strength_BHP.numel(), 0, 0]
    for found, expected in ((some.strength_BHP, whole.strength_BHP), *zip(none[:3], whole[:3], strict=True)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("grid", "tiles"), TILINGS)
def test_any_tiles(grid: Grid, tiles: Tiling, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "tiling_of", lambda *_: tiles)
    case = Case(grid, 16)
    inputs, out_grad = make_inputs(case, 1, 1, memory.normal)
    expected = reference(inputs, case.geometry, out_grad)
    assert_all_near(run(inputs, case.geometry, out_grad), expected, out_grad, TOLERANCE[F32])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_as_an_operation_of_torch(dtype: torch.dtype, device: torch.device) -> None:
    """With inputs of any strides, and a gradient that is one number for all."""
    case = Case(Grid(3, 4, 1), 16, dtype)
    inputs, _ = make_inputs(case, 2, 1, lambda *shape, dtype=F32: torch.randn(shape).to(device, dtype))
    inputs = Inputs(*(x.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for x in inputs))
    out = radial_attention(*inputs, case.grid, scale=case.geometry.scale)
    grads = Inputs(*torch.autograd.grad(out.sum(), inputs))
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    out_grad = torch.ones_like(out)
    assert_all_near((out, grads), reference(inputs, case.geometry, out_grad), out_grad, TOLERANCE[dtype])


def test_without_strength_it_is_plain_attention(device: torch.device) -> None:
    case = Case(Grid(3, 5, 1), 16)
    inputs, _ = make_inputs(case, 1, 2, lambda *shape, dtype=F32: torch.randn(shape).to(device, dtype))
    inputs.strength_BHP.zero_()
    out = radial_attention(*inputs, case.grid, scale=0.3)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs[:3], scale=0.3))


def test_images_and_heads_are_apart(memory: Any) -> None:
    """NaN in one head of one image stays there."""
    case = Case(Grid(3, 5, 1), 16)
    inputs, out_grad = make_inputs(case, 2, 2, memory.normal)
    expected, expected_grads = reference(inputs, case.geometry, out_grad)
    for x in inputs:
        x[1, 1] = math.nan
    out, grads = run(inputs, case.geometry, out_grad)
    for result, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert result[1, 1].isnan().all()
        result[1, 1], right[1, 1] = 0, 0
        assert_near(result, right, TOLERANCE[F32])


@pytest.mark.parametrize("token", [0, 1, 15])
def test_one_token_has_by_far_the_largest_logits(token: int, memory: Any) -> None:
    """60, and the others −60: weights relative to the largest of the others would overflow."""
    case = Case(Grid(3, 5, 1), 16, strength=0.1)
    inputs, out_grad = make_inputs(case, 1, 1, memory.normal)
    inputs.query_BHNd[:] = (60 / 16 / case.geometry.scale) ** 0.5
    inputs.key_BHNd[:] = -inputs.query_BHNd
    inputs.key_BHNd[:, :, token] *= -1
    expected = reference(inputs, case.geometry, out_grad)
    assert_all_near(run(inputs, case.geometry, out_grad), expected, out_grad, TOLERANCE[F32])


def test_a_stack_of_batches_is_one_batch(device: torch.device) -> None:
    case = Case(Grid(3, 4, 1), 16)
    stacks = [make_inputs(case, 1, 1, lambda *s, dtype=F32: torch.randn(s).to(device, dtype))[0] for _ in range(2)]
    key, *others = (torch.stack(of_all) for of_all in zip(*(s[1:2] + s[:1] + s[2:] for s in stacks), strict=True))
    key = key[0].requires_grad_()  # the same for all of the stack

    def attend(query: Tensor, value: Tensor, precision: Tensor, strength: Tensor) -> Tensor:
        return radial_attention(query, key, value, precision, strength, case.grid, scale=0.25)

    stacked = torch.vmap(attend)(*others)
    one_by_one = torch.stack([attend(*of_one) for of_one in zip(*others, strict=True)])
    torch.testing.assert_close(stacked, one_by_one)
    grads = (torch.autograd.grad(out.square().sum(), key)[0] for out in (stacked, one_by_one))
    torch.testing.assert_close(*grads)


def test_the_operation_is_what_torch_expects(device: torch.device) -> None:
    case = Case(Grid(2, 3, 1), 16)
    inputs, _ = make_inputs(case, 1, 2, lambda *shape, dtype=F32: torch.randn(shape).to(device, dtype))
    arguments = (*(x.requires_grad_() for x in inputs), *case.geometry)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.nearsight.radial_attention, arguments, test_utils=checks)


def test_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(2, 3, 1)

    def on_gpu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr("nearsight.locat.kernels.attention.runs_on", lambda device: True)
    for dtype, size in itertools.product((BF16, F16, F32), (1, 24, 64, 128)):
        assert is_supported(on_gpu(2, 3, 7, size, dtype=dtype), grid)
    assert not is_supported(on_gpu(2, 3, 7, 64, dtype=torch.float64), grid)
    assert not is_supported(on_gpu(2, 3, 7, 129), grid)
    assert not is_supported(on_gpu(2, 3, 7, 0), grid)
    assert not is_supported(on_gpu(2, 3, 8, 64), grid)
    assert not is_supported(on_gpu(2, 3, 1, 64), Grid(0, 0, 1))
    assert not is_supported(on_gpu(1, 1000, 66_000, 64), Grid(1, 66_000, 0))
    monkeypatch.undo()
    monkeypatch.setattr(triton_language, "triton", None)
    assert not is_supported(torch.empty(2, 3, 7, 64), grid)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("which", ["forward", "backward_query", "backward_key"])
def test_tiles_hold_all_keys_and_little_else(which: Any, dtype: torch.dtype) -> None:
    for rows, cols, prefix, size in itertools.product(
        (7, 14, 24, 32, 64), (7, 14, 16, 37, 64), (0, 1, 5), (24, 64, 128)
    ):
        grid = Grid(rows, cols, prefix)
        tiles = attention.tiling_of(which, grid, size, dtype)
        slots = attention.num_tiles("backward_key", grid, tiles) * tiles.rows * tiles.cols
        assert grid.num_tokens <= slots <= 1.3 * grid.num_tokens + 64
        assert attention.num_tiles("forward", grid, tiles) == math.ceil(grid.num_tokens / tiles.queries)


def test_the_reference_by_hand() -> None:
    """Two patches side by side, and CLS: queries of 0, so that logits are the bias."""
    zeros = torch.zeros(1, 1, 3, 1, dtype=torch.float64)
    value = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    precision = torch.tensor([[5.0, 0.5], [9.0, 0.25]], dtype=torch.float64).view(1, 1, 2, 2)
    strength = torch.tensor([2.0, -1.0], dtype=torch.float64).view(1, 1, 2)
    out = shared["attend"](Inputs(zeros, zeros, value, precision, strength), Geometry(1, 2, 1, 1.0, math.inf))
    near, far = 2 * math.exp(-0.5), -math.exp(-0.25)
    expected = [
        1 / 3,
        math.exp(near) / (1 + math.exp(2) + math.exp(near)),
        math.exp(-1) / (1 + math.exp(far) + math.exp(-1)),
    ]
    assert out.flatten().tolist() == pytest.approx(expected)
