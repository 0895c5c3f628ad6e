"""GELU with its bias, and its gradient, against float64 and its autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nearsight.train.fused.rows import gelu_backward, gelu_forward

SIZES = [
    *((1, 1, 16), (2, 70, 48), (1, 64, 32)),
    *(pytest.param(size, marks=pytest.mark.gpu) for size in ((3, 70, 48), (2, 64, 112), (2, 5, 384))),
]
"""Cells, rows, hidden units: part of a tile of rows, a tile and part of another, a whole one."""


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_forward_and_backward(memory: Any, near: Any, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    hidden, gradient = (memory.normal(*size, dtype=dtype, mean=0.3) for _ in range(2))
    bias = memory.normal(size[0], size[2])
    exact = (hidden.double() + bias.double()[:, None]).requires_grad_()
    active = F.gelu(exact)
    (wanted,) = torch.autograd.grad(active, exact, gradient.double())
    found = gelu_forward(hidden, bias)
    assert found.dtype == dtype
    near(found, active, dtype)
    found, sums = gelu_backward(gradient, hidden, bias)
    assert found.dtype == dtype
    near(found, wanted, dtype)
    near(sums.sum(1), wanted.sum(1), torch.float32)


def test_everywhere(memory: Any) -> None:
    """Also where its terms cancel, underflow or overflow."""
    x = torch.cat([torch.linspace(-12, 12, 4093), torch.tensor([-1e4, 1e4, 0.0])]).view(1, -1, 16)
    hidden = memory.normal(*x.shape).copy_(x)
    bias = torch.zeros(1, 16, device=hidden.device)
    exact = hidden.double().requires_grad_()
    active = F.gelu(exact)
    (slope,) = torch.autograd.grad(active.sum(), exact)
    torch.testing.assert_close(gelu_forward(hidden, bias).double(), active, rtol=1e-6, atol=1e-6)
    found, _ = gelu_backward(torch.ones_like(hidden), hidden, bias)
    torch.testing.assert_close(found.double(), slope, rtol=1e-6, atol=1e-6)
