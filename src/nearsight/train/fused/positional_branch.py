"""The attention branch of blocks whose maps come from positions alone, and how it is found among operations that wait.

All images of a cell have the same maps. So a head weighs the values of all its images by one product, for which they
lie side by side. What the kernels of `attention` would read and write of queries, keys and values for each image is
more than these two reorderings do.

Shape suffixes: K cells, R rows (tokens) of a cell, B images of a cell, C channels, H heads, d head size, N and M tokens
(queries and keys), o and i channels of a matrix.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.train.fused.branches import Back, Branch, Weights, sum_of_products
from nearsight.train.fused.rows import sum_rows
from nearsight.train.fused.waiting import Operation, Pending, before, behind_reshapes, is_norm_of, lies, weights_of
from nearsight.train.stackedweight import StackedWeight

_BYTES = 16
"""That rows of a matrix are a multiple of, as the library's fast products want them."""


@dataclass(frozen=True)
class PositionalBranch(Branch):
    """values → weighed by maps → projection. The further weight is the maps, [K, H, N, M]."""

    num_tokens: int
    num_heads: int

    @property
    def num_further(self) -> int:
        return 1

    def middle(self, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Tensor:
        weighed = torch.bmm(_maps(weights, projected_KRo.dtype), self._values(projected_KRo, bias_Ko))
        return self._by_row(weighed, projected_KRo)

    def middle_back(self, gradient_KRi: Tensor, projected_KRo: Tensor, bias_Ko: Tensor, weights: Weights) -> Back:
        gradient = self._by_head(gradient_KRi).flatten(3).flatten(0, 1)
        of_values = torch.bmm(_maps(weights, gradient.dtype).mT, gradient)
        of_maps = sum_of_products(gradient.mT, self._values(projected_KRo, bias_Ko).mT)
        (maps_KHNM,) = weights.further
        further = (of_maps.view(maps_KHNM.shape).to(maps_KHNM.dtype),)
        return Back(self._by_row(of_values, projected_KRo), further=further)

    def sum_of(self, back: Back, outer_sum_KC: Tensor, second_KCi: Tensor) -> Tensor:
        return sum_rows(back.gradient_KRo)

    def _by_head(self, rows_KRC: Tensor) -> Tensor:
        """[K, R, C] → [K, H, M, B, d], another view of the same memory."""
        heads, size = self.num_heads, rows_KRC.shape[2] // self.num_heads
        return rows_KRC.view(len(rows_KRC), -1, self.num_tokens, heads, size).permute(0, 3, 2, 1, 4)

    def _values(self, projected_KRo: Tensor, bias_Ko: Tensor) -> Tensor:
        """[K·H, M, B·d], with their bias."""
        by_head = self._by_head(projected_KRo)
        values_KHMBd = by_head.new_empty(by_head.shape)
        bias_KH11d = bias_Ko.view(len(bias_Ko), self.num_heads, 1, 1, -1)
        torch.add(by_head, bias_KH11d, out=values_KHMBd)  # reordered on the way
        return values_KHMBd.flatten(3).flatten(0, 1)

    def _by_row(self, by_head: Tensor, like_KRC: Tensor) -> Tensor:
        """[K·H, N, B·d] → [K, R, C]."""
        rows_KRC = torch.empty_like(like_KRC)
        place_KHNBd = self._by_head(rows_KRC)
        place_KHNBd.copy_(by_head.view(place_KHNBd.shape))
        return rows_KRC


def _maps(weights: Weights, dtype: torch.dtype) -> Tensor:
    """[K·H, N, M], its rows as far apart as the library's fast products want them."""
    (maps_KHNM,) = weights.further
    num_keys = maps_KHNM.shape[3]
    padded = F.pad(maps_KHNM.to(dtype), (0, -num_keys % (_BYTES // dtype.itemsize)))
    return padded.flatten(0, 1)[..., :num_keys]


_WEIGHED = "hnm,bmhd->bnhd"


def weighed_by_maps(func: Any, equation: Any, *operands: Any) -> Any:
    """The rule for `torch.einsum`."""
    if equation != _WEIGHED or not isinstance(operands[0], StackedWeight) or not isinstance(operands[1], Pending):
        return NotImplemented
    maps_HNM, value_BMHd = operands
    num_images, num_keys, num_heads, size = value_BMHd.shape
    if tuple(maps_HNM.shape) != (num_heads, num_keys, num_keys):
        return NotImplemented
    dtype = value_BMHd.operation.dtype
    shape = torch.empty((num_images, num_keys, num_heads, size), dtype=dtype, device="meta")
    return Pending.of(Operation(func, (equation, maps_HNM, value_BMHd), {}, shape, dtype), value_BMHd)


def positional_branch(stream_BNC: Tensor, projection: Operation) -> tuple[Branch, Weights] | None:
    """projection(weighed by maps(values(norm(stream)))), if that is what waits."""
    heads_together = before(projection, F.linear)
    weighed = behind_reshapes(heads_together)
    if heads_together is None or weighed is None or weighed.func is not torch.einsum:
        return None
    _, maps_HNM, value_BMHd = weighed.args
    by_head = value_BMHd.operation
    values = behind_reshapes(by_head)
    norm = before(values, F.linear)
    if values is None or not is_norm_of(norm, stream_BNC):
        return None
    batch, tokens, heads, size = weighed.shape.shape
    width = heads * size
    as_usual = (
        values.shape.shape == (batch, tokens, width)
        and lies(by_head, values.shape, 0, (batch, tokens, heads, size), (tokens * width, width, size, 1))
        and lies(heads_together, weighed.shape, 0, (batch, tokens, width), (tokens * width, width, 1))
    )
    if not as_usual:
        return None
    return PositionalBranch(norm.args[4], tokens, heads), weights_of(norm, values, projection, [maps_HNM])
