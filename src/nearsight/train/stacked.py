"""One model's code, K models' weights: the forward of a whole stack.

Weights have a leading axis K and the images of all cells are one batch (`stackedweight`), so no model needs a second
version of its code. A model that uses its weights in a way not known there, or that reorders its batch, runs by
`torch.vmap` (`vmapped`): slower, and for any model.

Shape suffixes: K cells, B samples, C channels or classes, H rows, W columns.
"""

import copy
from collections.abc import Mapping, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nearsight.train.fused.pending import fusing
from nearsight.train.stackedweight import UnstackableError, stack_up
from nearsight.train.vmapped import vmapped_forward

Weights = dict[str, Tensor]

_by_vmap: WeakSet[nn.Module] = WeakSet()
"""Models that do not run as one batch."""


def stack_weights(states: Sequence[Mapping[str, Tensor]], device: torch.device) -> Weights:
    """The parameters of K models of one shape, each with a leading axis K."""
    return {name: torch.stack([state[name].detach() for state in states]).to(device) for name in states[0]}


def weightless(model: nn.Module) -> nn.Module:
    """The model's code and shapes without memory for its weights."""
    return copy.deepcopy(model).to("meta")


def runs_as_one_batch(model: nn.Module) -> bool:
    """Whether this model is not known to need `torch.vmap`."""
    return model not in _by_vmap


def stacked_forward(model: nn.Module, weights_K: Weights, images_KBCHW: Tensor, *, reduced: bool = False) -> Tensor:
    """Outputs [K, B, …] of K models, each with its own weights on its own images.

    `reduced`: products in bfloat16, and blocks by the fused kernels where there are any. With torch's deterministic
    algorithms switched on, a GPU does one cell after the other, so that each gives the bits that it gives alone.
    """
    if not reduced:
        return _forward(model, weights_K, images_KBCHW)
    with torch.autocast(images_KBCHW.device.type, torch.bfloat16), fusing(torch.bfloat16):
        return _forward(model, weights_K, images_KBCHW).float()


def _forward(model: nn.Module, weights_K: Weights, images_KBCHW: Tensor) -> Tensor:
    if images_KBCHW.is_cuda and torch.are_deterministic_algorithms_enabled():
        # A library chooses its kernels by the number of cells too, and each rounds in its own way.
        cells = [{name: weight[k : k + 1] for name, weight in weights_K.items()} for k in range(len(images_KBCHW))]
        alone = zip(cells, images_KBCHW.split(1), strict=True)
        return torch.cat([_all_at_once(model, weights, images) for weights, images in alone])
    return _all_at_once(model, weights_K, images_KBCHW)


def _all_at_once(model: nn.Module, weights_K: Weights, images_KBCHW: Tensor) -> Tensor:
    if runs_as_one_batch(model):
        try:
            return _as_one_batch(model, weights_K, images_KBCHW)
        except UnstackableError:
            _by_vmap.add(model)
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
    """Let models that do not give as one batch what they give alone run by `torch.vmap`.

    A model that orders its batch otherwise (windows before images, say) would mix up its cells without any error.
    """
    generator = torch.Generator().manual_seed(0)
    cells = [models[0], models[-1]]
    modes = [cell.training for cell in cells]
    images = torch.randn(2, 2, 3, *image_size, generator=generator)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], torch.device("cpu"))
    together = stacked_forward(skeleton, weights, images)
    alone = torch.stack([cell.train(skeleton.training)(batch) for cell, batch in zip(cells, images, strict=True)])
    for cell, mode in zip(cells, modes, strict=True):
        cell.train(mode)
    if runs_as_one_batch(skeleton) and not torch.allclose(together, alone, rtol=1e-3, atol=1e-3):
        _by_vmap.add(skeleton)
