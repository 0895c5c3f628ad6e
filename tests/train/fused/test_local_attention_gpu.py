"""The compiled kernels of local attention: on anything supported, captured, and in whole models as the engine runs."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight  # noqa: F401  # for the names of its models
from nearsight.train.fused.local_attention import local_attention_backward, local_attention_forward
from nearsight.train.fused.pending import fusing
from nearsight.train.stacked import stack_weights, stacked_forward, weightless
from nearsight.triton_language import triton

pytestmark = pytest.mark.gpu
shared = runpy.run_path(str(Path(__file__).with_name("test_local_attention.py")))
Case, make_inputs, BF16, F32 = shared["Case"], shared["make_inputs"], shared["BF16"], shared["F32"]
MODELS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one width": {"isotropic": True},
    "a fixed width": {"width": 1.5},
    "another kernel": {"kernel": "laplace", "scale": "none"},
    "registers": {"reg_tokens": 4},
}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("size", [16, 24, 64])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("grid", [(4, 4, 1), (7, 7, 1), (8, 8, 0), (8, 8, 1), (16, 8, 1), (11, 12, 4)])
def test_the_largest_of_each_tiling_fits_the_gpu(grid: Any, dtype: torch.dtype, size: int) -> None:
    shared["check"](make_inputs(Case(grid, 2, size, dtype), 2, 3, normal), tolerance=shared["TOLERANCE"][dtype])


def test_a_captured_launch_sees_new_numbers() -> None:
    inputs = make_inputs(Case((8, 8, 1), 8, 24, BF16), 4, 4, normal)
    before = local_attention_backward(*inputs).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = local_attention_backward(*inputs)
    inputs.packed_RNP.copy_(inputs.packed_RNP.flip(0))
    graph.replay()
    assert torch.equal(captured, local_attention_backward(*inputs))
    assert not torch.equal(captured, before)


def test_one_kernel_for_any_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def note(**what: Any) -> None:
        compiled.append(what)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for num_cells, images_per_cell in [(1, 1), (1, 2), (16, 1), (3, 16), (2, 33)]:  # 1 and 16 are special to Triton
        packed, bias, _, scale, local = make_inputs(Case((8, 8, 1), 5, 24, BF16), num_cells, images_per_cell, normal)
        local_attention_forward(packed, bias, 5, scale, local)
    assert len(compiled) == 1


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("num_cells", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_fused_against_plain(taken: list[str], name: str, num_cells: int, dtype: torch.dtype) -> None:
    """Outputs and all gradients, from heads that are far from their start."""
    torch.manual_seed(0)
    make = lambda: timm.create_model("locat_compact_vit", depth=2, num_classes=10, **MODELS[name])  # noqa: E731
    cells = [make().cuda() for _ in range(num_cells)]
    for parameter in (p for cell in cells for n, p in cell.named_parameters() if ".gaug." in n):
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(num_cells, 16, 3, 32, 32, device="cuda")
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], images.device)
    skeleton = weightless(cells[0])

    def run(**options: Any) -> list[Tensor]:
        given = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        outputs = stacked_forward(skeleton, given, images, **options)
        return [outputs, *torch.autograd.grad(outputs.square().sum(), list(given.values()))]

    exact = run()
    assert not taken
    if dtype == BF16:
        found = run(dtype=torch.bfloat16)
    else:
        with fusing(F32):
            found = run()
    assert "".join(taken) == "lmlm"
    largest_of_heads = max(wanted.norm() for name, wanted in zip(weights, exact[1:], strict=True) if ".gaug." in name)
    for which, mine, wanted in zip(("outputs", *weights), found, exact, strict=True):
        # A bias of the heads is one number, whose gradient may happen to be next to nothing.
        size = wanted.norm() + 0.1 * largest_of_heads if ".gaug." in which else wanted.norm()
        error = (mine - wanted).norm() / size
        assert error < (0.05 if dtype == BF16 else 1e-3), f"{which}: off by {error:.1e}"
