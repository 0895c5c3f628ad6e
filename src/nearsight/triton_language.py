"""Triton where there is one. Kernel files take `tl`, `kernel` and `launch` from here: they can be imported anywhere.

Under TRITON_INTERPRET=1 kernels run on the CPU, number by number: that is how they are tested without a GPU.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["INTERPRETED", "Prepared", "kernel", "launch", "runs_on", "tl", "triton"]

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


class Prepared(NamedTuple):
    """What a launch needs beside what it is given; all of it follows from the kind of tensors that are given."""

    programs: int
    numbers: Sequence[int]
    """Sizes and strides: the arguments that come after the given ones."""
    constants: Mapping[str, Any]
    """The last arguments, in their order."""
    options: Mapping[str, Any]
    """Warps, stages and registers."""


_launches: dict[Hashable, tuple[Callable[..., None], list[Any]]] = {}
"""For what differs only in its values: the compiled kernel on its grid, and its last arguments."""


def launch(kernel: Any, given: Sequence[Tensor | float | None], prepare: Callable[[], Prepared]) -> None:
    """Run a kernel on tensors, and on numbers that no program depends on.

    Preparing a launch in Triton takes longer than a kernel on 197 tokens: tensors of one kind share it.
    """
    tensors = [x for x in given if isinstance(x, Tensor)]
    with torch.cuda.device_of(tensors[0]):
        if INTERPRETED:
            ready = prepare()
            kernel[(ready.programs,)](*given, *ready.numbers, **ready.constants)
            return
        kind = (
            id(kernel),
            tensors[0].device,
            *((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x is None for x in given),
        )
        if kind in _launches:
            run, rest = _launches[kind]
            run(*given, *rest)
            return
        ready = prepare()
        compiled = kernel[(ready.programs,)](*given, *ready.numbers, **ready.constants, **ready.options)
        _launches[kind] = compiled[ready.programs, 1, 1], [*ready.numbers, *ready.constants.values()]
