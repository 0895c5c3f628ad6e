"""Following places through a forward pass of an unmodified model.

A `TorchDispatchMode` sees each elementary operation. Operations that move data (reshape, permute, roll, pad, cat, …)
are done to the places as well; those that combine data join places (a linear layer the channels of a token, a strided
convolution the pixels of a patch); the rest work element by element and leave things where they are. So nothing needs
to be known about a model: neither how many prefix tokens it has, nor how it makes windows, shifts them or pools its
keys. Which operation does what is in `operations`.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from nearsight.errors import InputError
from nearsight.lens import operations as ops
from nearsight.lens.inputs import Batch, as_batch, on_the_host
from nearsight.lens.operations import StandIns, ValueNeededError, window_of
from nearsight.lens.pairs import Meeting, Pairs, Trace, varies
from nearsight.lens.places import NOWHERE, PADDING, Places, compact, constant_along, reshaped

PARTS = ("own", "looked_at", "hidden")
SoftmaxListener = Callable[[int, Trace, int], None]
MeetingListener = Callable[[Meeting], None]


_T = TypeVar("_T")


def without_values_first(run: Callable[[bool], _T]) -> _T:
    """What `run(with_values)` gives: without values, which is quick, unless the model asks for some."""
    try:
        return run(False)
    except ValueNeededError:
        return run(True)


class PlaceTrace(TorchDispatchMode):
    """While active, knows the place of every element of every tensor that comes from the images."""

    def __init__(
        self,
        batch: Batch | Tensor,
        on_softmax: SoftmaxListener = lambda *_: None,
        on_meeting: MeetingListener = lambda _: None,
        *,
        with_values: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        batch = as_batch(batch)
        images, (frames, height, width) = batch.images, batch.size
        with on_the_host():
            self.places = Places(len(batch), (height, width), frames)
            own = batch.numbers(self.places.pixels)
        self.lost: list[str] = []
        """Operations after which the places of their results were not known."""
        self.pairs = Pairs(self.places, on_meeting, self.lost)
        """What is known of weights between queries and keys."""
        self.values = None if with_values else StandIns(images)
        """Replaces what is not computed; None: everything is."""
        self._on_softmax = on_softmax
        self._num_softmaxes = 0
        self._traces: MutableMapping[Tensor, Trace] = WeakIdKeyDictionary()
        self._traces[images] = Trace(own)

    def __enter__(self) -> Self:
        if self.values is not None:
            self.values.reading.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self.values is not None:
            self.values.reading.__exit__(*exception)  # type: ignore[no-untyped-call]
            if self.values.asked and exception[0] is None:  # the model caught it, and went on with something else
                raise ValueNeededError("the model asked for a value")

    def of(self, tensor: Tensor) -> Trace | None:
        return self._traces.get(tensor)

    def numbers(self, tensor: Tensor) -> Tensor:
        """The place of each element; nowhere for a tensor that does not come from the images."""
        return self._ids(tensor, "own")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any("Nested" in kind.__name__ for kind in types):
            raise InputError(
                "nested tensors cannot be followed; give the model images of one size, padded, or one image at a "
                "time in a plain tensor"
            )
        output = func(*args, **(kwargs or {})) if self.values is None else self.values.run(func, args, kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf in self._traces for leaf in tree_leaves((args, kwargs))):
            with torch._C.DisableTorchFunction():
                self._follow(func, args, kwargs or {}, output)
        return output

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        name = func.overloadpacket.__name__
        if name in ops.MOVES or name in ops.RENAMED or name in ops.RESHAPING:
            self._move(func, args, kwargs, output)
        elif name in ops.JOINING:
            self._keep(output, self._joined(args, kwargs, output))
        elif name in ops.PRODUCTS:
            left, right = ops.PRODUCTS[name]
            self._keep(output, self.pairs.product(self.of(args[left]), self.of(args[right]), output.shape))
        elif name in ops.RESAMPLING or name in ops.CONVOLUTIONS:
            self._keep(output, self._resampled(name, args, output))
        elif name == "col2im":
            self._keep(output, self._folded(args, output))
        elif name.startswith("_scaled_dot_product") and "attention" in name:
            self._keep(output, self._at_the_queries(args[0], output))
        elif name in ops.QUANTISED_LINEAR:
            own = self.places.union(self._traces[args[0]].own, [-1], keepdim=True)
            self._keep(output, Trace(own.expand(output.shape)))
        elif name == "constant_pad_nd":
            trace = self._traces[args[0]]
            self._keep(output, trace.moved(lambda ids: compact(torch.constant_pad_nd(ids, args[1], PADDING))))
        elif (plain := name.rstrip("_")) in ops.ADDING or (plain in ops.PLACING and _adds(args, kwargs)):
            self._add(name, args[0], output)
        elif plain in ops.PLACING and isinstance(args[ops.PLACING[plain]], Tensor):
            if name.endswith("_"):
                self._write(func, args)
            else:
                self._move(func, args, kwargs, output)
        elif name in ("sort", "topk"):
            if self.values is not None:
                raise self.values.need_values(name)
            given = dict(zip(("self", "dim") if name == "sort" else ("self", "k", "dim"), args, strict=False))
            axis = {"dim": -1, **given, **kwargs}["dim"]
            self._keep(output[0], self._traces[args[0]].moved(lambda ids: ids.gather(axis, output[1].cpu())))
        elif name in ops.MIXING:
            self.lost.append(name)
        elif name not in ops.MAKING:
            self._element_by_element(name, args, kwargs, output)

    def _keep(self, output: Any, trace: Trace | None) -> None:
        for leaf in tree_leaves(output):
            if trace is not None and isinstance(leaf, Tensor) and leaf.shape == trace.own.shape:
                self._traces[leaf] = trace

    # Operations that move data

    def _move(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        name = func.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf in self._traces]
        traces = [self._traces[leaf] for leaf in inputs]

        def moved(part: Callable[[Tensor], Tensor]) -> list[Tensor]:
            swapped = [self._swapped(argument, part, may_index=place > 0) for place, argument in enumerate(args)]
            if name in ops.RESHAPING:
                return [reshaped(swapped[0], output.shape)]
            result = ops.RENAMED[name](*swapped, **kwargs) if name in ops.RENAMED else func(*swapped, **kwargs)
            return [compact(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

        parts = {
            part: moved(partial(self._ids, part=part))
            for part in PARTS
            if any(getattr(t, part) is not None for t in traces)
        }
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        weights = self.pairs.moved(sum(leaf.numel() for leaf in outputs), traces)
        for number, leaf in enumerate(outputs):
            ids = {part: values[number] for part, values in parts.items()}
            self._keep(leaf, Trace(**ids, weights=weights))

    def _swapped(self, argument: Any, part: Callable[[Tensor], Tensor], *, may_index: bool) -> Any:
        """An argument of a moving operation with tensors replaced by places; an index, which may have been computed
        from the images, goes to where places are."""
        if isinstance(argument, list | tuple):
            return type(argument)(self._swapped(item, part, may_index=may_index) for item in argument)
        if not isinstance(argument, Tensor):
            return argument
        if not may_index or argument.is_floating_point() or argument.is_complex():
            return part(argument)
        if self.values is not None and self.values.has(argument):
            raise self.values.need_values("an index")
        return argument.cpu()

    def _ids(self, tensor: Tensor, part: str) -> Tensor:
        trace = self.of(tensor)
        ids: Tensor | None = None if trace is None else getattr(trace, part)
        return torch.full((), NOWHERE).expand(tensor.shape) if ids is None else ids

    def _write(self, func: Any, args: Sequence[Any]) -> None:
        """Data written into part of a tensor bring their places along."""
        target: Tensor = args[0]
        base = target if target._base is None else target._base
        if not base.is_contiguous():
            self.lost.append(str(func))
            return
        old = self.of(base) or Trace(self._ids(base, "own"))
        sources = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor) and leaf in self._traces]
        parts = {part for part in PARTS for trace in (old, *map(self.of, sources)) if getattr(trace, part) is not None}

        may_index = func.overloadpacket is not torch.ops.aten.copy_

        def written(part: str) -> tuple[Tensor, Tensor]:
            ids = self._ids(base, part).contiguous().clone()
            window = ids.as_strided(target.shape, target.stride(), target.storage_offset() - base.storage_offset())
            to_places = partial(self._swapped, part=partial(self._ids, part=part), may_index=may_index)
            func(window, *map(to_places, args[1:]))
            return ids, window.clone()

        ids = {part: written(part) for part in parts}
        wholes: dict[str, Any] = {part: whole for part, (whole, _) in ids.items()}
        windows: dict[str, Any] = {part: window for part, (_, window) in ids.items()}
        self._traces[base] = replace(old, **wholes)
        if base is not target:
            self._traces[target] = replace(old, **windows)

    def _add(self, name: str, target: Tensor, output: Any) -> None:
        """Data added to part of a tensor do not move what is there, as in any sum; where nothing is, they are lost."""
        if (trace := self.of(target)) is None:
            self.lost.append(name)
        self._keep(output, trace)

    # Operations that combine data

    def _joined(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Trace | None:
        """A sum, mean, maximum, … along some axes."""
        source: Tensor = args[0]
        trace = self._traces[source]
        given = kwargs.get("dim", next((a for a in args[1:] if _is_axes(a)), None))
        axes = list(range(source.dim())) if given in (None, []) else [given] if isinstance(given, int) else given
        result = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        keepdim = result.dim() == source.dim()
        own = self.places.union(trace.own, axes, keepdim=keepdim)
        if trace.looked_at is None or any(varies(trace, axis) != (False, False) for axis in axes):
            return Trace(own)
        looked_at = self.places.union(trace.looked_at, axes, keepdim=keepdim)  # over heads: still pairs of tokens
        return Trace(own, looked_at, self.pairs.new(own.numel(), [trace]))

    def _resampled(self, name: str, args: Sequence[Any], output: Any) -> Trace | None:
        """Convolution, pooling, interpolation: channels are joined, and so is what each window sees of the space; where
        there are no windows, space is cut into as many pieces as come out."""
        trace = self.of(args[0])
        result = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        if trace is None or result.dim() != args[0].dim():
            self.lost.append(name)
            return None
        ids, looked_at = trace.own, trace.looked_at
        pointwise = result.shape[2:] == args[0].shape[2:]
        if name in ops.CONVOLUTIONS:
            ids = self.places.union(ids, [1], keepdim=True)
            is_pair = looked_at is not None and pointwise and set(args[1].shape[2:]) == {1}
            looked_at = constant_along(looked_at, 1) if looked_at is not None and is_pair else None
        changed = [axis for axis in range(2, result.dim()) if result.shape[axis] != args[0].shape[axis]]
        windows = {axis: window for axis in changed if (window := window_of(name, args, axis - 2)) is not None}
        ids = self.places.windows(ids, {axis: (result.shape[axis], window) for axis, window in windows.items()})
        for axis in changed:
            if axis not in windows:
                between = name in ops.INTERPOLATING and not _aligns_corners(args)
                ids = self.places.resample(ids, axis, result.shape[axis], between=between)
        own = ids.expand(result.shape)
        if looked_at is None or not pointwise:
            return Trace(own)
        return Trace(own, looked_at.expand(result.shape), self.pairs.new(result.numel(), [trace]))

    def _folded(self, args: Sequence[Any], output: Tensor) -> Trace:
        """Windows [..., channels · area, windows] added up where they overlap: each pixel lies where a window does."""
        (height, width), *geometry = args[1:6]
        rows, cols = (
            (side + 2 * margin - spread * (size - 1) - 1) // step + 1
            for side, size, spread, margin, step in zip((height, width), *geometry, strict=True)
        )
        ids = self.places.union(self._traces[args[0]].own, [-2], keepdim=True).unflatten(-1, (rows, cols))
        for axis, size in ((-2, height), (-1, width)):
            ids = self.places.resample(ids, axis % ids.dim(), size)
        return Trace(ids.expand(output.shape))

    def _at_the_queries(self, query: Tensor, output: Any) -> Trace | None:
        trace = self.of(query)
        if trace is None:
            return None
        return Trace(self.places.union(trace.own, [-1], keepdim=True).expand(output[0].shape))

    # All others

    def _element_by_element(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        traces = [self._traces[leaf] for leaf in leaves if leaf in self._traces]
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        found = [(result, self._merged(traces, result.shape)) for result in results]
        if found and all(trace is None for _, trace in found):
            self.lost.append(name)
        for result, trace in found:
            if trace is None:
                continue
            if trace.looked_at is not None and (mask := self._hiding(name, args, traces)) is not None:
                mask = mask.expand(result.shape)
                trace = replace(trace, hidden=mask if trace.hidden is None else torch.maximum(trace.hidden, mask))
            if name in ops.SOFTMAX:
                self._on_softmax(self._num_softmaxes, trace, args[1])
                softmaxes = frozenset([self._num_softmaxes])
                over = None
                changing = (False, False) if trace.looked_at is None else varies(trace, args[1])
                if changing in ((True, False), (False, True)):
                    over = result.shape[args[1]], int(changing[1])
                weights = self.pairs.new(result.numel(), [trace], softmaxes=softmaxes, softmax_over=over)
                trace = replace(trace, weights=weights)
                self._num_softmaxes += 1
            elif name not in ops.SAME:
                pairs = [one for one in traces if one.looked_at is not None]
                trace = replace(trace, weights=self.pairs.new(result.numel(), pairs))
            self._traces[result] = trace

    def _hiding(self, name: str, args: Sequence[Any], traces: Sequence[Trace]) -> Tensor | None:
        """1 where this operation hides keys: by filling in or adding what is far below any logit; behind a softmax, by
        filling in or multiplying with 0."""
        behind = any(t.weights is not None and self.pairs.weights[t.weights].softmaxes for t in traces)
        if name.startswith("masked_fill") and args[1] not in self._traces:
            value = args[2].item() if isinstance(args[2], Tensor) else args[2]
            return args[1].long().cpu() if value <= ops.HIDING or (behind and value == 0) else None
        if name in ("add", "add_") or (behind and name in ("mul", "mul_")):
            terms = [term for term in args[:2] if isinstance(term, Tensor) and term not in self._traces]
            is_hidden = [(term == 0) if name.startswith("mul") else (term <= ops.HIDING) for term in terms]
            return is_hidden[0].long().cpu() if is_hidden and is_hidden[0].any() else None
        return None

    def _merged(self, traces: Sequence[Trace], shape: torch.Size) -> Trace | None:
        fitting = [trace for trace in traces if _can_expand(trace.own.shape, shape)]
        if not fitting:
            return None
        # Beside weights, which lie at a query and look at a key, what lies at either of them says nothing.
        pairs = [trace for trace in fitting if trace.looked_at is not None]
        if pairs:
            # Of several, one that was not expanded to fit the others.
            first = min(pairs, key=lambda trace: int((trace.own == PADDING).sum()))
            assert first.looked_at is not None
            hidden = next((trace.hidden.expand(shape) for trace in pairs if trace.hidden is not None), None)
            return Trace(first.own.expand(shape), first.looked_at.expand(shape), first.weights, hidden)
        own = fitting[0].own.expand(shape)
        for trace in fitting[1:]:
            own = self.places.smaller(own, trace.own.expand(shape))
        return Trace(own)


def _adds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what puts data into a tensor adds them up: scatter(reduce=…), index_put(accumulate=True)."""
    return "reduce" in kwargs or (len(args) > 3 and args[3] is True)


def _aligns_corners(args: Sequence[Any]) -> bool:
    """Of an interpolation: whether the outermost cells stay where they are."""
    return len(args) > 2 and args[2] is True


def _is_axes(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return bool(argument) and all(isinstance(item, int) for item in argument)
    return isinstance(argument, int) and not isinstance(argument, bool)


def _can_expand(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(shape) > len(target):
        return False
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)
