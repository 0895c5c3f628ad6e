"""The compiled kernels at the sizes of real models, against float64 on some of their heads."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nearsight.locat.gaussian import Grid
from nearsight.locat.kernels import attention, radial_attention
from nearsight.locat.kernels.attention import Inputs

pytestmark = pytest.mark.gpu
shared = runpy.run_path(str(Path(__file__).with_name("gaussian_reference.py")))
Case, make_inputs, reference = shared["Case"], shared["make_inputs"], shared["reference"]
assert_all_near, TOLERANCE = shared["assert_all_near"], shared["TOLERANCE"]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

VIT, LARGE, HUGE = Grid(14, 14, 1), Grid(32, 32, 1), Grid(64, 64, 1)
CASES = [  # few, as each is three kernels to compile
    *(Case(grid, 64, BF16) for grid in (VIT, LARGE, HUGE, Grid(37, 37, 5), Grid(24, 24, 0))),
    *(Case(VIT, size, BF16) for size in (24, 96, 128)),
    *(Case(grid, 64, dtype) for grid in (VIT, LARGE) for dtype in (F16, F32)),
    Case(VIT, 64, BF16, sharpness=15),
    Case(VIT, 64, F32, sharpness=15),
    Case(VIT, 64, BF16, precision=1e4),
    Case(VIT, 64, BF16, strength=40),
    Case(LARGE, 64, BF16, largest_half_square=84.5, precision=0.05),
    *(Case(grid, 64, BF16, strength=0.3, shape="distance") for grid in (VIT, LARGE, Grid(37, 37, 5))),
    *(Case(VIT, 32, dtype, shape=shape) for dtype in (BF16, F32) for shape in ("laplace", "inverse")),
    *(Case(grid, 64, BF16, shape="none", reach=(2.0, 5.5, torch.inf)) for grid in (VIT, LARGE, Grid(24, 24, 0))),
    *(Case(grid, 64, BF16, shape="none", reach=(3.0,)) for grid in (HUGE, Grid(37, 37, 5))),
    Case(LARGE, 16, F16, strength=0.3, shape="distance", reach=(4.0,)),
    Case(LARGE, 64, F32, reach=(4.0,)),
]


def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Any) -> None:
    torch.manual_seed(0)
    inputs, out_grad = make_inputs(case, 3, 12, normal)
    reach_BH = case.reaches(3, 12, torch.device("cuda"))
    out, log_sum = attention.forward(inputs, case.geometry, reach_BH)
    grads = attention.backward(inputs, case.geometry, out, log_sum, out_grad, reach_BH, case.wanted)
    tolerance = TOLERANCE[case.dtype] * (case.sharpness if case.dtype == F32 else 1)
    for image, head in ((0, 0), (1, 7), (2, 11)):
        one = Inputs(*(x[image : image + 1, head : head + 1] for x in inputs))
        found = Inputs(*(x[image : image + 1, head : head + 1] if x.numel() else x for x in grads))
        within = None if reach_BH is None else reach_BH[image : image + 1, head : head + 1]
        grad = out_grad[image : image + 1, head : head + 1]
        expected = reference(one, case.geometry, grad, within)
        assert_all_near((out[image : image + 1, head : head + 1], found), expected, grad, tolerance)


def step(inputs: Inputs, case: Any) -> tuple[Tensor, ...]:
    out = radial_attention(*inputs, case.grid, scale=case.geometry.scale)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


def test_captured_in_a_graph() -> None:
    case = Case(VIT, 64, BF16)
    inputs = Inputs(*(x.detach().requires_grad_() for x in make_inputs(case, 4, 12, normal)[0]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(inputs, case)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs, case)
    for _ in range(2):
        with torch.no_grad():
            for x in inputs:
                x.mul_(0.9)
        graph.replay()
        for found, expected in zip(captured, step(inputs, case), strict=True):
            assert torch.equal(found, expected)


def test_no_program_for_other_batches() -> None:
    """A kernel is compiled for a model, and not again for a number of images."""
    case = Case(VIT, 64, BF16)
    counts = []
    for images in (2, 16, 1, 5):
        step(Inputs(*(x.detach().requires_grad_() for x in make_inputs(case, images, 12, normal)[0])), case)
        counts.append(
            sum(
                len(of_device[0])
                for kernel in attention._KERNELS.values()
                for of_device in kernel.device_caches.values()
            )
        )
    assert counts[1:] == counts[:1] * 3


def test_no_map_in_memory() -> None:
    case = Case(HUGE, 64, BF16)
    inputs = Inputs(*(x.detach().requires_grad_() for x in make_inputs(case, 4, 12, normal)[0]))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(inputs, case)
    assert torch.cuda.max_memory_allocated() - before < 0.1 * 4 * 12 * 4097 * 4097 * 2


def test_compiled() -> None:
    case = Case(VIT, 64, BF16)
    inputs = Inputs(*(x.detach().requires_grad_() for x in make_inputs(case, 2, 12, normal)[0]))
    compiled = torch.compile(lambda *given: radial_attention(*given, VIT, scale=0.125).float() + 1, fullgraph=True)
    out = compiled(*inputs)
    plain = radial_attention(*inputs, VIT, scale=0.125).float() + 1
    assert torch.equal(out, plain)
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, plain))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)
