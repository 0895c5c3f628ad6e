"""Convolutional positions on the blocks of a model of timm (CPE; Chu et al. 2023, *Conditional Positional Encodings*).

Shape suffixes: B images, N tokens, C channels, R rows, c columns.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from timm.models.eva import Eva
from timm.models.gcvit import GlobalContextVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.locat.attention import GridRecord

_CHILD = "cpe"
"""Name of the module in a block."""


class PatchConvolution(nn.Module):
    """x + a depthwise 3×3 convolution of the patches of x; a block's child, which its hook calls."""

    def __init__(self, dim: int, grids: GridRecord | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self._grids = grids

    def forward(self, x: Tensor) -> Tensor:
        if self._grids is None:  # maps [B, R, c, C]
            maps: Tensor = x + self.conv(x.movedim(-1, 1)).movedim(1, -1)
            return maps
        grid = self._grids.grid(x.shape[1])
        patches_BNC = x[:, grid.num_prefix :]
        maps_BCRc = patches_BNC.transpose(1, 2).unflatten(2, (grid.rows, grid.cols))
        encoded_BNC = self.conv(maps_BCRc).flatten(2).transpose(1, 2)
        return x + F.pad(encoded_BNC, (0, 0, grid.num_prefix, 0))

    def before(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a hook of the block."""
        return (self(args[0]), *args[1:])


def add_convolutions(model: nn.Module, blocks: Sequence[int | str]) -> None:
    """Before these blocks, which count from 0 over all stages."""
    name = type(model).__name__
    if not isinstance(model, VisionTransformer | Eva | SwinTransformer | GlobalContextVit):
        raise InputError(
            f"cpe cannot be added to {name}: where its blocks have their patches is not known; it takes timm's "
            "VisionTransformer, Eva, Swin and GCViT"
        )
    if getattr(model, "patch_drop", None) is not None and not isinstance(model.patch_drop, nn.Identity):
        raise InputError(f"cpe cannot be added to {name} with patch_drop_rate: without some patches there is no grid")
    whole: Any = model
    if isinstance(model, SwinTransformer | GlobalContextVit):
        found = [block for stage in (getattr(whole, "layers", None) or whole.stages) for block in stage.blocks]
    else:
        found = list(whole.blocks)
    chosen = []
    for number in blocks:
        if not isinstance(number, int) or not -len(found) <= number < len(found):
            raise InputError(
                f"cpe comes before blocks of {name}, 0 to {len(found) - 1}, but {number!r} is none of them"
            )
        chosen.append(found[number])
    if any(hasattr(block, _CHILD) for block in chosen):
        raise InputError(f"{name} has cpe already; it is added once")
    grids = None
    if isinstance(model, VisionTransformer | Eva):
        grids = GridRecord(whole.patch_embed, found, whole.num_prefix_tokens)
    for block in chosen:
        like = next(parameter for parameter in block.parameters() if parameter.dim() > 1)
        part = PatchConvolution(_channels(block), grids).to(device=like.device, dtype=like.dtype)
        block.add_module(_CHILD, part.train(block.training))
        block.register_forward_pre_hook(part.before)


def _channels(block: nn.Module) -> int:
    """Of what comes to it: its norm says it."""
    norm = next(module for module in block.modules() if getattr(module, "normalized_shape", None) is not None)
    return int(norm.normalized_shape[-1])  # type: ignore[index]


def remove_convolutions(model: nn.Module) -> bool:
    """Whether there were any."""
    blocks: list[Any] = [
        module for module in model.modules() if isinstance(getattr(module, _CHILD, None), PatchConvolution)
    ]
    for block in blocks:
        part, hooks = getattr(block, _CHILD), block._forward_pre_hooks
        for number, hook in list(hooks.items()):
            if getattr(hook, "__self__", None) is part:
                del hooks[number]
        delattr(block, _CHILD)
    return bool(blocks)
