"""Attention maps from a model's own unfused code, in float64, one attention module at a time.

Each module is run again on the input it had in the model, so that rounding in one layer does not reach the next.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recorded:
    """One attention as a model computed it."""

    model: nn.Module
    name: str
    """Dotted name of its module; "#2" marks a second attention in the same module."""
    module: nn.Module
    block: nn.Module
    """The module around it."""
    block_input: Tensor
    """What the block was given."""
    attention: Tensor
    """The weights, in the model's own arrangement of axes: [..., queries, keys]."""


def record(model: nn.Module, images: Tensor, layers: str, maps_per_head: int = 1) -> list[Recorded]:
    """The attention of every module whose whole name matches the pattern, in the order in which they ran."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    block_inputs: dict[str, Tensor] = {}
    names = [name for name, _ in model.named_modules() if re.fullmatch(layers, name)]
    with ExitStack() as hooks:
        for name in names:

            def keep(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                calls.append((name, _in_float64(args), _in_float64(kwargs)))

            def keep_block(_module: nn.Module, args: Any, block: str = _parent(name)) -> None:
                block_inputs[block] = args[0] if isinstance(args[0], Tensor) else args[0][0]

            module, block = model.get_submodule(name), model.get_submodule(_parent(name))
            hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            hooks.callback(block.register_forward_pre_hook(keep_block).remove)
        with torch.no_grad():
            model(images)
    found = []
    for name, args, kwargs in calls:
        module, block = model.get_submodule(name), _parent(name)
        maps = unfused_maps(module, *args, **kwargs)
        if maps_per_head > 1:
            maps = [part for both in maps for part in both.unflatten(1, (-1, maps_per_head)).unbind(2)]
        for position, attention in enumerate(maps):
            numbered = name if position == 0 else f"{name}#{position + 1}"
            block_input = block_inputs.get(block, args[0] if args else images)
            found.append(Recorded(model, numbered, module, model.get_submodule(block), block_input, attention))
    return found


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def unfused_maps(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """What a module's softmaxes gave or, where it has dropout for attention, what went into that."""
    twin = copy.deepcopy(module).double()
    softmaxes: list[Tensor] = []
    dropped: list[Tensor] = []
    for part in twin.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
        for name, value in vars(part).items():  # tensors that are neither parameters nor buffers
            if isinstance(value, Tensor):
                setattr(part, name, _in_float64(value))
    if isinstance(drop := getattr(twin, "attn_drop", None), nn.Module):
        drop.register_forward_pre_hook(lambda _module, inputs: dropped.append(inputs[0]))
    with torch.no_grad(), _listening(softmaxes.append):
        twin(*args, **kwargs)
    return [attention.clone() for attention in dropped or softmaxes]


@contextmanager
def _listening(tell: Callable[[Tensor], None]) -> Iterator[None]:
    plain = torch.Tensor.softmax

    def softmax(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weights = plain(logits, *args, **kwargs)
        tell(weights)
        return weights

    with mock.patch.object(torch.Tensor, "softmax", softmax), mock.patch.object(torch, "softmax", softmax):
        yield


def _in_float64(value: Any) -> Any:
    """A copy, because a model may go on to write into what it was given."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value.clone()
    if isinstance(value, dict):
        return {name: _in_float64(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_in_float64(item) for item in value)
    return value
