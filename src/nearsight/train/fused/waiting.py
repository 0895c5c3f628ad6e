"""Results that wait for what comes after them: they have a shape, and know what they are to be made of.

Whenever something is done with one that no rule is about, it is made, by its ordinary operations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nearsight.train.stackedweight import UnstackableError, plainly

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
        """The result; made once, whoever asks."""
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
