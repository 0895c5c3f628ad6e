"""Kernels are tested here as those of training are: on a GPU, and on the CPU in a process with Triton's interpreter."""

import runpy
from pathlib import Path

_shared = runpy.run_path(str(Path(__file__).parents[2] / "train" / "fused" / "conftest.py"))
device, memory = _shared["device"], _shared["memory"]
pytest_pyfunc_call = _shared["pytest_pyfunc_call"]
