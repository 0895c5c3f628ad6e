"""Weights between queries and keys, from the logits to the product with the values.

A model may do anything to its weights before they are in use: mix heads, smooth, multiply or mask them. So each state
of them has a number, and their state at the moment they meet the values is reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearsight.lens.places import Places, constant_along


@dataclass(frozen=True)
class Trace:
    """What is known about a tensor: for each element where it lies and, for attention, where it looks."""

    own: Tensor
    """Number of the place of each element."""
    looked_at: Tensor | None = None
    """In logits and weights of attention: the place of the key, where `own` is that of the query."""
    weights: int | None = None
    """Which numbers between queries and keys these are, in `Pairs.weights`: what changes them makes new ones."""
    hidden: Tensor | None = None
    """In logits and weights: 1 where a mask that does not depend on the image hides the key from the query."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Trace":
        looked_at = None if self.looked_at is None else move(self.looked_at)
        hidden = None if self.hidden is None else move(self.hidden)
        return replace(self, own=move(self.own), looked_at=looked_at, hidden=hidden)


@dataclass(frozen=True)
class Weights:
    """Numbers between queries and keys, from logits to what multiplies the values, as they are at one moment."""

    size: int
    """How many there are."""
    softmaxes: frozenset[int] = frozenset()
    """Those they have been through, counted from 0."""
    softmax_over: tuple[int, int] | None = None
    """If they are what a softmax gave: how many it made sum to 1, and whether these are keys (1) or queries (0)."""
    assumed: bool = False
    """Whether they were multiplied by a matrix of keys × keys, so that their keys are where its columns should be."""


@dataclass(frozen=True)
class Meeting:
    """Weights multiply what comes from the tokens: this is where they are in use."""

    weights: int
    keys_first: bool
    """Whether what was taken for queries are keys, since it is over these that the product sums."""
    are_keys: bool
    """Whether the values lie where the keys were assumed to lie."""
    is_softmax: bool
    """Whether what the product sums over is just what a softmax made sum to 1."""


class Pairs:
    """All weights that were met in a forward, and what products make of them."""

    def __init__(self, places: Places, on_meeting: Callable[[Meeting], None], lost: list[str]) -> None:
        self._places, self._on_meeting, self._lost = places, on_meeting, lost
        self.weights: list[Weights] = []
        """By their numbers."""

    def moved(self, size: int, traces: Sequence[Trace]) -> int | None:
        """Moved alone they are what they were; put together with others, new ones."""
        numbers = {trace.weights for trace in traces if trace.weights is not None}
        return numbers.pop() if len(numbers) == 1 and len(traces) == 1 else self.new(size, traces)

    def new(self, size: int, traces: Sequence[Trace], **said: Any) -> int | None:
        """The number of what an operation makes of such weights; None if they are none."""
        before = [self.weights[trace.weights] for trace in traces if trace.weights is not None]
        if not before:
            return None
        softmaxes = frozenset().union(*(weights.softmaxes for weights in before))
        said = {"softmaxes": softmaxes, "assumed": any(weights.assumed for weights in before), **said}
        self.weights.append(Weights(size, **said))
        return len(self.weights) - 1

    def product(self, left: Trace | None, right: Trace | None, shape: torch.Size) -> Trace | None:
        """left [..., i, c] times right [..., c, j]."""
        factors = [(factor, axis) for factor, axis in ((left, -1), (right, -2)) if factor is not None]
        pairs = [factor for factor in factors if factor[0].looked_at is not None]
        if len(pairs) == 1:
            (weights, axis), other = *pairs, next((one for one in factors if one is not pairs[0]), None)
            return self._times(weights, axis, other, shape)
        if len(factors) == 1:
            ((one, axis),) = factors
            return Trace(self._places.union(one.own, [axis], keepdim=True).expand(shape))
        assert left is not None
        assert right is not None
        # What does not change along the axis that is summed over: of weights, queries or keys.
        rows, columns = _kept(left, -1), _kept(right, -2)
        if rows is not None and columns is not None and constant_along(columns, -1) is None:
            if constant_along(rows, -2) is not None and bool(self._places.covers_image(rows).all()):
                return Trace(columns.expand(shape))  # channels, or summaries, of the image: queries of no place
            if not pairs:  # queries times keys
                self.weights.append(Weights(shape.numel()))
            number = self.new(shape.numel(), [left, right]) if pairs else len(self.weights) - 1
            return Trace(rows.expand(shape), columns.expand(shape), number)
        if rows is not None:
            return Trace(rows.expand(shape))
        if columns is not None:
            return Trace(columns.expand(shape))
        own = torch.stack(
            [
                self._places.union(left.own, [-1], keepdim=True).expand(shape),
                self._places.union(right.own, [-2], keepdim=True).expand(shape),
            ]
        )
        return Trace(self._places.union(own, [0]))

    def _times(self, weights: Trace, axis: int, other: tuple[Trace, int] | None, shape: torch.Size) -> Trace | None:
        """Weights between queries and keys, summed along an axis in a product: with the values, if these come from the
        tokens; with numbers of the model's own, which change the weights."""
        assert weights.looked_at is not None
        own, looked_at = weights.own, weights.looked_at
        changing = varies(weights, axis)
        if changing == (False, False) and (other is None or own.shape[axis] > 1):  # heads: each pair stays where it is
            kept = [constant_along(numbers, axis) for numbers in (own, looked_at)]
            assert kept[0] is not None
            assert kept[1] is not None
            return Trace(kept[0].expand(shape), kept[1].expand(shape), self.new(shape.numel(), [weights]))
        if other is not None and changing != (True, True):
            keys_first = changing == (True, False)
            queries, keys = (looked_at, own) if keys_first else (own, looked_at)
            if (number := weights.weights) is not None:
                met = self.weights[number]
                are_keys = not met.assumed or _same_along(keys, axis, other[0].own, other[1])
                is_softmax = met.softmax_over == (own.shape[axis], int(not keys_first))
                self._on_meeting(Meeting(number, keys_first, are_keys, is_softmax))
            return Trace(queries.narrow(axis, 0, 1).expand(shape))
        if changing == (False, True) and shape[axis] == own.shape[axis]:  # keys × keys: blurred, or moved
            queries = own.narrow(axis, 0, 1).expand(shape)
            return Trace(queries, looked_at.expand(shape), self.new(shape.numel(), [weights], assumed=True))
        self._lost.append("a product of weights")
        return Trace(self._places.union(own, [axis], keepdim=True).expand(shape))


def varies(weights: Trace, axis: int) -> tuple[bool, bool]:
    """Whether queries, and whether keys, change along an axis."""
    assert weights.looked_at is not None
    return constant_along(weights.own, axis) is None, constant_along(weights.looked_at, axis) is None


def _kept(factor: Trace, axis: int) -> Tensor | None:
    """Places that do not change along this axis, without it: of weights, those of queries or of keys."""
    parts = [constant_along(part, axis) for part in (factor.own, factor.looked_at) if part is not None]
    return next((part for part in parts if part is not None), None)


def _same_along(one: Tensor, axis: int, other: Tensor, other_axis: int) -> bool:
    """Whether places are the same along the axes that a product sums over."""
    lines = [numbers.movedim(along, -1) for numbers, along in ((one, axis), (other, other_axis))]
    return torch.equal(*(line.reshape(-1, line.shape[-1]).unique(dim=0) for line in lines))
