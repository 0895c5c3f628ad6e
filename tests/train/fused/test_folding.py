"""What is folded into a projection (a norm's scale and shift, what queries give), and out of it again, against float64
and its autograd.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nearsight.locat.gaussian import Grid
from nearsight.train.fused.folding import fold, fold_given, unfold_given, unfold_gradients
from nearsight.train.fused.local_bias import LocalBias
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


CASES = [(1, 2, 8, 16, 2, True), (2, 3, 24, 72, 2, True), (3, 2, 5, 16, 1, False), (1, 1, 16, 130, 0, True)]
"""Cells, heads, their size, channels; widths that queries give, and whether they give strengths."""


def given_rows(queries: Tensor, heads_KE: Tensor, num_heads: int, axes: int, *, has_offset: bool) -> Tensor:
    """What a matrix of queries [K, H·d, i] gives, head by head: [K, H, numbers, i]."""
    size = queries.shape[1] // num_heads
    of_widths, rest = heads_KE.split([axes * (size + 1), heads_KE.shape[1] - axes * (size + 1)], 1)
    matrix, offset = of_widths[:, : axes * size].unflatten(1, (axes, size)), of_widths[:, axes * size :]
    if rest.shape[1]:
        matrix = torch.cat([matrix, rest[:, None, :size]], 1)
        offset = torch.cat([offset, rest[:, size:]], 1)
    given = torch.einsum("kad,khdi->khai", matrix, queries.unflatten(1, (num_heads, size)))
    return given + offset[:, None, :, None] if has_offset else given


@pytest.mark.parametrize("case", CASES, ids=str)
def test_given(memory: Any, near: Any, dtype: torch.dtype, case: Any) -> None:
    cells, num_heads, size, width, axes, learned = case
    local = LocalBias(Grid(2, 2, 1), "gaussian", axes, learned, 4.0, math.log(3), 0.1, math.inf)
    room, num_given, queries = local.room(num_heads), local.num_given, num_heads * size
    weight, bias = memory.normal(cells, 3 * queries, width), memory.normal(cells, 3 * queries)
    scale, shift, heads = (memory.normal(cells, n) for n in (width, width, num_given * (size + 1)))
    folded, shifted = fold(weight, bias, scale, shift, dtype, num_more=num_heads * room)
    before, bias_before = folded[:, : 3 * queries].clone(), shifted[:, : 3 * queries].clone()
    fold_given(folded, shifted, weight, scale, heads, local)

    matrix = (weight.double() * scale.double()[:, None]).requires_grad_()
    offset = (bias.double() + (weight.double() @ shift.double()[:, :, None])[:, :, 0]).requires_grad_()
    exact = heads.double().requires_grad_()
    rows = given_rows(matrix[:, :queries], exact, num_heads, axes, has_offset=False)
    offsets = given_rows(offset[:, :queries, None], exact, num_heads, axes, has_offset=True)[..., 0]
    assert torch.equal(folded[:, : 3 * queries], before)
    assert torch.equal(shifted[:, : 3 * queries], bias_before)
    further = folded[:, 3 * queries :].unflatten(1, (num_heads, room))
    further_offsets = shifted[:, 3 * queries :].unflatten(1, (num_heads, room))
    near(further[:, :, :num_given], rows, dtype)
    near(further_offsets[:, :, :num_given], offsets, torch.float32)
    assert not further[:, :, num_given:].any()
    assert not further_offsets[:, :, num_given:].any()

    gradient, sums = memory.normal(*folded.shape), memory.normal(*shifted.shape)
    of_rows = gradient[:, 3 * queries :].unflatten(1, (num_heads, room))[:, :, :num_given].double()
    of_offsets = sums[:, 3 * queries :].unflatten(1, (num_heads, room))[:, :, :num_given].double()
    wanted = torch.autograd.grad([rows, offsets], [matrix, offset, exact], [of_rows, of_offsets])
    wanted_gradient, wanted_sums = (
        own[:, : 3 * queries].double() + more for own, more in zip((gradient, sums), wanted, strict=False)
    )
    found = unfold_given(gradient, sums, shifted, weight, scale, heads, local)
    near(gradient[:, : 3 * queries], wanted_gradient, torch.float32)
    near(sums[:, : 3 * queries], wanted_sums, torch.float32)
    near(found, wanted[2], torch.float32)
