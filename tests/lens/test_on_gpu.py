"""On a GPU: the same numbers as on the CPU, and little memory; and the compiled kernel against float64, in the cases of
`test_kernels.py`, larger.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

from nearsight.lens import kernels, measure

pytestmark = pytest.mark.gpu


def sharp(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "qkv.weight" in name:
            parameter.data *= 8
        elif "relative_position" in name:
            parameter.data += torch.randn_like(parameter)
    return model


MODELS = {
    "plain": lambda: timm.create_model("compact_vit", depth=3),
    "registers": lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, reg_tokens=4),
    "bias": lambda: timm.create_model("beit_base_patch16_224", img_size=64, depth=2),
    "windows": lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=112, depths=(2, 2), num_heads=(3, 6)),
    "pooled keys": lambda: timm.create_model("pvt_v2_b0"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_gpu_and_cpu_agree(name: str, precision: str) -> None:
    model = sharp(MODELS[name]())
    side = {"plain": 32, "windows": 112}.get(name, 64)
    images = torch.randn(5, 3, side, side)
    with torch.backends.cudnn.flags(allow_tf32=False):
        on_gpu = measure(model, images, device="cuda", batch_size=3, precision=precision)
    on_cpu = measure(model, images, batch_size=3, precision="float64")
    np.testing.assert_allclose(on_gpu.mad, on_cpu.mad, rtol=1e-3)
    np.testing.assert_allclose(on_gpu.entropy, on_cpu.entropy, rtol=1e-3)
    assert on_gpu.layer_names == on_cpu.layer_names
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_and_float64_agree_on_what_the_model_used(dtype: torch.dtype) -> None:
    """Both look at the same forward on the same device: only the reduction differs."""
    model = sharp(timm.create_model("vit_tiny_patch16_224", img_size=224, depth=3)).to("cuda", dtype)
    images = torch.randn(4, 3, 224, 224)
    fast, exact = (measure(model, images, precision=precision) for precision in ("float32", "float64"))
    np.testing.assert_allclose(fast.mad, exact.mad, rtol=1e-5)
    np.testing.assert_allclose(fast.entropy, exact.entropy, rtol=1e-5)


def test_nothing_stays_allocated() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2).cuda()
    images = torch.randn(4, 3, 224, 224, device="cuda")
    measure(model, images)
    before = torch.cuda.memory_allocated()
    measure(model, images)
    assert torch.cuda.memory_allocated() == before


interpreted = runpy.run_path(str(Path(__file__).with_name("test_kernels.py")))
Size, check, reference = interpreted["Size"], interpreted["check"], interpreted["reference"]


@pytest.mark.parametrize("name", interpreted["CASES"])
def test_against_float64(name: str) -> None:
    check(name, Size(batch=2, heads=5, grid=(28, 37), width=64), "cuda")


@pytest.mark.parametrize("shift", [0, 1, 2, 8])
def test_a_launch_is_remembered_but_neither_its_numbers_nor_its_addresses(shift: int) -> None:
    inputs = interpreted["self_attention"](Size(grid=(14, 14), width=64), dtype=torch.bfloat16)
    places = inputs["key_places_WM2"].cuda()
    for sharpness in (1, 2):
        memory = torch.randn(2, 1, 3, 197 * 64 + 8, device="cuda", dtype=torch.bfloat16) * sharpness
        query = memory[..., shift : shift + 197 * 64].unflatten(-1, (197, 64))
        changed = {
            "query_BWHNd": query,
            "key_BWHMd": query.flip(0),
            "query_places_WN2": places,
            "key_places_WM2": places,
        }
        found, expected = kernels.fused_attention_rows(**inputs | changed), reference(inputs | changed)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=5e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_kernels_measure_is_what_tiles_do(name: str, dtype: torch.dtype) -> None:
    """In float64 there is no kernel, on the same device: only the sums within a query differ."""
    model = sharp(MODELS[name]()).to("cuda", dtype)
    side = {"plain": 32, "windows": 112}.get(name, 64)
    images, what = torch.randn(5, 3, side, side), ["sinks", "kinds", "shares", "lds"]
    fast, exact = (
        measure(model, images, precision=precision, what=what, batch_size=3) for precision in ("float32", "float64")
    )
    for number, expected in exact.extra.items():
        np.testing.assert_allclose(fast.extra[number], expected, rtol=1e-4, atol=1e-6, err_msg=number)


def test_no_map_in_memory() -> None:
    inputs = interpreted["self_attention"](Size(batch=4, heads=12, grid=(64, 64), width=64), dtype=torch.bfloat16)
    inputs = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.fused_attention_rows(**inputs)
    maps = 4 * 12 * 4097 * 4097 * 4
    assert torch.cuda.max_memory_allocated() - before < 0.05 * maps
