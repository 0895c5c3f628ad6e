"""What runs in an attention that was made local: its own code, up to where its weights are computed.

`add_locality` gives the module that computes an attention a child, `locality`, with what the inducers learn, and lets
its `forward` go through that child. There a function mode sees the call that computes the attention, as the lens's tap
does, and gives another result. It is the innermost mode, so that whoever looks (`measure`, `intervene`) sees the
attention with its locality.

Shape suffixes: B images, W windows, H heads, N queries, T queries of a tile, M keys, d head size.
"""

import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from nearsight.errors import InputError
from nearsight.lens.attention import FusedAttention
from nearsight.lens.capture import FUSED, PRODUCTS, flat, with_replaced
from nearsight.lens.layout import Layout
from nearsight.lens.operations import HIDING
from nearsight.lens.running import never_compiled
from nearsight.lens.stream import in_full_precision
from nearsight.locat.attend import TILE_BYTES, added_mask, attend_with_bias, has_kernels, is_transformed
from nearsight.locat.attend import attend as attend_on_grid
from nearsight.locat.gaussian import Grid
from nearsight.locat.inducers import Asked, Frame, Inducer, Radial
from nearsight.locat.inducers.base import extent_of, whole_grid
from nearsight.locat.inducers.normalisers import softmax_or_zeros

CHILD = "locality"
"""Name of the module in an attention."""
Key = tuple[str, int]
"""Which call of a module's forward: its kind (sdpa, multihead or product), and its number among those."""
Size = tuple[int, ...]
"""(height, width) of images."""
_DROPOUTS = (F.dropout, torch.dropout)


@dataclass
class Place:
    """Where the tokens of one attention lie, for images of one size."""

    name: str
    """Of the layer."""
    layout: Layout
    grid_size: tuple[int, int]
    queries_WN2: Tensor
    keys_WM2: Tensor
    operand: int
    axes: tuple[int, int]
    num_heads: int
    hidden_WHNM: Tensor | None = None
    """Of weights in memory, the keys that a mask of the model hides."""
    known: dict[Any, Any] = field(default_factory=dict)
    """What was derived from it, by device and type."""

    @property
    def extent(self) -> tuple[int, int]:
        return extent_of(self.keys_WM2, self.grid_size)

    @property
    def grid(self) -> Grid | None:
        """Of each window, if its tokens are some that are not patches, and then a grid row by row."""
        if "grid" not in self.known:
            is_one = torch.equal(self.queries_WN2.nan_to_num(-1.0), self.keys_WM2.nan_to_num(-1.0))
            self.known["grid"] = whole_grid(self.keys_WM2) if is_one else None
        found: Grid | None = self.known["grid"]
        return found

    def is_as(self, other: "Place") -> bool:
        return self.layout == other.layout and all(
            torch.equal(one.nan_to_num(-1.0), two.nan_to_num(-1.0)) if one.shape == two.shape else False
            for one, two in ((self.queries_WN2, other.queries_WN2), (self.keys_WM2, other.keys_WM2))
        )

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[Any, Tensor]]:
        """Places of queries and of keys there, and what is known of their pairs."""
        found: tuple[Tensor, Tensor, dict[Any, Tensor]] | None = self.known.get((device, dtype))
        if found is None:
            with torch.inference_mode(False):
                queries, keys = (each.to(dtype).to(device) for each in (self.queries_WN2, self.keys_WM2))
            found = queries, keys, {}
            if type(queries) is Tensor:  # others stand for one, as while a model is exported
                self.known[device, dtype] = found
        return found

    def hidden_on(self, device: torch.device) -> Tensor:
        """`hidden_WHNM` there."""
        assert self.hidden_WHNM is not None
        if device not in self.known:
            with torch.inference_mode(False):
                self.known[device] = self.hidden_WHNM.to(device)
        found: Tensor = self.known[device]
        return found


class Places:
    """What is known of a model's attentions, by the size of its images; and which size they have now."""

    def __init__(self) -> None:
        self.by_size: dict[Size, dict[str, dict[Key, Place]]] = {}
        """Size → module → call → place."""
        self.now: Size = ()

    def find(self, module_name: str, key: Key, num_queries: int, num_keys: int) -> Place:
        def fits(place: Place) -> bool:
            return (place.queries_WN2.shape[1], place.keys_WM2.shape[1]) == (num_queries, num_keys)

        known = [found[module_name][key] for found in self.by_size.values() if key in found.get(module_name, {})]
        if len(known) > 1 and torch._C._current_graph_task_id() != -1:  # run again in a backward pass
            known = [place for place in known if fits(place)]
            if known and not all(place.is_as(known[0]) for place in known):
                raise InputError(
                    f"{module_name} runs again in a backward pass, and images of several sizes gave as many tokens, so "
                    "it is not known which they are of; do without activation checkpointing, or keep to one size"
                )
            place = known[0] if known else None
        else:
            place = self.by_size.get(self.now, {}).get(module_name, {}).get(key)
        if place is None or not fits(place):
            raise InputError(
                f"{module_name} attends from {num_queries} to {num_keys} tokens, which are not those of images of "
                f"{'×'.join(map(str, self.now))} pixels: a local attention needs all patches of an image"
            )
        return place


_here = threading.local()


@contextmanager
def as_they_were() -> Iterator[None]:
    """While active, attentions of this thread are what they were before they became local."""
    before, _here.plain = getattr(_here, "plain", False), True
    try:
        yield
    finally:
        _here.plain = before


def are_as_they_were() -> bool:
    """Whether they are, in this thread."""
    return bool(getattr(_here, "plain", False))


class Own(nn.Module):
    """What one inducer learns in one attention."""

    def __init__(self, config: Inducer, frame: Frame, made_for: Mapping[Key, tuple[int, int]]) -> None:
        super().__init__()
        self.config, self.number, self.made_for = config, frame.number, dict(made_for)
        for name, start in config.parameters(frame).items():
            if isinstance(start, nn.Module):
                self.add_module(name, start)
            else:
                self.register_parameter(name, nn.Parameter(start))

    def extra_repr(self) -> str:
        return repr(self.config)


class Locality(nn.Module):
    """What makes one attention local: a child for each inducer, by name."""

    def __init__(self, owner: nn.Module, name: str, places: Places) -> None:
        super().__init__()
        # In a tuple it is not a child of this module.
        self._owner = (owner,)
        self._before: Callable[..., Any] | None = owner.__dict__.get("forward")
        self._name, self._places = name, places
        owner.__dict__["forward"] = self.run
        self._hook = None
        if isinstance(owner, nn.MultiheadAttention):  # an encoder layer around it calls it only if it has a hook
            self._hook = owner.register_forward_pre_hook(_leave)

    def close(self) -> None:
        """Give the owner its forward back."""
        (owner,) = self._owner
        if self._before is None:
            owner.__dict__.pop("forward", None)
        else:
            owner.__dict__["forward"] = self._before
        if self._hook is not None:
            self._hook.remove()
        delattr(owner, CHILD)

    @property
    def inducers(self) -> list[Own]:
        return [own for own in self.children() if isinstance(own, Own)]

    @never_compiled
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's forward."""
        (owner,) = self._owner
        forward = self._before or partial(type(owner).forward, owner)
        if are_as_they_were():
            return forward(*args, **kwargs)
        with _Changing(self) as changing:
            output = forward(*args, **kwargs)
        if missing := {key for own in self.inducers for key in own.made_for} - changing.changed:
            kind, number = min(missing)
            raise InputError(
                f"{self._name} computes its attention in another way than when it was made local (there is no {kind} "
                f"{number}): make it local after you have chosen how"
            )
        return output

    def place(self, key: Key, num_queries: int, num_keys: int) -> Place:
        return self._places.find(self._name, key, num_queries, num_keys)

    def of_call(self, key: Key) -> list[Own]:
        return [own for own in self.inducers if key in own.made_for]


def _leave(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A hook that does nothing."""


@dataclass
class LastProduct:
    """Queries and logits of the last product of queries and keys in an attention."""

    query: Tensor
    shape: torch.Size


class _Changing(TorchFunctionMode):
    """While an attention's forward runs: the calls that compute it."""

    def __init__(self, locality: Locality) -> None:
        super().__init__()
        self._locality = locality
        self._thread = threading.get_ident()
        self._calls: Counter[str] = Counter()
        self._last: list[LastProduct] = []
        self._dropped: list[torch.Size] = []
        self.changed: set[Key] = set()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FUSED:
            key = self._next(FUSED[func][0])
            if key is not None and (owns := self._locality.of_call(key)):
                return self._fused(func, key, owns, args, kwargs)
        elif func in PRODUCTS:
            key = self._next("product")
            if key is not None and (owns := self._locality.of_call(key)):
                factors = [one for one in flat((*args, *kwargs.values())) if isinstance(one, Tensor)]
                return self._explicit(func, key, owns, factors, args, kwargs)
            result = func(*args, **kwargs)
            if (query := queries_of(func, args)) is not None:
                self._last.append(LastProduct(query, result.shape))
            return result
        elif func in _DROPOUTS and args and isinstance(args[0], Tensor):
            self._dropped += [args[0].shape] if _drops(*args, **kwargs) else []
        return func(*args, **kwargs)

    def _next(self, kind: str) -> Key | None:
        if threading.get_ident() != self._thread:
            return None
        self._calls[kind] += 1
        return kind, self._calls[kind] - 1

    def _fused(self, func: Any, key: Key, owns: Sequence[Own], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.changed.add(key)
        attention = FUSED[func][1](*args, **kwargs)
        assert isinstance(attention, FusedAttention)
        assert attention.value is not None
        place = self._locality.place(key, attention.query.shape[-2], attention.key.shape[-2])
        output = attend(attention, place, key, owns, _dropout(func, args, kwargs))
        if attention.finish is None:
            return output
        needs_weights = attention.finish.needs_weights
        weights = attend(replaced_values(attention), place, key, owns, 0.0) if needs_weights else None
        return attention.finish(output, weights)

    def _explicit(
        self,
        func: Any,
        key: Key,
        owns: Sequence[Own],
        factors: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        self.changed.add(key)
        known = next(iter(self._locality._places.by_size.values()))[self._locality._name][key]
        given = factors[known.operand]
        if given.shape in self._dropped:
            raise InputError(
                f"{self._locality._name} drops some of its weights at random before they meet the values, so that they "
                "cannot be changed exactly; set the dropout of its attention to 0"
            )
        weights = given.movedim(known.axes, (-2, -1))
        place = self._locality.place(key, *weights.shape[-2:])
        query = query_for(self._last, given.shape, place.axes)
        new = changed_weights(weights, query, place, key, owns).movedim((-2, -1), place.axes)
        return func(*with_replaced(args, given, new), **kwargs)


def query_for(products: Sequence[LastProduct], shape: torch.Size, axes: tuple[int, int]) -> Tensor | None:
    """The queries [..., N, d] of weights of this shape: a factor of the last product that gave as many numbers."""
    for product in reversed(products):
        if product.shape == shape and axes in ((-2, -1), (len(shape) - 2, len(shape) - 1)):
            return product.query
    return None


def queries_of(func: Any, args: Sequence[Any]) -> Tensor | None:
    """The first factor [..., N, d] of a product with [..., d, M]; None for what is written in another way."""
    name = getattr(func, "__name__", str(func))
    if any(word in name for word in ("einsum", "tensordot")):
        return None
    tensors = [one for one in args if isinstance(one, Tensor)]
    if "add" in name:
        tensors = tensors[1:]
    return tensors[0] if len(tensors) == 2 and tensors[0].dim() > 2 else None


def _drops(input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **given: Any) -> bool:
    """Whether a call of dropout leaves anything out."""
    return p > 0 and bool(given.get("train", training))


def _dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """With what probability a fused attention leaves weights out."""
    described = FUSED[func][1]
    given = inspect.signature(described).bind(*args, **kwargs).arguments
    return float(given.get("dropout_p", 0.0)) if given.get("training", True) else 0.0


def replaced_values(attention: FusedAttention) -> FusedAttention:
    """With values that show the weights."""
    key = attention.key
    eye = torch.eye(key.shape[-2], device=key.device, dtype=key.dtype).expand(*key.shape[:-1], key.shape[-2])
    return FusedAttention(attention.query, key, attention.scale, attention.mask, attention.is_causal, eye)


def asked_of_place(place: Place, key: Key, own: Own, like: Tensor, queries: slice, **tokens: Any) -> Asked:
    dtype = torch.promote_types(like.dtype, torch.float32)
    queries_WN2, keys_WM2, cache = place.on(like.device, dtype)
    whole = queries == slice(0, queries_WN2.shape[1])
    asked = Asked(queries_WN2[:, queries], keys_WM2, place.extent, own.made_for[key], number=own.number, **tokens)
    if whole:  # of a tile it would have to be kept for each
        asked.cache = cache
    return asked


def changed_logits(
    owns: Sequence[Own], asked_of: Callable[[Own], Asked], added: Tensor | None
) -> tuple[Tensor | None, tuple[Own, Asked] | None]:
    """What is added to the logits, `added` included, and whoever stands for the softmax."""
    normaliser = None
    for own in owns:
        asked, config = asked_of(own), own.config
        if config.normalises:
            normaliser = own, asked
        are_patches = asked.are_patches
        if (bias := config.bias(own, asked)) is not None:
            bias = torch.where(are_patches[:, None], bias, 0.0)
            added = bias if added is None else added + bias
        if (shown := config.shown(own, asked)) is not None:
            shown = shown | ~are_patches[:, None]
            dtype = asked.keys_WM2.dtype
            hiding = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(~shown, -math.inf)
            added = hiding if added is None else added + hiding
    return added, normaliser


def attend(attention: FusedAttention, place: Place, key: Key, owns: Sequence[Own], dropout_p: float) -> Tensor:
    """What a fused attention gives when its logits are changed: by kernels that need no bias in memory where there are
    some for these, or else with some queries at a time where there are many."""
    assert attention.value is not None
    arrange = place.layout.arrange
    query, keys, values = (arrange(tokens) for tokens in (attention.query, attention.key, attention.value))
    batch, windows, _, count, _ = query.shape
    if attention.mask is None and not attention.is_causal and dropout_p == 0:
        output = _attend_on_grid(query, keys, values, attention.scale, place, key, owns)
        if output is not None:
            return place.layout.restore(output, attention.query.shape[:-2])
    mask = None
    if attention.mask is not None:
        mask = attention.mask.expand(*attention.query.shape[:-1], keys.shape[-2])
        mask = arrange(added_mask(mask, attention.query))
    if attention.is_causal:
        before = torch.ones(count, keys.shape[-2], dtype=torch.bool, device=query.device).tril()
        hiding = added_mask(before, query).expand(1, 1, 1, *before.shape)
        mask = hiding if mask is None else mask + hiding

    def of_tile(query_BWHTd: Tensor, mask: Tensor | None, queries: slice) -> Tensor:
        def asked_of(own: Own) -> Asked:
            tokens = {"query_BWHTd": query_BWHTd, "key_BWHMd": keys, "scale": attention.scale}
            return asked_of_place(place, key, own, query_BWHTd, queries, **tokens)

        with in_full_precision(query_BWHTd.device):
            added, normaliser = changed_logits(owns, asked_of, mask)
            if normaliser is not None:
                own, asked = normaliser
                exact = torch.promote_types(query.dtype, torch.float32)
                logits = attention.scale * (query_BWHTd.to(exact) @ keys.to(exact).transpose(-2, -1))
                if added is not None:  # what models add to hide a key is not always infinite
                    logits = logits + added.masked_fill(added < HIDING, -math.inf)
                weights = F.dropout(own.config.weights(own, asked, logits), dropout_p)
                return (weights @ values.to(exact)).to(query.dtype)
        assert added is not None
        added = added.to(query.dtype)[(None,) * (5 - added.dim())]
        added = added.squeeze(1) if windows == 1 else added.expand(batch, windows, *added.shape[2:]).flatten(0, 1)
        asking, asked_keys, mixed = (each.flatten(0, 1) for each in (query_BWHTd, keys, values))
        output = attend_with_bias(asking, asked_keys, mixed, added, None, attention.scale, dropout_p)
        by_window: Tensor = output.unflatten(0, (batch, windows))
        return by_window

    step = _queries_at_once(query, keys.shape[-2], owns, mask)
    outputs = []
    for start in range(0, count, step):
        queries = slice(start, min(start + step, count))
        tile = query[..., queries, :], None if mask is None else mask[..., queries, :]
        if step < count and torch.is_grad_enabled():
            run = partial(checkpoint, of_tile, use_reentrant=False, preserve_rng_state=dropout_p > 0)
            outputs.append(run(*tile, queries))
        else:
            outputs.append(of_tile(*tile, queries))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)
    return place.layout.restore(output, attention.query.shape[:-2])


def _attend_on_grid(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, place: Place, key: Key, owns: Sequence[Own]
) -> Tensor | None:
    """[B, W, H, N, d] by fused kernels; None: there are none for what these inducers add, or here."""
    grid = place.grid
    if grid is None or not has_kernels(query[:, 0], grid) or is_transformed():  # all windows are alike
        return None
    if query.shape != values.shape or scale <= 0:
        return None
    tokens, radial = [each.flatten(0, 1) for each in (query, keys, values)], Radial()
    with in_full_precision(query.device):
        for own in owns:
            options = {"query_BWHTd": query, "key_BWHMd": keys, "scale": scale}
            other = own.config.radial(own, asked_of_place(place, key, own, query, slice(0, grid.num_tokens), **options))
            both = None if other is None else radial & other
            if both is None:
                return None
            radial = both
        precision, strength, reach = radial.expanded(tokens[0].shape[:3], tokens[0].device)
    patches = slice(grid.num_prefix, None)
    output: Tensor = attend_on_grid(
        *(tokens[0], tokens[1], tokens[2], precision[:, :, patches], strength[:, :, patches]),
        grid,
        scale=scale,
        kernel=radial.shape,
        largest_half_square=radial.largest_half_square,
        reach_BH=reach,
    )
    by_window: Tensor = output.unflatten(0, query.shape[:2])
    return by_window


def _queries_at_once(query_BWHNd: Tensor, num_keys: int, owns: Sequence[Own], mask: Tensor | None) -> int:
    """So many that no bias takes more memory than a tile may."""
    batch, windows, heads, count, _ = query_BWHNd.shape
    if is_transformed():
        return count
    dense = mask is not None or windows > 1 or any(own.config.needs_queries or own.config.normalises for own in owns)
    bytes_per_query = (batch if dense else 1) * windows * heads * num_keys * max(4, query_BWHNd.dtype.itemsize)
    return max(1, min(count, TILE_BYTES // max(1, bytes_per_query)))


def changed_weights(weights: Tensor, query: Tensor | None, place: Place, key: Key, owns: Sequence[Own]) -> Tensor:
    """Weights that a model holds in memory, after a softmax, when its logits are changed: what it hid stays hidden."""
    exact = torch.promote_types(weights.dtype, torch.float32)
    with in_full_precision(weights.device):
        weights_BWHNM = place.layout.arrange(weights).to(exact)
        tiny = torch.finfo(exact).tiny
        # Logarithms up to a constant in each row are the logits; of a weight of 0 there is none, nor a gradient.
        logits = weights_BWHNM.clamp(min=tiny).log().masked_fill(weights_BWHNM < tiny, -math.inf)
        if place.hidden_WHNM is not None:
            logits = logits.masked_fill(place.hidden_on(logits.device), -math.inf)
        query_BWHNd = None if query is None else place.layout.arrange(query)

        def asked_of(own: Own) -> Asked:
            return asked_of_place(place, key, own, weights, slice(0, weights.shape[-2]), query_BWHTd=query_BWHNd)

        added, normaliser = changed_logits(owns, asked_of, None)
        logits = logits if added is None else logits + added
        if normaliser is None:
            new_BWHNM = softmax_or_zeros(logits)
        else:
            own, asked = normaliser
            new_BWHNM = own.config.weights(own, asked, logits)
        return place.layout.restore(new_BWHNM.to(weights.dtype), weights.shape[:-2])
