"""Attention of limited reach: from the first step on, a patch attends only to patches at most r patches away.

It is neighbourhood attention (Hassani et al. 2023) as a mask, round instead of square: nothing is learned, parameters
and their names stay, and no head can be less local than the mask allows. CLS and registers attend to all tokens, and
all tokens attend to them. Every block may have its own r.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nearsight.errors import InputError
from nearsight.lazy import torch
from nearsight.metrics import within_reach

if TYPE_CHECKING:
    from torch import Tensor

Reach = tuple[float | None, ...]
"""In patches: one number for all blocks or one for each; None is no limit, and so is an empty tuple."""


def settled_reach(reach: Any, depth: int) -> Reach:
    """A reach in the one way to write it, or an error: what means the same is the same, also in a run's identity.

    A number stands for all blocks, and so do as many equal ones as there are blocks. inf is None.
    """
    given = tuple(reach) if isinstance(reach, Iterable) else (reach,)
    for number in given:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if number is not None and not (is_number and number >= 0):
            raise InputError(
                f"reach is {number!r}, but must be a distance in patches, at least 0, or None for no limit"
            )
    if len(given) not in (0, 1, depth):
        raise InputError(f"reach has {len(given)} numbers, but there are {depth} blocks; give one for all or one each")
    settled = tuple(None if number in (None, math.inf) else float(number) for number in given)
    if len(set(settled)) == 1:
        settled = settled[:1]
    return () if settled == (None,) else settled


def limit_reach(model: Any, reach: float | Reach) -> None:
    """Give the attentions of a timm ViT their masks."""
    settled = settled_reach(reach, len(model.blocks))
    if not settled:
        return
    if model.dynamic_img_size:
        raise InputError(
            "dynamic_img_size does not go with a limited reach: its masks are those of one grid; use set_input_size"
        )
    if not isinstance(model.patch_drop, torch.nn.Identity):
        raise InputError("patch_drop_rate does not go with a limited reach: without some patches an image has no grid")
    _Masks(model, settled * len(model.blocks) if len(settled) == 1 else settled)


class _Masks:
    """Those of a model's attentions, for the grid into which its images are cut.

    They come in by hooks, so that attentions keep their classes: LocAt and whatever else knows timm's goes with them.
    """

    def __init__(self, model: Any, by_block: Reach) -> None:
        pairs = zip(model.blocks, by_block, strict=True)
        self._limited = [(block.attn, number) for block, number in pairs if number is not None]
        self._num_prefix = model.num_prefix_tokens
        for attention, _ in self._limited:
            # Not saved with the weights: it follows from the config.
            attention.register_buffer("within_reach", None, persistent=False)
            attention.register_forward_pre_hook(_hide_distant_keys, with_kwargs=True)
        self._make(model.patch_embed.grid_size, model.patch_embed.proj.weight.device)
        model.patch_embed.register_forward_pre_hook(self._follow)

    def _make(self, grid_size: tuple[int, int], device: Any) -> None:
        self._grid_size = grid_size
        for attention, number in self._limited:
            attention.within_reach = within_reach(grid_size, number, num_prefix_tokens=self._num_prefix, device=device)

    def _follow(self, patch_embed: Any, inputs: tuple[Tensor, ...]) -> None:
        """Images may come in another size than the model was made for."""
        height, width = map(int, inputs[0].shape[-2:])
        grid_size = patch_embed.dynamic_feat_size((height, width))
        if grid_size != self._grid_size:
            self._make(grid_size, inputs[0].device)


def _hide_distant_keys(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mask_NN, given = attention.within_reach, kwargs.get("attn_mask")
    if given is not None:
        mask_NN = mask_NN & given if given.dtype == mask_NN.dtype else given.masked_fill(~mask_NN, -math.inf)
    return args, {**kwargs, "attn_mask": mask_NN}
