"""Attention with LocAt's bias, and its gradients, against float64 and its autograd."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.locat.gaussian import Grid, Kernel
from nearsight.train.fused import local_attention
from nearsight.train.fused.attention_parts import Tiling
from nearsight.train.fused.local_attention import local_attention_backward, local_attention_forward
from nearsight.train.fused.local_bias import LocalBias

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.5e-2}
"""Of the largest number in a result: in the low dtypes, weights and gradients of logits are rounded."""


class Case(NamedTuple):
    grid: tuple[int, int, int] = (8, 8, 1)
    """Rows, columns, tokens that are no patches."""
    heads: int = 1
    size: int = 24
    dtype: torch.dtype = F32
    kernel: Kernel = "gaussian"
    axes: int = 2
    learned: bool = True
    clamp: float = math.inf
    tiling: Tiling | None = None

    def __str__(self) -> str:
        return "-".join(str(x) for x in (*self.grid, *self[1:]))

    @property
    def bias(self) -> LocalBias:
        """A fixed variance is 3; a learned one is at most 20, and 1 for a raw 0."""
        most = 20.0 if self.axes else 3.0
        return LocalBias(Grid(*self.grid), self.kernel, self.axes, self.learned, most, math.log(19), 0.1, self.clamp)


class Inputs(NamedTuple):
    packed_RNP: Tensor
    bias_KP: Tensor
    out_grad_RNHd: Tensor
    scale: float
    local: LocalBias


GRIDS = [
    (1, 1, 0),
    (1, 1, 1),
    (2, 7, 4),
    (4, 4, 0),
    (4, 4, 1),
    (8, 8, 0),
    (8, 8, 4),
    (5, 13, 1),
    (3, 27, 2),
    (11, 12, 1),
]
KERNELS: list[Kernel] = ["gaussian", "laplace", "inverse"]
TILINGS = [
    Tiling(main=64, queries=16, warps=1),
    Tiling(main=64, queries=32, warps=2, heads=2),
    Tiling(main=128, queries=64, warps=4),
]
CASES = [
    *(Case(grid, 2, 8) for grid in GRIDS),
    *(
        Case((4, 6, 1), 1, 16, F32, kernel, axes, learned)
        for kernel in KERNELS
        for axes in (0, 1, 2)
        for learned in (False, True)
    ),
    *(Case((4, 6, 1), 1, 8, F32, kernel, axes, clamp=3.0) for kernel in KERNELS for axes in (1, 2)),
    *(Case((8, 8, 1), 1, 24, dtype) for dtype in TOLERANCE),
    *(Case((8, 8, 1), 2, 24, tiling=tiling) for tiling in TILINGS),
]


def make_inputs(case: Case, num_cells: int, images_per_cell: int, normal: Callable[..., Tensor]) -> Inputs:
    """Sixteenths, whose sums with a bias are exact in every dtype."""
    width = case.heads * (3 * case.size + case.bias.room(case.heads))
    packed = normal(num_cells * images_per_cell, case.bias.grid.num_tokens, width, dtype=case.dtype)
    bias = normal(num_cells, width)
    for x in (packed, bias):
        x.mul_(16).round_().clamp_(-127, 127).div_(16)
    out_grad = normal(*packed.shape[:2], case.heads, case.size, dtype=case.dtype)
    return Inputs(packed, bias, out_grad, case.size**-0.5, case.bias)


def bias_of(given_BHNa: Tensor, local: LocalBias) -> Tensor:
    """S, [B, H, N, N], from what the queries give."""
    given = given_BHNa[:, :, local.grid.num_prefix :]
    variance = torch.tensor(local.most, dtype=given.dtype, device=given.device)
    if local.num_axes:
        variance = local.most * torch.sigmoid(given[..., : local.num_axes] - local.shift)
    strength = torch.ones_like(given[..., 0])
    if local.learns_strength:
        strength = torch.log(1 + torch.exp(given[..., local.num_axes]))
    places = torch.cartesian_prod(torch.arange(local.grid.rows), torch.arange(local.grid.cols)).to(given)
    halves = ((places[:, None] - places[None]) ** 2 / 2).clamp(max=local.largest_half_square)
    quotient = (halves / (variance.expand(*given.shape[:3], 2)[..., None, :] + local.eps)).sum(-1)
    if local.kernel == "gaussian":
        kernel = torch.exp(-quotient)
    else:
        radius = torch.where(quotient > 0, 2 * quotient, 1).sqrt() * (quotient > 0)
        kernel = torch.exp(-radius) if local.kernel == "laplace" else 1 / (1 + radius)
    return F.pad(strength[..., None] * kernel, (local.grid.num_prefix, 0, local.grid.num_prefix, 0))


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(output, gradient by the sums of what is packed and its bias) in float64."""
    images_per_cell = len(inputs.packed_RNP) // len(inputs.bias_KP)
    exact = inputs.packed_RNP.double() + inputs.bias_KP.double().repeat_interleave(images_per_cell, 0)[:, None]
    heads, size = inputs.out_grad_RNHd.shape[2:]
    exact.requires_grad_()
    query, key, value = exact[..., : 3 * heads * size].unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4)
    room = exact.shape[-1] // heads - 3 * size
    given = exact[..., 3 * heads * size :].unflatten(-1, (heads, room)).transpose(1, 2)
    bias = bias_of(given, inputs.local) if room else bias_of(query, inputs.local)
    out = ((query @ key.mT * inputs.scale + bias).softmax(-1) @ value).transpose(1, 2)
    (gradient,) = torch.autograd.grad(out, exact, inputs.out_grad_RNHd.double())
    return out.detach(), gradient


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    packed, bias, out_grad, scale, local = inputs
    return local_attention_forward(packed, bias, out_grad.shape[2], scale, local), local_attention_backward(*inputs)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max() + 1e-6, f"off by {error:.1e} of {expected.abs().max():.1e}"


def check(inputs: Inputs, *, tolerance: float) -> None:
    """Assert that all results are right."""
    dtype = inputs.packed_RNP.dtype
    expected, expected_grad = reference(inputs)
    out, grad = run(inputs)
    assert (out.dtype, grad.dtype) == (dtype, dtype)
    assert out.is_contiguous()
    assert grad.is_contiguous()
    assert_near(out, expected, tolerance)
    width = math.prod(inputs.out_grad_RNHd.shape[2:])
    # Queries and keys have smaller gradients than values; last come those of what queries give.
    for mine, wanted in zip(grad.split(width, 2), expected_grad.split(width, 2), strict=True):
        assert_near(mine, wanted, tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted = memory.device.type == "cpu"
    if case.tiling:
        monkeypatch.setattr(local_attention, "tiling_of", lambda *_, **__: case.tiling)
    inputs = make_inputs(case, *((1, 1) if interpreted else (3, 12)), memory.normal)
    check(inputs, tolerance=TOLERANCE[case.dtype])


def test_every_cell_has_its_bias(memory: Any) -> None:
    check(make_inputs(Case((2, 3, 1), 2, 8), 3, 2, memory.normal), tolerance=TOLERANCE[F32])


@pytest.mark.parametrize("kernel", KERNELS)
def test_widths_and_strengths_at_their_ends(kernel: Kernel, memory: Any) -> None:
    """Queries that give −200 to 200: the narrowest, the widest, no bias, and one that hides all else."""
    inputs = make_inputs(Case((2, 4, 1), 2, 8, F32, kernel), 1, 1, memory.normal)
    inputs.packed_RNP[..., 3 * 2 * 8 :] *= 50
    check(inputs, tolerance=200 * TOLERANCE[F32])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_in_what_a_query_gives_stays_with_it(kernel: Kernel, memory: Any) -> None:
    inputs = make_inputs(Case((4, 4, 1), 2, 8, F32, kernel), 1, 1, memory.normal)
    expected, _ = reference(inputs)
    inputs.packed_RNP[0, 5, 3 * 2 * 8 + 4] = math.nan  # the first number of the second head
    out, _ = run(inputs)
    assert out[0, 5, 1].isnan().all()
    out[0, 5, 1] = expected[0, 5, 1]
    assert_near(out, expected, TOLERANCE[F32])
