"""Triton where there is one. Kernel files take `tl` and `kernel` from here and can be imported on any machine.

Under TRITON_INTERPRET=1 kernels run on the CPU, number by number: that is how they are tested without a GPU.
"""

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["INTERPRETED", "kernel", "runs_on", "tl", "triton"]

triton: Any
tl: Any
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ImportError:  # as on macOS; then no kernel is ever launched
    triton, tl = None, SimpleNamespace(constexpr=int)

INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret
"""TRITON_INTERPRET=1, as it was at the import."""


def runs_on(device: torch.device) -> bool:
    """Whether kernels work on tensors of this device."""
    on_gpu = device.type == "cuda" and torch.version.hip is None
    return triton is not None and (on_gpu or INTERPRETED)


if TYPE_CHECKING:
    from typing import no_type_check as kernel  # kernels are Python by their syntax alone
else:

    def kernel(function: Any) -> Any:
        """Make a kernel of a function.

        Of arguments named `num_…`, values that are 1 or multiples of 16 get no program of their own: it would be no
        faster, and would have to be compiled when such a value first comes.
        """
        if triton is None:
            return function
        counts = [name for name in inspect.signature(function).parameters if name.startswith("num_")]
        return triton.jit(function, do_not_specialize=counts)
