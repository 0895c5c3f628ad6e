"""What the elementary operations of torch do to where things are, by name.

An operation that is in none of these tables works element by element: what comes out lies where it went in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDING = -50.0
"""What is added to a logit to hide a key is below this: models use −100, the lowest number of their type, or −∞."""
MOVES = {
    "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "expand", "roll", "cat", "stack", "split",
    "split_with_sizes", "unbind", "chunk", "flip", "repeat", "unfold", "index", "index_select", "gather", "narrow",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "diagonal", "rot90", "movedim",
    "repeat_interleave", "take_along_dim",
}  # fmt: skip
# Memory may lie otherwise in the places than in the data: a view of one can be a copy of the other.
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
