"""One forward of two images that finds each attention of a model and where its tokens lie.

Done once per model and image size; measuring then knows which calls to look at and how.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nearsight.lens.attention import Attention, ExplicitAttention, FusedAttention
from nearsight.lens.capture import OPAQUE, AttentionTap, Call
from nearsight.lens.geometry import Geometry, NotSpatialError, locate
from nearsight.lens.layout import LayoutError
from nearsight.lens.places import PADDING, constant_along
from nearsight.lens.trace import PlaceTrace, Trace, traced_pair
from nearsight.locat.refine import REFINEMENTS


@dataclass(frozen=True)
class Site:
    """One spatial attention of a model."""

    name: str
    """Dotted name of its module; "#2" marks a second attention in the same module."""
    geometry: Geometry
    operand: int = 0
    """For explicit attention, which factor of the product holds the weights."""
    axes: tuple[int, int] = (-2, -1)
    """For explicit attention, which of their axes are queries and keys."""
    hidden_WHNM: Tensor | None = None
    """For explicit attention, the keys that a mask hides from a query."""


@dataclass(frozen=True)
class Survey:
    """What is where in a model, for images of one size."""

    sites: dict[Call, Site]
    """The spatial attentions, in the order in which they are computed."""
    skipped: dict[str, str]
    """Names of attentions that are not spatial, with the reason."""
    calling: dict[str, nn.Module]
    """All modules that call functions which may be attention, by name, and those that do it out of sight."""


def survey(model: nn.Module, image: Tensor) -> Survey:
    """Survey a model (in eval mode) for images like this one, [3, H, W]."""
    images = traced_pair(image)
    surveyor = _Surveyor(model, images)
    try:
        return surveyor.run(images)
    finally:
        surveyor.forget()


class _Surveyor:
    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self._model = model
        self._trace = PlaceTrace(images, self._softmax, self._keys_first)
        self._tap = AttentionTap(model, self._candidates)
        self._modules = dict(model.named_modules())
        self._calling: dict[str, nn.Module] = {
            name: module for name, module in self._modules.items() if isinstance(module, OPAQUE)
        }
        self._found: list[tuple[Call, str, Site | str]] = []
        self._softmaxes: dict[int, tuple[str, str]] = {}
        """Those not yet seen to multiply values: their layer, and what is to be said of them."""
        self._unused: dict[int, int] = {}
        """How many weights of each softmax have not yet multiplied values."""
        self._used: set[tuple[int, int, torch.Size]] = set()
        """The parts of a softmax that have: its number, where they begin in memory, their shape."""
        self._last_explicit: tuple[Call, ExplicitAttention, Trace] | None = None
        self._times: Counter[str] = Counter()
        """How many attentions each layer has had."""
        self._located: dict[tuple[object, ...], Geometry] = {}

    def forget(self) -> None:
        """Trace and tap call back here: else all of it would stay in memory until the next garbage collection."""
        del self._trace, self._tap

    def run(self, images: Tensor) -> Survey:
        with torch.no_grad(), self._trace, self._tap:
            self._model(images)
        sites: dict[Call, Site] = {}
        skipped: dict[str, str] = {}
        for call, name, result in self._found:
            if isinstance(result, Site):
                sites[call] = result
            else:
                skipped[name] = result
        for name, reason in self._softmaxes.values():
            skipped.setdefault(name, reason)
        return Survey(sites, skipped, self._calling)

    def _softmax(self, number: int, trace: Trace, axis: int) -> None:
        name = self._tap.layer_name
        if name is None or self._tap.inside_fused:
            return
        places = self._trace.places
        if trace.own.dim() < 3:
            if not bool(((places.image_of(trace.own) < 0) & (trace.own > PADDING)).any()):
                return  # of a classifier
            reason = "its weights are between the images of a batch, not between places"
        elif trace.looked_at is not None:
            reason = "its weights do not multiply values in a way that can be followed"
        elif trace.own.movedim(axis, 0).unique(dim=0).shape[0] > 1:
            reason = "a softmax over tokens that has no queries (pooling by scores)"
        elif bool(places.covers_image(trace.own).all()):
            reason = "attention between channels, not between places"
        else:
            reason = "its weights come from one token alone, not from queries and keys"
        self._softmaxes[number] = name, reason
        self._unused[number] = trace.own.numel()

    def _candidates(self, call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        self._calling[call.layer_name] = self._modules[call.layer_name]
        for candidate in candidates:
            attention = candidate()
            if isinstance(attention, FusedAttention):
                self._note(call, lambda attention=attention: self._fused(attention))  # type: ignore[misc]
                continue
            trace = self._trace.of(attention.weights)
            if trace is not None and trace.looked_at is not None and self._is_new_part(attention.weights, trace):
                self._note(call, lambda a=attention, t=trace: self._explicit(a, t))  # type: ignore[misc]
                self._last_explicit = call, attention, trace

    def _is_new_part(self, weights: Tensor, trace: Trace) -> bool:
        """One softmax may meet the values in several products, by heads or by queries: each part is a site. The same
        weights may also do it twice, which is one."""
        self._last_explicit = None
        if trace.softmax is None or self._unused.get(trace.softmax, 0) <= 0:
            return False
        part = trace.softmax, weights.data_ptr(), weights.shape
        if weights._base is not None and part in self._used:  # the memory of a copy may have been another copy's
            return False
        self._softmaxes.pop(trace.softmax, None)
        self._unused[trace.softmax] -= weights.numel()
        self._used.add(part)
        return True

    def _keys_first(self, softmax: int) -> None:
        """The product just noted shows that what was taken for queries are keys."""
        if self._last_explicit is None or self._last_explicit[2].softmax != softmax:
            return
        call, attention, trace = self._last_explicit
        assert trace.looked_at is not None
        swapped = replace(trace, own=trace.looked_at, looked_at=trace.own)
        self._found.pop()
        self._times[call.layer_name] -= 1
        self._note(call, lambda: self._explicit(attention, swapped))
        self._last_explicit = None

    def _note(self, call: Call, examine: Callable[[], Site]) -> None:
        self._times[call.layer_name] += 1
        times = self._times[call.layer_name]
        name = call.layer_name if times == 1 else f"{call.layer_name}#{times}"
        try:
            if isinstance(self._modules[call.layer_name], REFINEMENTS):
                raise NotSpatialError("tokens that refine each other without any weights (PRR), which is no layer")
            site: Site | str = examine()
        except (NotSpatialError, LayoutError) as error:
            lost = f"; places could not be followed through {self._trace.lost[-1]}" if self._trace.lost else ""
            site = f"{error}{lost}"
        self._found.append((call, name, site if isinstance(site, str) else replace(site, name=name)))

    def _fused(self, attention: FusedAttention) -> Site:
        numbers = []
        for tensor in (attention.query, attention.key):
            of_tokens = constant_along(self._trace.numbers(tensor), -1)
            if of_tokens is None:
                raise NotSpatialError("attention between channels, not between places")
            numbers.append(of_tokens.squeeze(-1))
        return Site("", self._locate(*numbers))

    def _locate(self, query_LN: Tensor, key_LM: Tensor) -> Geometry:
        """Most layers of a model have their tokens where another one has."""
        known = _content(query_LN), _content(key_LM)
        if known not in self._located:
            self._located[known] = locate(self._trace.places, query_LN, key_LM)
        return self._located[known]

    def _explicit(self, attention: ExplicitAttention, trace: Trace) -> Site:
        if trace.heads_mixed:
            raise NotSpatialError("talking heads: weights are mixed across heads, so that no map belongs to one head")
        assert trace.looked_at is not None
        own, looked_at = trace.own, trace.looked_at
        query_axis, key_axis = _token_axes(own, looked_at)
        query = own.movedim((query_axis, key_axis), (-2, -1))[..., 0]
        key = looked_at.movedim((query_axis, key_axis), (-2, -1))[..., 0, :]
        geometry = self._locate(query, key)
        hidden_WHNM: Tensor | None = None
        if trace.hidden is not None and trace.hidden.any():
            hidden = trace.hidden.movedim((query_axis, key_axis), (-2, -1))
            hidden_WHNM = geometry.layout.arrange(hidden)[0].bool()
        return Site("", geometry, attention.operand, (query_axis, key_axis), hidden_WHNM)


def _content(numbers: Tensor) -> tuple[object, ...]:
    """Equal for tensors of the same numbers."""
    once = numbers
    for axis, (size, stride) in enumerate(zip(numbers.shape, numbers.stride(), strict=True)):
        once = once.narrow(axis, 0, 1) if size and stride == 0 else once  # one number, repeated: heads, mostly
    return numbers.shape, once.shape, once.numpy().tobytes()


def _token_axes(own: Tensor, looked_at: Tensor) -> tuple[int, int]:
    """The axis along which queries alone change, and that along which keys alone do."""

    def changes(numbers: Tensor, axis: int) -> bool:
        return constant_along(numbers, axis) is None

    axes = range(own.dim())
    queries = [axis for axis in axes if changes(own, axis) and not changes(looked_at, axis)]
    keys = [axis for axis in axes if changes(looked_at, axis) and not changes(own, axis)]
    if len(queries) == 1 and len(keys) == 1:
        return queries[0], keys[0]
    if own.shape[-1] == 1 or own.shape[-2] == 1:  # a single token does not change
        return own.dim() - 2, own.dim() - 1
    raise NotSpatialError("it cannot be told which axes of its weights are queries and which are keys")
