"""How the compiled kernels are launched: on anything supported, captured, of any number of images."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nearsight.train.fused.attention import attention_backward, attention_forward
from nearsight.triton_language import triton

pytestmark = pytest.mark.gpu
shared = runpy.run_path(str(Path(__file__).with_name("test_attention.py")))
Case, Inputs, make_inputs, BF16 = shared["Case"], shared["Inputs"], shared["make_inputs"], shared["BF16"]


def forward(inputs: Any) -> Tensor:
    return attention_forward(inputs.qkv_RN3Hd, inputs.bias_K3Hd, inputs.scale)


def backward(inputs: Any) -> Tensor:
    return attention_backward(*inputs)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("size", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [16, 17, 32, 64, 65, 128, 129])
def test_the_largest_of_each_tiling_fits_the_gpu(tokens: int, dtype: torch.dtype, size: int) -> None:
    shared["check"](make_inputs(Case(tokens, 2, size, dtype), 2, 3, normal), tolerance=shared["TOLERANCE"][dtype])


@pytest.mark.parametrize("launch", [forward, backward])
def test_a_captured_launch_sees_new_numbers(launch: Callable[[Any], Tensor]) -> None:
    inputs = make_inputs(Case(65, 8, 24, BF16), 4, 4, normal)
    before = launch(inputs).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch(inputs)
    inputs.qkv_RN3Hd.copy_(inputs.qkv_RN3Hd.flip(0))
    graph.replay()
    assert torch.equal(captured, launch(inputs))
    assert not torch.equal(captured, before)


@pytest.mark.parametrize("launch", [forward, backward])
def test_one_kernel_for_any_number_of_images(launch: Callable[[Any], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def note(**what: Any) -> None:
        compiled.append(what)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for num_cells, images_per_cell in [(1, 1), (1, 2), (16, 1), (3, 16), (2, 33)]:  # 1 and 16 are special to Triton
        launch(make_inputs(Case(65, 7, 24, BF16), num_cells, images_per_cell, normal))
    assert len(compiled) == 1


def test_more_numbers_than_32_bits_count() -> None:
    inputs = make_inputs(Case(65, 8, 24, BF16), 2, 30_000, normal)
    assert inputs.qkv_RN3Hd.numel() > 2**31
    last = slice(-3, None)
    some = Inputs(inputs.qkv_RN3Hd[last], inputs.bias_K3Hd[-1:], inputs.out_grad_RNHd[last], inputs.scale)
    for launch, expected in zip((forward, backward), shared["reference"](some), strict=True):
        shared["assert_near"](launch(inputs)[last], expected, shared["TOLERANCE"][BF16])
