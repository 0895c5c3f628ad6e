"""Attention with a local bias, all pairs at once in float64, and random inputs for it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.locat.gaussian import Grid, Shape
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
    """The deviation of what biases are added to."""
    shape: Shape = "gaussian"
    reach: tuple[float, ...] = ()
    """Of the heads, one after the other, and again."""

    def __str__(self) -> str:
        return "-".join(str(x) for x in (*vars(self.grid).values(), *self[1:])).replace("torch.", "").replace(" ", "")

    @property
    def geometry(self) -> Geometry:
        grid = self.grid
        return Geometry(grid.rows, grid.cols, grid.num_prefix, self.size**-0.5, self.largest_half_square, self.shape)

    @property
    def wanted(self) -> int:
        """Which gradients of biases there are."""
        return 0 if self.shape == "none" else 2

    def reaches(self, images: int, heads: int, device: torch.device) -> Tensor | None:
        if not self.reach:
            return None
        numbers = [self.reach[head % len(self.reach)] for head in range(heads)]
        return torch.tensor(numbers, device=device).expand(images, -1)


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


def attend(inputs: Inputs, geometry: Geometry, reach_BH: Tensor | None = None) -> Tensor:
    """The definition."""
    query, key, value, precision_BHP2, strength_BHP = inputs
    rows, cols, num_prefix, scale, largest_half_square, shape = geometry
    place_P2 = torch.cartesian_prod(
        *(torch.arange(side, dtype=query.dtype, device=query.device) for side in (rows, cols))
    )
    square_PP2 = (place_P2[:, None] - place_P2) ** 2
    clamped_PP2 = square_PP2.clamp(max=2 * largest_half_square)
    square_BHPP = 2 * (precision_BHP2[:, :, :, None] * clamped_PP2).sum(-1)
    radius_BHPP = torch.where(square_BHPP > 0, square_BHPP, 1.0).sqrt() * (square_BHPP > 0)
    fall_BHPP = {
        "gaussian": lambda: torch.exp(-square_BHPP / 2),
        "laplace": lambda: torch.exp(-radius_BHPP),
        "inverse": lambda: 1 / (1 + radius_BHPP),
        "distance": lambda: radius_BHPP,
        "none": lambda: 0 * radius_BHPP,
    }[shape]()
    bias = F.pad(strength_BHP[..., None] * fall_BHPP, (num_prefix, 0, num_prefix, 0))
    logits = scale * query @ key.transpose(-1, -2) + bias
    if reach_BH is not None:
        far_BHPP = square_PP2.sum(-1).sqrt() > reach_BH.double()[..., None, None]
        logits = logits.masked_fill(F.pad(far_BHPP, (num_prefix, 0, num_prefix, 0)), -torch.inf)
    return logits.softmax(-1) @ value


def reference(
    inputs: Inputs, geometry: Geometry, out_grad: Tensor, reach_BH: Tensor | None = None
) -> tuple[Tensor, Inputs]:
    """(output, gradients by the inputs) in float64."""
    exact = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
    out = attend(exact, geometry, reach_BH)
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
        if not grad.numel():  # nobody wanted it
            continue
        least = _rounding_of_the_output(found[0], out_grad) if name == "strength_BHP" else 0.0
        assert_near(grad, right, tolerance, f"gradient by {name}", least=4e-6 + least)


def _rounding_of_the_output(out: Tensor, out_grad: Tensor) -> float:
    """What rounding the output can do to the gradient by the strengths: the backward pass multiplies it with its
    gradient. Where a patch looks at itself alone, the gradient is a small difference of products like that."""
    products = (out.double() * out_grad.double()).abs().sum(-1)
    return float(products.max()) * torch.finfo(out.dtype).eps / 2
