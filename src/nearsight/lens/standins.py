"""A forward in which nothing is computed that depends on the images: where tokens lie does not hang on what they hold.

What comes from the images is memory of the right shape that nobody has written. Everything else, such as tables of
positions, masks and orders of windows, is computed as always. So a survey costs what it takes to call a model's
operations, and not what these compute. A model that asks for a value it has seen (it sorts its tokens, or decides by
them) raises `ValueNeededError`, and is run again in full.
"""

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from nearsight.lens.operations import MAKING

_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}
"""Ways to a tensor's contents that are no operations, so that a dispatch mode does not see them."""


class ValueNeededError(Exception):
    """A model asks for a value that depends on its images."""


class StandIns:
    """Runs operations, but for those on what comes from the images."""

    def __init__(self, images: Tensor) -> None:
        self._unknown: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        self._unknown[images] = None
        self._shapes: dict[tuple[object, ...], Any] = {}
        """What operations on such arguments return, without memory."""
        self.asked = False
        """Whether a value was needed; the model may have caught the error."""
        self.reading = _Reading(self)
        """A mode that must be active as well, to see what is no operation."""

    def has(self, tensor: Any) -> bool:
        """Whether nothing is known of what a tensor holds."""
        return isinstance(tensor, Tensor) and tensor in self._unknown

    def need_values(self, operation: Any) -> ValueNeededError:
        """The error for an operation that cannot do without."""
        self.asked = True
        return ValueNeededError(f"{operation} needs values")

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the operation returns."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(tensor in self._unknown for tensor in inputs) or func.overloadpacket.__name__ in MAKING:
            return func(*args, **kwargs)
        returns = func._schema.returns
        if any(result.alias_info is not None and result.alias_info.is_write for result in returns):
            return self._marked(kwargs["out"] if "out" in kwargs else args[0])  # in place
        if returns and all(result.alias_info is not None for result in returns):
            return self._marked(func(*args, **kwargs))  # a view
        return self._marked(self._empty(func, args, kwargs, inputs))

    def _empty(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> Any:
        device = kwargs.get("device") or next((one for one in inputs if one.dim()), inputs[0]).device
        settings = {name: value for name, value in kwargs.items() if name != "device"}
        # The layers of a model are much alike.
        lengths = [len(item) if isinstance(item, list | tuple) else -1 for item in args]
        called = func, *lengths, *settings, *map(_described, tree_leaves((args, settings)))
        if (shapes := self._shapes.get(called)) is None:
            try:
                shapes = func(*tree_map(_shape_of, args), **tree_map(_shape_of, settings))
            except Exception as error:  # whatever the reason, with values it will either work or say what is wrong
                raise self.need_values(func) from error
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(shapes)):
                raise self.need_values(func)
            self._shapes[called] = shapes

        def made(shape: Any) -> Any:
            if not isinstance(shape, Tensor):
                return shape
            return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)

        return tree_map(made, shapes)

    def _marked(self, output: Any) -> Any:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._unknown[leaf] = None
                if leaf._base is not None:  # a part was written, or will be
                    self._unknown[leaf._base] = None
        return output


class _Reading(TorchFunctionMode):
    def __init__(self, values: StandIns) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READING and self._values.has(args[0]):
            raise self._values.need_values(func)
        return func(*args, **(kwargs or {}))


def _described(argument: Any) -> object:
    """All that the shape of a result can hang on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return (type(argument), argument) if isinstance(argument, Hashable) else object()  # equal to nothing else


def _shape_of(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")
