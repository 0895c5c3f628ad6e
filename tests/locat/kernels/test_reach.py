"""Attention with a reach: other keys count for nothing, and tiles that hold no others are not even read."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearsight.locat.gaussian import Grid
from nearsight.locat.kernels import attention, radial_attention
from nearsight.locat.kernels.attention import Inputs, Tiling

shared = runpy.run_path(str(Path(__file__).with_name("gaussian_reference.py")))
Case, make_inputs, reference = shared["Case"], shared["make_inputs"], shared["reference"]
assert_all_near, TOLERANCE = shared["assert_all_near"], shared["TOLERANCE"]
F32 = torch.float32


def tokens_near(grid: Grid, rows: range, reach: float) -> Tensor:
    """Whether each token is a patch so near to some grid rows, or no patch."""
    row_P = torch.arange(grid.num_patches) // grid.cols
    near_P = (row_P >= rows.start - reach) & (row_P <= rows.stop - 1 + reach)
    return torch.cat([torch.ones(grid.num_prefix, dtype=torch.bool), near_P])


@pytest.mark.parametrize(("grid", "reach"), [(Grid(11, 8, 1), 1.5), (Grid(14, 6, 0), 1.0)])
def test_tiles_without_a_key_in_reach_are_not_read(
    grid: Grid, reach: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are read meet NaN: a weight of 0 times NaN shows."""
    queries, rows = 16, 2
    monkeypatch.setattr(attention, "tiling_of", lambda *_: Tiling(queries=queries, rows=rows, cols=8, warps=4))
    case = Case(grid, 16, shape="none", reach=(reach,))
    inputs, out_grad = make_inputs(case, 1, 1, lambda *s, dtype=F32: torch.randn(s).to(device, dtype))
    reach_BH = case.reaches(1, 1, device)
    out, log_sum = attention.forward(inputs, case.geometry, reach_BH)

    def spoiled(matrix: Tensor, kept_N: Tensor) -> Tensor:
        assert kept_N.float().mean() < 0.75
        return matrix.masked_fill(~kept_N[:, None].to(device), torch.nan)

    # A tile of queries: tiles of keys begin with an even row.
    tile = slice(queries * 3, queries * 4)
    first, last = ((token - grid.num_prefix) // grid.cols for token in (tile.start, tile.stop - 1))
    top, bottom = (first - int(reach)) // rows * rows, -(-(last + int(reach) + 1) // rows) * rows
    keys_N = tokens_near(grid, range(top, bottom), 0)
    if grid.num_prefix:  # the rest of the rows share their tile with prefix tokens
        keys_N |= tokens_near(grid, range(grid.rows // rows * rows, grid.rows), 0)
    far = inputs._replace(key_BHNd=spoiled(inputs.key_BHNd, keys_N), value_BHNd=spoiled(inputs.value_BHNd, keys_N))
    assert torch.equal(attention.forward(far, case.geometry, reach_BH)[0][:, :, tile], out[:, :, tile])
    expected = attention.backward(inputs, case.geometry, out, log_sum, out_grad, reach_BH, 0)
    grads = attention.backward(far, case.geometry, out, log_sum, out_grad, reach_BH, 0)
    assert torch.equal(grads.query_BHNd[:, :, tile], expected.query_BHNd[:, :, tile])
    # A tile of keys: tiles of queries begin anywhere.
    first_row = 6
    patches = slice(grid.num_prefix + first_row * grid.cols, grid.num_prefix + (first_row + rows) * grid.cols)
    near_N = tokens_near(grid, range(first_row, first_row + rows), reach)
    tiles_N = torch.arange(grid.num_tokens) // queries
    queries_N = torch.isin(tiles_N, tiles_N[near_N])
    far = inputs._replace(query_BHNd=spoiled(inputs.query_BHNd, queries_N))
    grads = attention.backward(far, case.geometry, out, log_sum, spoiled(out_grad, queries_N), reach_BH, 0)
    for name in ("key_BHNd", "value_BHNd"):
        assert torch.equal(getattr(grads, name)[:, :, patches], getattr(expected, name)[:, :, patches])


@pytest.mark.interpreted
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 7),
    cols=st.integers(1, 18),
    prefix=st.integers(0, 5),
    size=st.sampled_from([16, 24]),
    shape=st.sampled_from(["none", "distance", "laplace", "gaussian"]),
    reach=st.tuples(st.floats(0, 12), st.sampled_from([0.0, 1.0, 2.5, float("inf")])),
)
def test_any_grid_and_reach(
    rows: int, cols: int, prefix: int, size: int, shape: Any, reach: tuple[float, float]
) -> None:
    case = Case(Grid(rows, cols, prefix), size, shape=shape, reach=reach)
    torch.manual_seed(rows * cols)
    inputs, out_grad = make_inputs(case, 1, 2, lambda *s, dtype=F32: torch.randn(s, dtype=dtype))
    reach_BH = case.reaches(1, 2, torch.device("cpu"))
    out, log_sum = attention.forward(inputs, case.geometry, reach_BH)
    grads = attention.backward(inputs, case.geometry, out, log_sum, out_grad, reach_BH, case.wanted)
    assert_all_near((out, grads), reference(inputs, case.geometry, out_grad, reach_BH), out_grad, TOLERANCE[F32])


def test_as_an_operation_of_torch(device: torch.device) -> None:
    """A few numbers for each head, and their gradients; a stack is one batch."""
    grid, heads = Grid(3, 4, 2), 2
    query, key, value = (torch.randn(2, heads, grid.num_tokens, 16).to(device).requires_grad_() for _ in range(3))
    slopes_H = torch.tensor([0.1, -0.4], device=device, requires_grad=True)
    reach_H = torch.tensor([1.0, 2.5], device=device)
    half = torch.tensor(0.5, device=device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lead = len(query), heads
        return radial_attention(
            *(query, key, value, half.expand(*lead, grid.num_patches, 2)),
            slopes_H[:, None].expand(*lead, grid.num_patches),
            grid,
            scale=0.25,
            shape="distance",
            reach_BH=reach_H.expand(*lead),
        )

    out = attend(query, key, value)
    out_grad = torch.randn(out.shape).to(device)
    found = torch.autograd.grad(out, (query, key, value, slopes_H), out_grad)
    exact = Inputs(query, key, value, half.expand(2, heads, 12, 2), slopes_H[:, None].expand(2, heads, 12))
    geometry = attention.Geometry(3, 4, 2, 0.25, torch.inf, "distance")
    expected, grads = reference(exact, geometry, out_grad, reach_H.expand(2, heads))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(found, (*grads[:3], grads.strength_BHP.sum((0, 2))), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    stack = torch.vmap(attend)(*(tokens[:, None] for tokens in (query, key, value)))
    torch.testing.assert_close(stack[:, 0], out)
