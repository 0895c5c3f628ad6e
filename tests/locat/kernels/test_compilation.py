"""The kernels go through Triton's compiler, for which no GPU is needed: its interpreter takes more than it does."""

import inspect
import re
from typing import Any

import pytest
import torch

from nearsight.locat.gaussian import Grid
from nearsight.locat.kernels import attention
from nearsight.triton_language import INTERPRETED, triton

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton's compiler"),
]
BF16 = torch.bfloat16
GRID = Grid(9, 14, 1)
CASES = [
    ("gaussian", False, 2),
    ("gaussian", True, 1),
    ("distance", False, 1),
    ("laplace", False, 2),
    ("none", True, 0),
]


def compiled(which: Any, constants: dict[str, Any]) -> Any:
    """For a Hopper GPU, from types alone; of what is not in memory, None."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = attention._KERNELS[which]
    tiling = attention.tiling_of(which, GRID, 64, BF16)
    types, known = {}, {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants or (name == "reach" and not constants["NEAR"]):
            types[name], known[name] = "constexpr", constants.get(name)
        elif name in ("query", "key", "value", "out", "out_grad", "query_grad", "key_grad", "value_grad"):
            types[name] = "*bf16"
        elif name in ("scale", "furthest"):
            types[name] = "fp32"
        else:
            types[name] = "i32" if name == "num_heads" or re.fullmatch(".*_[bhnpa]", name) else "*fp32"
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "maxnreg": tiling.registers}
    source = ASTSource(fn=kernel, signature=types, constexprs=known)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("which", ["forward", "backward_query", "backward_key"])
@pytest.mark.parametrize(("shape", "near", "wanted"), CASES)
def test_kernels_compile(which: Any, shape: str, near: bool, wanted: int) -> None:
    tiling = attention.tiling_of(which, GRID, 64, BF16)
    constants = {
        **{"ROWS": GRID.rows, "COLS": GRID.cols, "PREFIX": GRID.num_prefix, "WIDTH": 64, "WIDTH_BLOCK": 64},
        **{"QUERIES": tiling.queries, "TILE_ROWS": tiling.rows, "TILE_COLS": tiling.cols},
        **{"WHOLE_ROWS": tiling.whole_rows(GRID), "REST_STAGES": tiling.rest_stages, "CLAMPED": False},
        **{"SHAPE": shape, "NEAR": near, "WANTED": wanted, "PRODUCTS": "tf32x3"},
    }
    program = compiled(which, constants)
    assert "wgmma" in program.asm["ptx"]  # its products are by matrix units
    assert program.metadata.shared <= 105 * 1024
    assert program.asm["cubin"]
