"""Results that wait for what comes after them: they have a shape, and know what they are to be made of.

Whenever something is done with one that no rule is about, it is made, by its ordinary operations. Whoever looks for a
branch among operations that wait finds here what it takes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nearsight.train.fused.branches import Weights
from nearsight.train.stackedweight import UnstackableError, plain, plainly

_NoSubclasses = torch._C.DisableTorchFunctionSubclass

RULES: dict[Any, Callable[..., Any]] = {}
"""What goes on waiting: for a function, what gives its result, or NotImplemented; with the function and its arguments.
Whoever knows one puts it here (`pending`).
"""

_FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
    *(Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
}
"""Questions that can be answered without the numbers."""


@dataclass(eq=False)
class Operation:
    """What is to be done, to what."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: Tensor
    """A tensor without memory that has the result's shape and strides."""
    dtype: torch.dtype
    """Of the products in a fused branch."""
    root: Tensor | None = None
    """Of attention: how its result lies in memory."""
    reshapes: "Operation | None" = None
    """Of a reshape: what it is of."""
    with_gradients: bool = field(default_factory=torch.is_grad_enabled)
    done: Any = None

    def evaluate(self) -> Any:
        """The result, made once."""
        # Inside an autograd function, say: autograd has already taken the pending result for one without gradients.
        if self.with_gradients and not torch.is_grad_enabled():
            raise UnstackableError("results without their gradients")
        if self.done is None:
            with torch.set_grad_enabled(self.with_gradients):
                self.done = self.make()
        return self.done

    def make(self) -> Any:
        """The result by ordinary operations."""
        return plainly(self.func, *evaluated(self.args), **evaluated(self.kwargs))


class Pending(Tensor):
    """A result that has a shape and no numbers yet."""

    operation: Operation

    @staticmethod
    def of(operation: Operation, like: Tensor) -> "Pending":
        shape = operation.shape
        made: Pending = torch.Tensor._make_wrapper_subclass(
            Pending, shape.shape, shape.stride(), dtype=shape.dtype, device=like.device
        )
        made.operation = operation
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTS:
            with _NoSubclasses():
                return func(*args, **kwargs)
        rule = RULES.get(func)
        waits = rule is not None and all(
            value.operation.with_gradients == torch.is_grad_enabled() for value in args if isinstance(value, Pending)
        )
        result = rule(func, *args, **kwargs) if rule and waits else NotImplemented
        if result is NotImplemented:
            return func(*evaluated(tuple(args)), **evaluated(kwargs))
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is not annotated as a class method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Where something below Python's functions asks for the numbers."""
        return func(*evaluated(tuple(args)), **evaluated(dict(kwargs or {})))


def evaluated(values: Any) -> Any:
    return tree_map_only(Pending, lambda pending: pending.operation.evaluate(), values)


def weights_of(norm: Operation, first: Operation, second: Operation, further: Sequence[Tensor] = ()) -> Weights:
    """Those of the operations of a branch, and some that only it has."""
    stacked = (*norm.args[2:4], *first.args[1:], *second.args[1:])
    tensors = [None if weight is None else _dense(plain(weight)) for weight in stacked]
    return Weights._make([*tensors, tuple(_dense(plain(weight)) for weight in further)])


def _dense(weight_K: Tensor) -> Tensor:
    """With each cell's numbers one after the other, as kernels read them; cells may lie apart."""
    return weight_K if weight_K[0].is_contiguous() else weight_K.contiguous()


def before(operation: Operation | None, func: Any) -> Operation | None:
    """What waits before this operation, if this is the one named."""
    if operation is None or operation.func is not func or not isinstance(operation.args[0], Pending):
        return None
    return operation.args[0].operation


def behind_reshapes(operation: Operation | None) -> Operation | None:
    """What was reshaped, if this is a reshape, or one of one; else the operation itself."""
    while operation is not None and operation.reshapes is not None:
        operation = operation.reshapes
    return operation


def lies(operation: Operation, root: Tensor | None, offset: int, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a result is this view of `root`."""
    view = operation.shape
    same_memory = view is root or view._base is root
    return same_memory and (view.storage_offset(), *view.shape, *view.stride()) == (offset, *shape, *strides)


def is_norm_of(operation: Operation | None, rows: Tensor) -> TypeGuard[Operation]:
    return operation is not None and operation.func is F.layer_norm and operation.args[0] is rows
