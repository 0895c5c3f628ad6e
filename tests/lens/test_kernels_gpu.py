"""The compiled kernel against float64: the cases of `test_kernels.py`, larger, and its memory."""

import runpy
from pathlib import Path

import pytest
import torch

from nearsight.lens import kernels

pytestmark = pytest.mark.gpu
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


def test_no_map_in_memory() -> None:
    inputs = interpreted["self_attention"](Size(batch=4, heads=12, grid=(64, 64), width=64), dtype=torch.bfloat16)
    inputs = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.fused_attention_rows(**inputs)
    maps = 4 * 12 * 4097 * 4097 * 4
    assert torch.cuda.max_memory_allocated() - before < 0.05 * maps
