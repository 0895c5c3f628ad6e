"""A norm's scale and shift within the projection after it, and out of it again, against float64 and its autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nearsight.train.fused.folding import fold, unfold_gradients
from nearsight.train.optimizer import Arrangement

SIZES = [
    *((1, 16, 16), (2, 100, 40), (1, 64, 192)),
    *(pytest.param(size, marks=pytest.mark.gpu) for size in ((3, 100, 40), (2, 576, 192))),
]
"""Cells, channels out, channels in: whole tiles and parts of them, in steps and in one."""


@pytest.fixture(params=SIZES, ids=lambda size: "x".join(map(str, size)))
def weights(request: pytest.FixtureRequest, memory: Any) -> dict[str, Tensor]:
    """Parts of a row of all parameters, as the optimizer has them."""
    cells, width_out, width_in = request.param
    shapes = {"weight": (width_out, width_in), "other": (5,), "bias": (width_out,)}
    arrangement = Arrangement(shapes | {"scale": (width_in,), "shift": (width_in,)})
    return arrangement.views(memory.normal(cells, width_out * (width_in + 1) + 5 + 2 * width_in))


@pytest.mark.parametrize("has_bias", [True, False])
def test_fold(near: Any, dtype: torch.dtype, weights: dict[str, Tensor], has_bias: bool) -> None:
    weight, bias, scale, shift = (weights[name] for name in ("weight", "bias", "scale", "shift"))
    folded, shifted = fold(weight, bias if has_bias else None, scale, shift, dtype)
    assert folded.is_contiguous()
    assert torch.equal(folded, (weight * scale[:, None]).to(dtype))
    assert shifted.dtype == torch.float32
    moved = (weight.double() @ shift.double()[:, :, None])[:, :, 0]
    near(shifted, moved + bias.double() if has_bias else moved, torch.float32)


def test_unfold_gradients(memory: Any, near: Any, weights: dict[str, Tensor]) -> None:
    """What the folded matrix and the shifted bias have as gradients is what autograd turns into theirs."""
    weight, scale, shift = (weights[name] for name in ("weight", "scale", "shift"))
    gradient, sums = memory.normal(*weight.shape), memory.normal(*weight.shape[:2])
    exact = [w.double().requires_grad_() for w in (weight, scale, shift)]
    folded, shifted = exact[0] * exact[1][:, None], (exact[0] @ exact[2][:, :, None])[:, :, 0]
    wanted = torch.autograd.grad([folded, shifted], exact, [gradient.double(), sums.double()])
    found = unfold_gradients(gradient, sums, weight, scale, shift)
    assert found[0] is gradient
    for name, one, other in zip(("weight", "scale", "shift"), found, wanted, strict=True):
        near(one, other, torch.float32, name)
