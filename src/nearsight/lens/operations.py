"""The elementary operations of torch: what each does to where things are, by name; and running them without values.

An operation that is in none of these tables works element by element: what comes out lies where it went in.
"""

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

HIDING = -50.0
"""What is added to a logit to hide a key is below this: models use −100, the lowest number of their type, or −∞."""
MOVES = {
    "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "expand", "roll", "cat", "stack", "split",
    "split_with_sizes", "unbind", "chunk", "flip", "repeat", "unfold", "index", "index_select", "gather", "narrow",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "diagonal", "rot90", "movedim",
    "repeat_interleave", "take_along_dim",
}  # fmt: skip
# Places may be laid out differently in memory than the data: a view of one can be a copy of the other.
RESHAPING = {"view", "_unsafe_view", "reshape", "_reshape_copy", "_reshape_alias"}
# im2col is written for floating point alone.
RENAMED: dict[str, Callable[..., Tensor]] = {
    "im2col": lambda ids, *settings: torch.ops.aten.im2col(ids.double(), *settings).long(),
    "view_as_complex": lambda ids: ids[..., 0],
    "view_as_real": lambda ids: ids.unsqueeze(-1).expand(*ids.shape, 2),
}
# These put data into part of a tensor: by name, which argument the data are. In place, a name ends with an underscore.
PLACING = {
    "copy": 1, "slice_scatter": 1, "select_scatter": 1, "index_put": 2, "_index_put_impl": 2, "masked_scatter": 2,
    "scatter": 3, "index_copy": 3,
}  # fmt: skip
# So do these, but what comes to one place is added up.
ADDING = {"scatter_add", "scatter_reduce", "index_add", "index_reduce"}
# New tensors that are made like another one: nothing in them comes from there.
MAKING = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "new_empty_strided",
}  # fmt: skip
JOINING = {
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm",
    "logsumexp", "prod", "median", "argmax", "argmin", "any", "all",
}  # fmt: skip
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
QUANTISED_LINEAR = {"linear_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic", "linear_relu_dynamic_fp16"}
CONVOLUTIONS = {"convolution", "mkldnn_convolution", "cudnn_convolution", "_convolution", "mps_convolution"}
RESAMPLING = {
    "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool3d",
    "max_pool3d_with_indices", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "upsample_nearest1d", "upsample_linear1d",
    "_upsample_nearest_exact2d",
}  # fmt: skip
INTERPOLATING = {
    "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa",
    "upsample_linear1d",
}  # fmt: skip
_POOLING = {"avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"}
SOFTMAX = {"_softmax", "_safe_softmax"}
# What comes out are the same numbers.
SAME = {"clone", "_to_copy", "detach", "alias", "lift_fresh", "contiguous"}
# Same shape, other places: what comes out is not where it went in.
MIXING = {
    "_fft_c2c", "_fft_r2c", "_fft_c2r", "cumsum", "cumprod", "linalg_solve_ex", "linalg_inv_ex", "grid_sampler_2d",
    "grid_sampler_3d",
}  # fmt: skip
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}
"""Ways to a tensor's contents that are not operations, so that a dispatch mode does not see them."""


@dataclass(frozen=True)
class Window:
    """What an operation sees along one axis: output i the cells i · step − margin + spread · (0 … size − 1)."""

    size: int
    step: int
    margin: int
    spread: int

    def centre(self, number: Tensor) -> Tensor:
        """Of the window with this number, beyond the borders as well."""
        return number * self.step - self.margin + self.spread * (self.size - 1) / 2

    def cells(self, count: int) -> Tensor:
        """Of each of so many windows, [count, size]; negative, or beyond the last, where it sees padding."""
        return torch.arange(count)[:, None] * self.step - self.margin + self.spread * torch.arange(self.size)


def window_of(name: str, args: Sequence[Any], axis: int) -> Window | None:
    """The window of a convolution or pooling along a spatial axis; None for what has no fixed one."""
    if name in ("convolution", "_convolution"):
        if args[6]:  # transposed
            return None
        values = [list(args[1].shape[2:]), *args[3:6]]
    elif name in _POOLING:
        kernel, stride, padding = args[1], *(args[i] if len(args) > i else [] for i in (2, 3))
        spread = args[4] if name.startswith("max") and len(args) > 4 else [1]
        values = [kernel, stride or kernel, padding or [0], spread]
    else:
        return None
    size, step, margin, spread = (int(value[axis % len(value)]) for value in values)
    return Window(size, step, margin, spread)


class ValueNeededError(Exception):
    """A model asks for a value that depends on its images."""


class StandIns:
    """Runs operations, except on what comes from the images: where tokens lie does not depend on their values.

    What comes from the images is uninitialised memory of the right shape. Everything else, such as tables of
    positions, masks and orders of windows, is computed as always. So a survey costs what it takes to call a model's
    operations, and not what these compute. A model that asks for a value it has seen (it sorts its tokens, or decides
    by them) raises `ValueNeededError`, and is run again in full.
    """

    def __init__(self, images: Tensor) -> None:
        self._unknown: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        self._unknown[images] = None
        self._shapes: dict[tuple[object, ...], Any] = {}
        """What operations on such arguments return, without memory."""
        self.asked = False
        """Whether a value was needed; the model may have caught the error."""
        self.reading = _Reading(self)
        """A mode that must be active as well, to see what is not an operation."""

    def has(self, tensor: Any) -> bool:
        """Whether nothing is known of what a tensor holds."""
        return isinstance(tensor, Tensor) and tensor in self._unknown

    def need_values(self, operation: Any) -> ValueNeededError:
        """The error for an operation that needs values."""
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
        # The layers of a model are much the same.
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
    """All that the shape of a result can depend on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return (type(argument), argument) if isinstance(argument, Hashable) else object()  # equal to nothing else


def _shape_of(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")
