"""Attention maps from a model's own unfused code, in float64, one attention module at a time.

Nothing is known beforehand of where a model attends: a first forward tells which modules call a softmax or a fused
attention, a second what these modules are given. Each is then run again in float64 on that, so that rounding in one
layer does not reach the next.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from vit_references.maps import Recorded

from foreign_references.case import Case

_SOFTMAXES = {torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax}


class Listener(TorchFunctionMode):
    """Tells of all weights that a softmax gives, be it alone or within one of torch's own attentions."""

    def __init__(self, tell: Callable[[Tensor], None], in_float64: bool = False) -> None:
        super().__init__()
        self._tell, self._in_float64 = tell, in_float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._in_float64 and func is torch.Tensor.float:
            return args[0].double()  # what a model takes care to compute in float32
        if func in _SOFTMAXES:
            if self._in_float64:
                kwargs.pop("dtype", None)
            weights = func(*args, **kwargs)
            self._tell(weights)
            return weights
        if func is F.scaled_dot_product_attention and not args[0].is_nested:
            weights, values = unfused(*args, **kwargs)
            self._tell(weights)
            return weights @ values
        if func is F.multi_head_attention_forward:
            kwargs |= {"need_weights": True, "average_attn_weights": False}
            output, weights = func(*args, **kwargs)
            self._tell(weights)
            return output, weights.mean(1)
        return func(*args, **kwargs)


def unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """(weights, values) by the definition in torch's documentation."""
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], dim=-3) for part in (key, value))
    logits = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return logits.softmax(-1), value


def attending(model: nn.Module, forward: Callable[[], Any]) -> dict[str, tuple[int, ...]]:
    """The modules that compute attention, in the order in which they do, each with the shape of its first weights.

    A softmax that is a module of its own, or stands in a sequence with dropout, belongs to the module around it.
    """
    names = {module: name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    found: dict[str, tuple[int, ...]] = {}

    def tell(weights: Tensor) -> None:
        inner = [module for module in running if module in names and not isinstance(module, nn.Softmax | nn.Sequential)]
        found.setdefault(names[inner[-1]] if inner else "", tuple(weights.shape))

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(lambda module, _inputs: running.append(module)).remove)
        stack.callback(register_module_forward_hook(lambda _module, _inputs, _output: _drop_last(running)).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(Listener(tell))
        forward()
    return found


def _drop_last(running: list[nn.Module]) -> None:
    running.pop()


def record(model: nn.Module, forward: Callable[[], Any], names: Sequence[str], case: Case) -> list[Recorded]:
    """The attention of the modules with these names, in the order in which they run."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    block_inputs: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in names:

            def keep(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                calls.append((name, in_float64(args), in_float64(kwargs)))

            def keep_block(_module: nn.Module, args: Any, kwargs: Any, block: str = _block_of(model, name)) -> None:
                block_inputs[block] = next(
                    (part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), None
                )

            module, block = model.get_submodule(name), model.get_submodule(_block_of(model, name))
            stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            stack.callback(block.register_forward_pre_hook(keep_block, with_kwargs=True).remove)
        stack.enter_context(torch.no_grad())
        forward()
    maps: dict[str, list[Tensor]] = {}
    for name, args, kwargs in calls:
        of_call = maps_of(model.get_submodule(name), case, *args, **kwargs)
        maps.setdefault(name, []).extend(of_call if case.used is None else [of_call[case.used]])
    found = []
    for name, of_module in maps.items():
        module, block = model.get_submodule(name), _block_of(model, name)
        for position, attention in enumerate(unpacked(of_module, case)):
            numbered = name if position == 0 else f"{name}#{position + 1}"
            found.append(
                Recorded(model, numbered, module, model.get_submodule(block), block_inputs.get(block), attention)
            )
    return found


def _block_of(model: nn.Module, name: str) -> str:
    """The module around it that is run, which lists of modules are not."""
    block = name.rpartition(".")[0]
    while isinstance(model.get_submodule(block), nn.ModuleList | nn.ModuleDict):
        block = block.rpartition(".")[0]
    return block


def unpacked(maps: list[Tensor], case: Case) -> list[Tensor]:
    """With an axis of images where these came one behind the other."""
    number = case.num_images
    if case.packing == "apart":
        parts = len(maps) // number  # of each image
        assert parts * number == len(maps) > 0, f"{len(maps)} maps are not those of {number} images"
        return [torch.cat(maps[part::parts]) for part in range(parts)]
    if case.packing == "together":
        blocks = [attention.unflatten(-1, (number, -1)).unflatten(-3, (number, -1)) for attention in maps]
        images = torch.arange(number)
        own = [block[..., images, :, images, :].flatten(0, 1) for block in blocks]
        assert all(torch.isclose(block.sum(), part.sum()) for block, part in zip(blocks, own, strict=True))
        return own
    return maps


def maps_of(module: nn.Module, case: Case, *args: Any, **kwargs: Any) -> list[Tensor]:
    """What a module's softmaxes give, or what its part `case.after` makes of that."""
    twin = in_float64_and_unfused(module, case.is_eager)
    maps: list[Tensor] = []
    if case.after:
        twin.get_submodule(case.after).register_forward_hook(lambda _module, _inputs, output: maps.append(output))
    with torch.no_grad(), Listener(maps.append if not case.after else lambda _weights: None, in_float64=True):
        twin(*args, **kwargs)
    return [attention.detach().clone() for attention in maps]


def in_float64_and_unfused(module: nn.Module, is_eager: bool) -> nn.Module:
    twin = copy.deepcopy(module).double()
    for part in twin.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):  # neither a parameter nor a buffer
                setattr(part, name, in_float64(value))
            elif is_eager and hasattr(value, "_attn_implementation"):  # a configuration of transformers
                value._attn_implementation = "eager"
    return twin


def in_float64(value: Any) -> Any:
    """A copy, because a model may go on to write into what it was given."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value.clone()
    if isinstance(value, dict):
        return {name: in_float64(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [in_float64(item) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
