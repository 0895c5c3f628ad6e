"""One model's code, K models' weights: the forward of a whole stack.

Weights have a leading axis K and the images of all cells are one batch (`stackedweight`), so no model needs a second
version of its code. A model that uses its weights in a way not known there, or that reorders its batch, runs by
`torch.vmap`: slower, and for any model. One with running statistics (batch norms) runs cell after cell: its batches
must not be mixed, and the grouped convolutions that vmap makes of several cells' are slower than these.

Shape suffixes: K cells, B samples, C channels or classes, H rows, W columns.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from nearsight.train.fused.pending import fusing
from nearsight.train.stackedweight import UnstackableError, stack_up

Weights = dict[str, Tensor]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of products, by the name of a run's precision."""

_by_vmap: WeakSet[nn.Module] = WeakSet()
"""Models that do not run as one batch."""
_cell_after_cell: WeakSet[nn.Module] = WeakSet()
"""Models with running statistics."""


def stack_weights(states: Sequence[Mapping[str, Tensor]], device: torch.device) -> Weights:
    """The tensors of K models of one shape, each with a leading axis K."""
    return {name: torch.stack([state[name].detach() for state in states]).to(device) for name in states[0]}


def running_statistics(model: nn.Module) -> Weights:
    """What of a model is not learned and yet changes with every training step: running means and the like, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None
        for name, buffer in module.named_buffers(recurse=False)
    }


def weightless(model: nn.Module) -> nn.Module:
    """The model's code and shapes without memory for what training changes."""
    skeleton, changing = copy.deepcopy(model), running_statistics(model)
    for name, buffer in list(skeleton.named_buffers()):
        if name not in changing:
            path, _, own = name.rpartition(".")
            delattr(skeleton.get_submodule(path), own)
            setattr(skeleton.get_submodule(path), own, buffer)  # a constant of the code: it goes nowhere by itself
    return skeleton.to("meta")


def bring_constants(skeleton: nn.Module, device: torch.device) -> None:
    """Bring what a skeleton kept of its model to where the weights are."""
    for module in skeleton.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, value.to(device))


def runs_as_one_batch(model: nn.Module) -> bool:
    """Whether this model may run as one batch, as far as is known."""
    return model not in _by_vmap and model not in _cell_after_cell


def stacked_forward(
    model: nn.Module, weights_K: Weights, images_KBCHW: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Outputs [K, B, …] of K models, each with its own weights on its own images.

    `dtype`: of products; if it is reduced, blocks are done by the fused kernels where there are any. With torch's
    deterministic algorithms switched on, a GPU does one cell after the other, so that each gives the bits that it gives
    alone.
    """
    if dtype == torch.float32:
        return _forward(model, weights_K, images_KBCHW)
    with torch.autocast(images_KBCHW.device.type, dtype), fusing(dtype):
        return _forward(model, weights_K, images_KBCHW).float()


def _forward(model: nn.Module, weights_K: Weights, images_KBCHW: Tensor) -> Tensor:
    if model in _cell_after_cell:
        return _one_after_the_other(model, weights_K, images_KBCHW)
    if images_KBCHW.is_cuda and torch.are_deterministic_algorithms_enabled():
        # A library chooses its kernels by the number of cells too, and each rounds in its own way.
        cells = [{name: weight[k : k + 1] for name, weight in weights_K.items()} for k in range(len(images_KBCHW))]
        alone = zip(cells, images_KBCHW.split(1), strict=True)
        return torch.cat([_all_at_once(model, weights, images) for weights, images in alone])
    return _all_at_once(model, weights_K, images_KBCHW)


def _one_after_the_other(model: nn.Module, weights_K: Weights, images_KBCHW: Tensor) -> Tensor:
    """Every cell by itself. Its statistics are views of those of all, and so change with them."""
    outputs = []
    # Taken apart by one operation, whose gradient is put together by one, too.
    parts = {name: weight.unbind() for name, weight in weights_K.items()}
    learned = {name for name, _ in model.named_parameters()}
    for k, images_BCHW in enumerate(images_KBCHW):
        weights = {name: _laid_out(part[k]) if name in learned else part[k] for name, part in parts.items()}
        outputs.append(functional_call(model, weights, (images_BCHW,)))
    return torch.stack(outputs)


def _laid_out(weight: Tensor) -> Tensor:
    """Convolutions with channels last, which a GPU is faster at; their inputs follow them.

    A weight lies where those before it end, also at an address that is no multiple of 16 bytes, and some of the
    libraries' kernels read that many at once ("misaligned address"); such a one is copied to where they may.
    """
    if not weight.is_cuda:
        return weight
    if weight.dim() == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _all_at_once(model: nn.Module, weights_K: Weights, images_KBCHW: Tensor) -> Tensor:
    if runs_as_one_batch(model):
        try:
            return _as_one_batch(model, weights_K, images_KBCHW)
        except UnstackableError:
            _by_vmap.add(model)
    if len(images_KBCHW) == 1:  # as the model itself does it, without vmap's detours
        return _one_after_the_other(model, weights_K, images_KBCHW)
    return vmapped_forward(model, weights_K, images_KBCHW)


def _as_one_batch(model: nn.Module, weights_K: Weights, images_KBCHW: Tensor) -> Tensor:
    num_cells, num_images = images_KBCHW.shape[:2]
    weights = {name: stack_up(weight) for name, weight in weights_K.items()}
    images = images_KBCHW.reshape(num_cells * num_images, *images_KBCHW.shape[2:])
    output: Tensor = functional_call(model, weights, (images,))
    by_cell: Tensor = output.unflatten(0, (num_cells, num_images))
    return by_cell


@torch.no_grad()
def verify_stacking(skeleton: nn.Module, models: Sequence[nn.Module], image_size: tuple[int, int]) -> None:
    """Choose how a model runs: by `torch.vmap` if as one batch it does not give what it gives alone.

    A model that orders its batch otherwise (windows before images, say) would mix up its cells without any error.
    """
    if running_statistics(skeleton):
        _cell_after_cell.add(skeleton)
        return
    generator = torch.Generator().manual_seed(0)
    cells = [models[0], models[-1]]
    modes = [cell.training for cell in cells]
    images = torch.randn(2, 2, 3, *image_size, generator=generator)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], torch.device("cpu"))
    try:
        together = stacked_forward(skeleton, weights, images)
    except Exception:  # what vmap cannot do has many names
        _by_vmap.discard(skeleton)
        _cell_after_cell.add(skeleton)
        return
    alone = torch.stack([cell.train(skeleton.training)(batch) for cell, batch in zip(cells, images, strict=True)])
    for cell, mode in zip(cells, modes, strict=True):
        cell.train(mode)
    if runs_as_one_batch(skeleton) and not torch.allclose(together, alone, rtol=1e-3, atol=1e-3):
        _by_vmap.add(skeleton)


def vmapped_forward(model: nn.Module, weights_K: dict[str, Tensor], images_KBCHW: Tensor) -> Tensor:
    """Outputs [K, B, …] of K models, whatever they do with their weights; numerics are those of the module itself.

    Left alone, `torch.vmap` loses speed in two places, where a function mode steps in: linear layers on inputs of more
    than two dimensions (each image would get its own copy of the weights) and attention (a Python loop over K).
    """

    def one_cell(weights: dict[str, Tensor], images_BCHW: Tensor) -> Tensor:
        output: Tensor = functional_call(model, weights, (images_BCHW,))
        return output

    with _StackFriendly(), warnings.catch_warnings():
        # Attention with a bias has no rule on CPUs: there vmap goes through the cells, and says so each time.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        stacked: Tensor = torch.vmap(one_cell, randomness="error")(weights_K, images_KBCHW)
        return stacked


class _StackFriendly(TorchFunctionMode):
    """Replaces operations by equal ones that batch well over a leading axis of weights."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = F.linear(input.flatten(0, -2), weight, bias)
    return flat.view(*input.shape[:-1], flat.shape[-1])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is None and not (dropout_p or is_causal or enable_gqa) and query.dim() == 4:
        folded: Tensor = _FoldedAttention.apply(query, key, value, scale)
        return folded
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


class _FoldedAttention(torch.autograd.Function):
    """Attention has no weights, so a stack of K batches is one batch K times as large."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *saved, ctx.scale = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Reached only when nothing is stacked: under vmap autograd sees the folded call itself.
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            output = F.scaled_dot_product_attention(query, key, value, scale=ctx.scale)
        return *torch.autograd.grad(output, (query, key, value), gradient), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> tuple[Tensor, int]:
        def folded(tensor: Tensor, dim: int | None) -> Tensor:
            stacked = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return stacked.flatten(0, 1)

        query, key, value = (folded(*pair) for pair in zip((query, key, value), in_dims[:3], strict=True))
        attended = F.scaled_dot_product_attention(query, key, value, scale=scale)
        return attended.view(info.batch_size, -1, *attended.shape[1:]), 0
