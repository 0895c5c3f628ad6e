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

from nearsight.metrics.precision import to_float64

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}


@dataclass(frozen=True)
class Attention:
    """One attention computation as the tap saw it."""

    layer_name: str
    """Dotted name of the innermost module that was running."""
    num_tokens: int
    """Queries, and keys."""
    num_maps: int
    """Images times heads."""
    log_weights: Callable[[int, int], Tensor]
    """The queries from one position to another → logarithms of their attention, up to a constant per query: float64
    [B, H, queries, N]. Computed on demand, while the forward is waiting."""


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
            if self._running:  # else the call is not the model's, but of something around it
                self._on_attention(_attention_of_sdpa(self._running[-1], *args, **kwargs))
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func in _SOFTMAX and self._running and _is_square_attention(output):
            self._on_attention(_attention_of_softmax(self._running[-1], output))
        return output


def _is_square_attention(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dim() == 4 and output.shape[-1] == output.shape[-2]


def _attention_of_softmax(layer_name: str, attn_BHNN: Tensor) -> Attention:
    def log_weights(start: int, stop: int) -> Tensor:
        return to_float64(attn_BHNN[:, :, start:stop]).log()

    batch, heads, num_tokens, _ = attn_BHNN.shape
    return Attention(layer_name, num_tokens, batch * heads, log_weights)


def _attention_of_sdpa(
    layer_name: str,
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    """The logits that `scaled_dot_product_attention` uses inside, from its documented definition."""
    batch, heads, num_tokens, width = query_BHNd.shape
    factor = 1 / math.sqrt(width) if scale is None else scale

    def log_weights(start: int, stop: int) -> Tensor:
        query, key = to_float64(query_BHNd[:, :, start:stop]), to_float64(key_BHNd)
        if enable_gqa:
            key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
        logits = query @ key.transpose(-2, -1) * factor
        if is_causal:
            position = torch.arange(num_tokens, device=logits.device)
            logits = logits.masked_fill(position > position[start:stop, None], -math.inf)
        if attn_mask is not None:
            mask = attn_mask[..., start:stop, :] if attn_mask.shape[-2] > 1 else attn_mask
            mask = mask.to(logits.device)
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        return logits

    return Attention(layer_name, num_tokens, batch * heads, log_weights)
