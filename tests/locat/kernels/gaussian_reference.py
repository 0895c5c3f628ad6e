"""Attention with Gaussians, all pairs at once in float64, and random inputs for it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.locat.gaussian import Grid
from nearsight.locat.kernels.attention import Geometry, Inputs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {F32: 1e-5, F16: 3e-3, BF16: 2e-2}
"""Of the largest number in a result: in the low dtypes, weights and gradients of logits are rounded."""


class Case(NamedTuple):
    grid: Grid
    size: int
    dtype: torch.dtype = F32
    largest_half_square: float = torch.inf
    precision: float = 0.3
    """The mean."""
    strength: float = 2.0
    """The deviation."""
    sharpness: float = 1.0
    """The deviation of what is added to Gaussians."""

    def __str__(self) -> str:
        return "-".join(str(x) for x in (*vars(self.grid).values(), *self[1:])).replace("torch.", "")

    @property
    def geometry(self) -> Geometry:
        grid = self.grid
        return Geometry(grid.rows, grid.cols, grid.num_prefix, self.size**-0.5, self.largest_half_square)


def make_inputs(case: Case, images: int, heads: int, normal: Callable[..., Tensor]) -> tuple[Inputs, Tensor]:
    """(inputs, gradient by the output): queries, keys and values as timm packs them, and heads' results as it has them.

    A quarter of the precisions is 0.
    """
    tokens = case.grid.num_tokens
    qkv = normal(images, tokens, 3, heads, case.size, dtype=case.dtype)
    qkv[:, :, :2] *= case.sharpness**0.5
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    precision = normal(images, heads, tokens, 2).add_(0.6).clamp_(min=0).mul_(case.precision)
    strength = normal(images, heads, tokens).mul_(case.strength)
    patches = slice(case.grid.num_prefix, None)
    out_grad = normal(images, tokens, heads, case.size, dtype=case.dtype).transpose(1, 2)
    return Inputs(query, key, value, precision[:, :, patches], strength[:, :, patches]), out_grad


def attend(inputs: Inputs, geometry: Geometry) -> Tensor:
    """The definition."""
    query, key, value, precision_BHP2, strength_BHP = inputs
    rows, cols, num_prefix, scale, largest_half_square = geometry
    place_P2 = torch.cartesian_prod(
        *(torch.arange(side, dtype=query.dtype, device=query.device) for side in (rows, cols))
    )
    half_square_PP2 = (0.5 * (place_P2[:, None] - place_P2) ** 2).clamp(max=largest_half_square)
    gaussian = torch.exp(-(2 * precision_BHP2[:, :, :, None] * half_square_PP2).sum(-1))
    bias = F.pad(strength_BHP[..., None] * gaussian, (num_prefix, 0, num_prefix, 0))
    return (scale * query @ key.transpose(-1, -2) + bias).softmax(-1) @ value


def reference(inputs: Inputs, geometry: Geometry, out_grad: Tensor) -> tuple[Tensor, Inputs]:
    """(output, gradients by the inputs) in float64."""
    exact = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
    out = attend(exact, geometry)
    return out.detach(), Inputs(*torch.autograd.grad(out, exact, out_grad.double()))


def assert_near(
    found: Tensor, expected: Tensor, tolerance: float, what: str = "output", *, least: float = 4e-6
) -> None:
    assert found.shape == expected.shape, what
    error, largest = (found.double() - expected).abs().max(), expected.abs().max()
    assert error <= tolerance * largest + least, f"{what}: off by {error:.1e} of {largest:.1e}"


def assert_all_near(
    found: tuple[Tensor, Inputs], expected: tuple[Tensor, Inputs], out_grad: Tensor, tolerance: float
) -> None:
    assert_near(found[0], expected[0], tolerance)
    for name, grad, right in zip(Inputs._fields, found[1], expected[1], strict=True):
        least = _rounding_of_the_output(found[0], out_grad) if name == "strength_BHP" else 0.0
        assert_near(grad, right, tolerance, f"gradient by {name}", least=4e-6 + least)


def _rounding_of_the_output(out: Tensor, out_grad: Tensor) -> float:
    """What rounding the output can do to the gradient by the strengths: the backward pass multiplies it with its
    gradient. Where a patch looks at itself alone, the gradient is a small difference of products like that."""
    products = (out.double() * out_grad.double()).abs().sum(-1)
    return float(products.max()) * torch.finfo(out.dtype).eps / 2
