"""Where the tokens of an attention lie: some nowhere (CLS, registers), then the patches of a grid, row by row."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import InputError

_MARK = "_nearsight_grid"
"""Attribute of tokens that have come to a block."""


@dataclass(frozen=True)
class Grid:
    """The tokens of one image, or of one window of it."""

    rows: int
    cols: int
    num_prefix: int
    """Tokens in front of the patches."""

    @property
    def num_patches(self) -> int:
        return self.rows * self.cols

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_patches


class GridRecord:
    """Which grid a number of tokens makes up. An attention sees only how many there are; images come in all shapes.

    A hook on the patch embedding notes it whenever images are cut into patches. Under activation checkpointing a block
    runs again after other images have passed, so the first time the tokens that came to it are marked with their grid.
    """

    def __init__(self, patch_embed: Any, blocks: Iterable[nn.Module], num_prefix: int) -> None:
        self._num_prefix = num_prefix
        rows, cols = patch_embed.grid_size
        # Known from the start, so that code compiled for this grid does not see it come.
        self._by_size: dict[int, tuple[int, int]] = {rows * cols: (rows, cols)}
        self._ambiguous: set[int] = set()
        patch_embed.register_forward_pre_hook(self._note)
        for block in dict.fromkeys(blocks):
            block.register_forward_pre_hook(self._recall)

    def _note(self, patch_embed: Any, inputs: tuple[Tensor, ...]) -> None:
        height, width = map(int, inputs[0].shape[-2:])  # while a model is traced they are tensors
        sides = patch_embed.dynamic_feat_size((height, width))
        size = sides[0] * sides[1]
        if self._by_size.get(size, sides) != sides and not torch.compiler.is_compiling():
            self._ambiguous.add(size)
        self._by_size[size] = sides

    def _recall(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        # A compiler repeats nothing by running this code again.
        if torch.compiler.is_compiling() or not inputs or type(inputs[0]) is not Tensor:
            return
        tokens, size = inputs[0], int(inputs[0].shape[1]) - self._num_prefix
        if (marked := getattr(tokens, _MARK, None)) is not None:
            self._by_size[size] = marked
        elif size in self._by_size:
            if size in self._ambiguous and tokens.is_leaf and _in_backward():
                raise InputError(
                    f"a block runs again on a copy of its {size} patches, and images of several shapes had as many, so "
                    "theirs is not known; with LocAt use activation checkpointing that is not reentrant "
                    "(timm.layers.set_reentrant_ckpt(False), use_reentrant=False)"
                )
            setattr(tokens, _MARK, self._by_size[size])

    def grid(self, num_tokens: int) -> Grid:
        sides = self._by_size.get(int(num_tokens) - self._num_prefix)
        if sides is None:
            raise InputError(
                f"{num_tokens} tokens came to an attention, {self._num_prefix} of them no patches, but no image was "
                "cut into as many: LocAt needs all patches of an image"
            )
        return Grid(*sides, self._num_prefix)


def _in_backward() -> bool:
    running: int = torch._C._current_graph_task_id()
    return running != -1
