"""The torch path of attention with a local bias: tiles against whole maps, gradients against finite differences."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nearsight.locat import Grid
from nearsight.locat import attend as attending
from nearsight.locat.attend import attend, blocked_attention
from nearsight.locat.gaussian import Kernel

KERNELS: tuple[Kernel, ...] = ("gaussian", "laplace", "inverse")
GRID = Grid(3, 5, 2)


def inputs(grid: Grid = GRID, *, dtype: torch.dtype = torch.float64, head_dim: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lead = (2, 3)
    shapes = [(*lead, grid.num_tokens, head_dim)] * 3 + [(*lead, grid.num_patches, 2), (*lead, grid.num_patches)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    tensors[3] = tensors[3].exp()
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def by_loops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    precision: Tensor,
    strength: Tensor,
    *,
    scale: float,
    kernel: str,
    largest: float = math.inf,
    mask: Tensor | None = None,
) -> Tensor:
    """Pair by pair of tokens."""
    logits = scale * query @ key.transpose(-2, -1)
    bias = torch.zeros_like(logits)
    for p in range(GRID.num_patches):
        for t in range(GRID.num_patches):
            halves = [
                min(0.5 * (p // 5 - t // 5) ** 2, largest),
                min(0.5 * (p % 5 - t % 5) ** 2, largest),
            ]
            # ½Δ²/(variance + EPS) = precision · Δ²
            square = 2 * sum(2 * precision[:, :, p, axis] * halves[axis] for axis in (0, 1))
            shape = {
                "gaussian": lambda r2: torch.exp(-r2 / 2),
                "laplace": lambda r2: torch.exp(-r2.sqrt()),
                "inverse": lambda r2: 1 / (1 + r2.sqrt()),
            }[kernel]
            bias[:, :, 2 + p, 2 + t] = strength[:, :, p] * (shape(square) if p != t else 1.0)
    logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    return torch.softmax(logits, -1) @ value


@pytest.mark.parametrize("largest", [math.inf, 3.0])
@pytest.mark.parametrize("tile_bytes", [2**20, 1200, 1], ids=["at once", "some queries", "one query"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_and_gradients_are_those_of_loops(kernel: Kernel, tile_bytes: int, largest: float) -> None:
    tensors = inputs()
    expected = by_loops(*tensors, scale=0.7, kernel=kernel, largest=largest)
    output = blocked_attention(
        *tensors, GRID, scale=0.7, kernel=kernel, largest_half_square=largest, tile_bytes=tile_bytes
    )
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(output.shape, dtype=torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(output, tensors, upstream), torch.autograd.grad(expected, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("tile_bytes", [2**20, 2000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(kernel: Kernel, tile_bytes: int) -> None:
    grid = Grid(2, 2, 1)
    function = partial(blocked_attention, grid=grid, scale=0.5, kernel=kernel, tile_bytes=tile_bytes)
    assert torch.autograd.gradcheck(function, inputs(grid, head_dim=2))


@pytest.mark.parametrize("tile_bytes", [2**20, 1200])
@pytest.mark.parametrize("kind", ["bool", "per head", "one for all"])
def test_masks(kind: str, tile_bytes: int) -> None:
    num = GRID.num_tokens
    mask = {
        "bool": torch.rand(2, 1, num, num) > 0.3,
        "per head": torch.randn(1, 3, num, num, dtype=torch.float64, requires_grad=True),
        "one for all": torch.randn(num, num, dtype=torch.float64, requires_grad=True),
    }[kind]
    tensors = inputs()
    if kind == "bool":
        mask |= torch.eye(num, dtype=torch.bool)
    expected = by_loops(*tensors, scale=0.7, kernel="gaussian", mask=mask)
    output = blocked_attention(*tensors, GRID, scale=0.7, mask=mask, tile_bytes=tile_bytes)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    if mask.requires_grad:
        upstream = torch.randn(output.shape, dtype=torch.float64)
        got, wanted = (torch.autograd.grad(result, mask, upstream)[0] for result in (output, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    tensors = inputs(dtype=dtype)
    precise = [tensor.detach().double() for tensor in tensors]
    widths = [tensor.float() for tensor in tensors[3:]]
    expected = by_loops(*precise, scale=0.5, kernel="gaussian")
    for tile_bytes in (2**20, 1200):
        output = blocked_attention(*tensors[:3], *widths, GRID, scale=0.5, tile_bytes=tile_bytes)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def test_one_tile_of_the_bias_at_a_time() -> None:
    """Neither forward nor backward holds more than a few tiles, whatever the number of tokens."""
    grid = Grid(24, 24, 1)
    tensors = inputs(grid, dtype=torch.float32)
    whole = 2 * 3 * grid.num_tokens**2
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            largest = max([largest, *(leaf.numel() for leaf in leaves)])
            return result

    with Sizes():
        output = blocked_attention(*tensors, grid, scale=0.5, tile_bytes=whole * 4 // 20)
        output.sum().backward()
    assert largest <= whole / 19


def test_tiles_of_a_cpu_are_small_where_no_gradient_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, seen = inputs(), []
    attention = attending.attend_with_bias

    def counted(query: Tensor, *others: Any) -> Tensor:
        seen.append(query.shape[2])
        return attention(query, *others)

    monkeypatch.setattr(attending, "attend_with_bias", counted)
    monkeypatch.setattr(attending, "CACHED_TILE_BYTES", 1)
    monkeypatch.setattr(attending, "FEWEST_QUERIES", 5)
    expected = blocked_attention(*tensors, GRID, scale=0.7)
    assert seen == [GRID.num_tokens]
    with torch.no_grad():
        output = blocked_attention(*tensors, GRID, scale=0.7)
    assert set(seen[1:-1]) == {5}
    assert sum(seen[1:]) == GRID.num_tokens
    torch.testing.assert_close(output, expected.detach())


def test_tiles_compile_as_one_graph() -> None:
    tensors = inputs()
    function = partial(blocked_attention, grid=GRID, scale=0.7, tile_bytes=2000)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    output, expected = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn(output.shape, dtype=torch.float64)
    for got, wanted in zip(*(torch.autograd.grad(o, tensors, upstream) for o in (output, expected)), strict=True):
        torch.testing.assert_close(got, wanted)


def test_under_vmap() -> None:
    tensors = [torch.stack([tensor.detach(), 2 * tensor.detach()]) for tensor in inputs()]
    function = partial(blocked_attention, grid=GRID, scale=0.7, tile_bytes=2000)
    stacked = torch.vmap(function)(*tensors)
    for k in range(2):
        torch.testing.assert_close(stacked[k], function(*(tensor[k] for tensor in tensors)))


def test_dropout_is_that_of_attention_weights() -> None:
    tensors = [tensor.detach() for tensor in inputs()]
    tensors[2] = torch.ones_like(tensors[2])
    for tile_bytes in (2**20, 1200):
        output = blocked_attention(*tensors, GRID, scale=0.7, dropout_p=0.5, tile_bytes=tile_bytes)
        assert not torch.allclose(output, torch.ones_like(output))
        assert output.mean() == pytest.approx(1, abs=0.2)


def test_whoever_looks_at_functions_sees_one() -> None:
    seen = []

    class Looking(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = inputs()
    with Looking():
        output = attend(*tensors, GRID, scale=0.7)
    assert seen.count(attend) == 1
    torch.testing.assert_close(output, blocked_attention(*tensors, GRID, scale=0.7))
