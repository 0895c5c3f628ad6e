"""Seeing attention in an unmodified model: nothing is ported or edited, and the model computes what it always computes,
unless whoever looks says what it is to compute instead.

While a forward runs, a `TorchFunctionMode` sees `scaled_dot_product_attention`, LocAt's attention with a bias, and the
products in which explicit attention weights meet the values, and hooks say which layer is calling.
`nn.MultiheadAttention` is handled separately: it takes a fast path that a function mode would both switch off (changing
the last bits of the output) and not see.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from nearsight.lens.attention import (
    Attention,
    ExplicitAttention,
    of_local,
    of_multihead,
    of_multihead_function,
    of_sdpa,
)
from nearsight.locat.attend import attend

# Programs that torch.export made call the operators by themselves.
FUSED: dict[Any, tuple[str, Callable[..., Attention]]] = {
    F.scaled_dot_product_attention: ("sdpa", of_sdpa),
    torch.ops.aten.scaled_dot_product_attention.default: ("sdpa", of_sdpa),
    attend: ("sdpa", of_local),
    F.multi_head_attention_forward: ("multihead", of_multihead_function),
}
PRODUCTS = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.linalg.matmul, torch.bmm, Tensor.bmm,
    torch.mm, Tensor.mm, torch.einsum, torch.tensordot, torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm,
    torch.ops.aten.matmul.default, torch.ops.aten.bmm.default, torch.ops.aten.mm.default,
    torch.ops.aten.einsum.default,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call in a forward that is, or may be, attention. The same model makes the same calls for every batch."""

    layer_name: str
    """Dotted name of the innermost module that was running."""
    kind: str
    """sdpa, multihead or product."""
    number: int
    """Which call of its kind in that layer, from 0."""


_here = threading.local()


@contextmanager
def unseen() -> Iterator[None]:
    """While active, taps of this thread that were made before see and change nothing: around a forward that only finds
    out what is where."""
    before = current_depth()
    _here.depth = before + 1
    try:
        yield
    finally:
        _here.depth = before


def current_depth() -> int:
    """How many of these are active."""
    depth: int = getattr(_here, "depth", 0)
    return depth


Change = Callable[[Callable[..., Any]], Any]
"""What an attention is to give instead. It is called with how the model computes it: of fused attention a function
without arguments; of a product one of the position of a factor and what takes its place."""
OnAttention = Callable[[Call, Sequence[Callable[[], Attention]]], Change | None]

OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules whose attention a function mode does not see, and which the tap handles separately."""


class AttentionTap(TorchFunctionMode):
    """Calls `on_attention(call, candidates)` for each possible attention in `model` while active (a context manager).

    Candidates are functions, so that nothing is computed for calls that are not used: one for fused attention; one for
    each factor of a product, of which at most one holds attention weights.

    If it is known which modules make such calls, giving these as `calling` saves the time it takes to follow all.
    Whoever is called may return a `Change`; for that the tap must be made with `changes`.
    """

    def __init__(
        self,
        model: nn.Module,
        on_attention: OnAttention,
        calling: Mapping[str, nn.Module] | None = None,
        *,
        changes: bool = False,
    ) -> None:
        super().__init__()
        self._follows_all = calling is None
        modules = model.named_modules() if calling is None else calling.items()
        self._names = {module: name for name, module in modules}
        self._on_attention = on_attention
        self._changes = changes
        self._thread = threading.get_ident()
        """Only this thread is watched: others may run the same model at the same time."""
        self._depth = current_depth()
        self._running: list[str] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._attended: set[str] = set()
        self._undo = ExitStack()
        self.inside_fused = False
        """Whether an attention that was already reported as a whole is being computed."""
        self.product: tuple[Call, Sequence[Tensor]] | None = None
        """The product that is being computed, with its factors."""

    @property
    def layer_name(self) -> str | None:
        """The innermost module that is running; None outside the model."""
        return self._running[-1] if self._running else None

    @property
    def is_here(self) -> bool:
        """Whether what runs now is what it watches."""
        return threading.get_ident() == self._thread and current_depth() == self._depth

    def begin(self) -> None:
        """A new forward: calls are counted from 0."""
        self._calls.clear()

    def __enter__(self) -> Self:
        # always_call: a layer that raises must not stay on the list of running layers.
        if self._follows_all:
            # Global hooks, since nn.TransformerEncoderLayer changes its way of computing if any of its modules has one.
            self._undo.callback(register_module_forward_pre_hook(self._entering).remove)
            self._undo.callback(register_module_forward_hook(self._leaving, always_call=True).remove)
        for module in self._names:
            if isinstance(module, nn.MultiheadAttention):
                self._watch(module, nn.MultiheadAttention, self._multihead)
            elif isinstance(module, nn.TransformerEncoderLayer):
                if isinstance(getattr(module, "self_attn", None), nn.MultiheadAttention):
                    self._watch(module, nn.TransformerEncoderLayer, self._encoder_layer)
                else:  # its attention was replaced by another kind
                    self._wrap(module, self._own_forward)
            elif not self._follows_all:
                # What changes an attention comes first, so that whoever only looks sees what was before the change.
                entering = module.register_forward_pre_hook(self._entering, prepend=self._changes)
                self._undo.callback(entering.remove)
                self._undo.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()
        if self._running:  # an interrupt may have kept a hook from running
            self._running.clear()
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _entering(self, module: nn.Module, _inputs: Any) -> None:
        if module in self._names and self.is_here:
            if not self._running:
                # Seeing a function call takes longer than many functions do: look only while there is something to see.
                super().__enter__()  # type: ignore[no-untyped-call]
            self._running.append(self._names[module])

    def _leaving(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if module in self._names and self._running and self.is_here:
            self._running.pop()
            if not self._running:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running and self.is_here:
            if func in FUSED:
                kind, described = FUSED[func]
                _, change = self._tell(kind, [partial(described, *args, **kwargs)])
                with self._fused():
                    return func(*args, **kwargs) if change is None else change(partial(func, *args, **kwargs))
            elif func in PRODUCTS:
                factors = [factor for factor in flat((*args, *kwargs.values())) if isinstance(factor, Tensor)]
                call, change = self._tell("product", [partial(ExplicitAttention, f, i) for i, f in enumerate(factors)])
                try:
                    self.product = call, factors
                    if change is not None:
                        return change(
                            lambda operand, factor: func(*with_replaced(args, factors[operand], factor), **kwargs)
                        )
                    return func(*args, **kwargs)
                finally:
                    self.product = None
        return func(*args, **kwargs)

    def _tell(self, kind: str, candidates: Sequence[Callable[[], Attention]]) -> tuple[Call, Change | None]:
        name = self._running[-1]
        call = Call(name, kind, self._calls[name, kind])
        self._calls[name, kind] += 1
        # Whoever looks computes, too: other taps are not to see that, nor is a default device of the caller's to count.
        with torch._C.DisableTorchFunction():
            return call, self._on_attention(call, candidates)

    @contextmanager
    def _fused(self) -> Iterator[None]:
        self.inside_fused = True
        try:
            yield
        finally:
            self.inside_fused = False

    # Modules whose attention a function mode does not see

    def _watch(self, module: nn.Module, kind: type[nn.Module], around: Callable[..., Any]) -> None:
        """Let the forward of this kind go through `around`, whether the module has it from torch or overrides it."""
        own, shadow = type(module), module.__dict__.get("forward")
        is_a_taps = isinstance(shadow, partial) and isinstance(getattr(shadow.func, "__self__", None), AttentionTap)
        if own.forward is kind.forward and (shadow is None or is_a_taps):
            self._wrap(module, around)
            return
        if own.forward is not kind.forward:
            # Its forward takes what it likes, and may call torch's with other arguments than its own. So between its
            # class and torch's comes one that goes through `around`.
            def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                of_torch = super(between, module).forward  # type: ignore[misc]
                return self._where_it_watches(around, module, of_torch, *args, **kwargs)

            between: type[nn.Module] = type(kind.__name__, (kind,), {"forward": forward})
            module.__class__ = type(own.__name__, (own, between), {})
            self._undo.callback(setattr, module, "__class__", own)
        self._wrap(module, self._own_forward)

    def _where_it_watches(
        self, around: Callable[..., Any], module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self.is_here:
            return forward(*args, **kwargs)
        return around(module, forward, *args, **kwargs)

    def _own_forward(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward that is not torch's: what it calls says what it does, as in any module."""
        self._attended.add(self._names[module])
        self._entering(module, args)
        try:
            with torch._C._EnableTorchFunction():  # an encoder layer around it may have switched it off
                return forward(*args, **kwargs)
        finally:
            self._leaving(module, args, None)

    def _wrap(self, module: nn.Module, around: Callable[..., Any]) -> None:
        """Let the module's forward go through `around` until the tap closes."""
        shadowed, forward = module.__dict__.get("forward"), module.forward
        module.__dict__["forward"] = partial(self._where_it_watches, around, module, forward)

        def restore() -> None:
            if shadowed is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = shadowed

        self._undo.callback(restore)

    def _multihead(self, module: nn.MultiheadAttention, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._attended.add(self._names[module])
        with torch._C.DisableTorchFunction():
            change = self._tell_multihead(self._names[module], partial(of_multihead, module, **given))
            with self._fused():
                compute = partial(forward, *args, **kwargs)
                return compute() if change is None else change(compute)

    def _encoder_layer(
        self, module: nn.TransformerEncoderLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Its fast path computes everything in one operation and never calls its attention module."""
        if self._changes:
            return _part_by_part(module, *args, **kwargs)
        name = self._names[module.self_attn]
        self._attended.discard(name)
        with torch._C.DisableTorchFunction():
            output = forward(*args, **kwargs)
            if name not in self._attended:
                names = ("src", "src_mask", "src_key_padding_mask", "is_causal")
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                tokens = module.norm1(given["src"]) if module.norm_first else given["src"]
                masks: dict[str, Any] = {
                    "attn_mask": given.get("src_mask"),
                    "key_padding_mask": given.get("src_key_padding_mask"),
                }
                self._tell_multihead(name, partial(of_multihead, module.self_attn, tokens, tokens, **masks))
        return output

    def _tell_multihead(self, name: str, attention: Callable[[], Attention]) -> Change | None:
        self._running.append(name)
        try:
            return self._tell("multihead", [attention])[1]
        finally:
            self._running.pop()


def flat(arguments: Sequence[Any]) -> list[Any]:
    return [leaf for item in arguments for leaf in (flat(item) if isinstance(item, list | tuple) else [item])]


def with_replaced(arguments: Sequence[Any], old: Tensor, new: Tensor) -> list[Any]:
    """The arguments with one of their tensors replaced, in lists of them, too."""
    return [
        with_replaced(item, old, new) if isinstance(item, list | tuple) else new if item is old else item
        for item in arguments
    ]


def _part_by_part(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """An encoder layer as its documentation defines it, by its own parts, so that its attention is called."""
    own: Any = layer  # whose parts have no types

    def attended(tokens: Tensor) -> Tensor:
        given: Tensor = own._sa_block(tokens, src_mask, src_key_padding_mask, is_causal=is_causal)
        return given

    if layer.norm_first:
        src = src + attended(layer.norm1(src))
        return src + own._ff_block(layer.norm2(src))  # type: ignore[no-any-return]
    src = layer.norm1(src + attended(src))
    src = layer.norm2(src + own._ff_block(src))
    return src
