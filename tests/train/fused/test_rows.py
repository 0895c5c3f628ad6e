"""Kernels on rows between products, the residual stream and GELU, against float64 and its autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.train.fused.rows import (
    add_branch,
    gelu_backward,
    gelu_forward,
    is_supported_width,
    norm_back,
    normalize_stream,
    start_back,
    sum_rows,
)

SIZES = [
    *((1, 1, 16), (2, 70, 48), (1, 64, 32)),
    *(pytest.param(stream_size, marks=pytest.mark.gpu) for stream_size in ((3, 70, 48), (2, 64, 112), (2, 5, 192))),
]
"""Cells, rows, channels: part of a tile of rows, tiles and part of another, whole ones; one chunk or more."""


@pytest.fixture(params=SIZES, ids=lambda stream_size: "x".join(map(str, stream_size)))
def stream_size(request: pytest.FixtureRequest) -> Any:
    return request.param


def norm(rows: Tensor, eps: float) -> Tensor:
    return F.layer_norm(rows, rows.shape[-1:], eps=eps)


def rstd(rows: Tensor, eps: float) -> Tensor:
    return (rows.double().var(-1, correction=0) + eps).rsqrt()


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_normalize_stream(memory: Any, near: Any, dtype: torch.dtype, stream_size: Any, eps: float) -> None:
    rows = memory.normal(*stream_size, mean=2)
    normal = normalize_stream(rows, eps, dtype)
    assert normal.rows_KRC.dtype == dtype
    near(normal.rows_KRC, norm(rows.double(), eps), dtype)
    near(normal.rstd_KR, rstd(rows, eps), torch.float32)


@pytest.mark.parametrize(
    ("has_bias", "eps"),
    [
        (True, 1e-3),
        (False, None),
        *(pytest.param(*both, marks=pytest.mark.gpu) for both in ((True, None), (False, 1e-3))),
    ],
)
def test_add_branch(
    memory: Any, near: Any, dtype: torch.dtype, stream_size: Any, has_bias: bool, eps: float | None
) -> None:
    cells, _, width = stream_size
    rows, branch = memory.normal(*stream_size, mean=2), memory.normal(*stream_size, dtype=dtype)
    bias = memory.normal(cells, width + 7)[:, 3:-4] if has_bias else None
    out, normal = add_branch(rows, branch, bias, eps)
    assert out.dtype == torch.float32
    total = rows.double() + branch.double() + (0 if bias is None else bias.double()[:, None])
    near(out, total, torch.float32)
    assert (normal is None) == (eps is None)
    if normal is not None and eps is not None:
        assert normal.rows_KRC.dtype == dtype
        near(normal.rows_KRC, norm(total, eps), dtype)
        near(normal.rstd_KR, rstd(total, eps), torch.float32)


def test_start_back(memory: Any, near: Any, dtype: torch.dtype, stream_size: Any) -> None:
    rows = memory.normal(*stream_size, mean=0.5)
    before = rows.clone()
    gradient = start_back(rows, dtype)
    assert gradient.rows_KRC is rows
    assert torch.equal(rows, before)
    assert torch.equal(gradient.rounded_KRC, rows.to(dtype))
    near(gradient.sums_KTC.sum(1), rows.double().sum(1), torch.float32)


def test_norm_back(memory: Any, near: Any, dtype: torch.dtype, stream_size: Any) -> None:
    rows, eps = memory.normal(*stream_size, mean=2), 1e-3
    after = start_back(memory.normal(*stream_size, mean=0.5), dtype)
    of_normal = memory.normal(*stream_size, dtype=dtype)
    found = norm_back(after, of_normal, normalize_stream(rows, eps, dtype))
    exact = rows.double().requires_grad_()
    (through_norm,) = torch.autograd.grad(norm(exact, eps), exact, of_normal.double())
    near(found.rows_KRC, after.rows_KRC + through_norm, dtype)
    assert found.rows_KRC.dtype == torch.float32
    assert torch.equal(found.rounded_KRC, found.rows_KRC.to(dtype))
    near(found.sums_KTC.sum(1), found.rows_KRC.double().sum(1), torch.float32)


@pytest.mark.parametrize(
    ("rows", "channels"), [(1, slice(48)), (70, slice(16)), (1100, slice(24, 48)), (70, slice(36, 48))]
)
def test_sum_rows(memory: Any, near: Any, dtype: torch.dtype, rows: int, channels: slice) -> None:
    """Of some of the channels; of more rows than one program sums."""
    given = memory.normal(2, rows, 48, dtype=dtype, mean=0.5)[:, :, channels]
    near(sum_rows(given), given.double().sum(1), torch.float32)


def test_what_widths_a_program_can_hold() -> None:
    assert all(map(is_supported_width, (16, 48, 64, 96, 112, 192, 384, 768)))
    assert not any(map(is_supported_width, (8, 100, 200, 208, 1024)))


HIDDEN_SIZES = [
    *((1, 1, 16), (2, 70, 48), (1, 64, 32)),
    *(pytest.param(size, marks=pytest.mark.gpu) for size in ((3, 70, 48), (2, 64, 112), (2, 5, 384))),
]
"""Cells, rows, hidden units: part of a tile of rows, a tile and part of another, a whole one."""


@pytest.mark.parametrize("size", HIDDEN_SIZES, ids=lambda size: "x".join(map(str, size)))
def test_gelu_forward_and_backward(memory: Any, near: Any, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
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
