"""Seeing attention in an unmodified model: nothing is patched, ported or edited.

While a forward runs, a `TorchFunctionMode` sees every `scaled_dot_product_attention` and every `softmax` call, and
module hooks say which layer is calling. The model computes what it always computes; the tap looks at the same inputs.

Shape suffixes: B images, H heads, N tokens, d head size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}


@dataclass(frozen=True)
class Attention:
    """One attention computation as the tap saw it."""

    layer_name: str
    """Dotted name of the innermost module that was running."""
    probabilities: Callable[[], Tensor]
    """The attention after the softmax, float64 [B, H, N, N]; computed on demand, while the forward is waiting."""


class AttentionTap(TorchFunctionMode):
    """Calls `on_attention` for each attention computed inside `model` while the tap is active (a context manager)."""

    def __init__(self, model: nn.Module, on_attention: Callable[[Attention], None]) -> None:
        super().__init__()
        self._model = model
        self._on_attention = on_attention
        self._running: list[str] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            handle = module.register_forward_pre_hook(self._entering(name))
            self._hooks.callback(handle.remove)
            # always_call: a layer that raises must not stay on the list of running layers.
            handle = module.register_forward_hook(self._leaving, always_call=True)
            self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._hooks.close()
        self._running.clear()

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            self._running.append(name)

        return hook

    def _leaving(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._seen(lambda: _attention_of_sdpa(*args, **kwargs))
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func in _SOFTMAX and _is_square_attention(output):
            self._seen(lambda: output.to(torch.float64))
        return output

    def _seen(self, probabilities: Callable[[], Tensor]) -> None:
        if self._running:  # else the call is not the model's: the forward of something around it
            self._on_attention(Attention(self._running[-1], probabilities))


def _is_square_attention(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dim() == 4 and output.shape[-1] == output.shape[-2]


def _attention_of_sdpa(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The attention that `scaled_dot_product_attention` uses inside, from its documented definition, in float64."""
    query, key = query_BHNd.to(torch.float64), key_BHNd.to(torch.float64)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    logits = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(-1)
