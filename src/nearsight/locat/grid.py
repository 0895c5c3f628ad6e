"""Where the tokens of an attention lie: some nowhere (CLS, registers), then the patches of a grid, row by row."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nearsight.errors import InputError


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

    A hook on the patch embedding fills it whenever images are cut into patches. Grids are kept by their size, because
    under activation checkpointing a block runs again after other images have passed.
    """

    def __init__(self, patch_embed: Any, num_prefix: int) -> None:
        self._num_prefix = num_prefix
        rows, cols = patch_embed.grid_size
        # Known from the start, so that code compiled for this grid does not see it come.
        self._by_size: dict[int, tuple[int, int]] = {rows * cols: (rows, cols)}
        patch_embed.register_forward_pre_hook(self._note)

    def _note(self, patch_embed: Any, inputs: tuple[Tensor, ...]) -> None:
        height, width = inputs[0].shape[-2:]
        rows, cols = patch_embed.dynamic_feat_size((height, width))
        self._by_size[rows * cols] = rows, cols

    def grid(self, num_tokens: int) -> Grid:
        sides = self._by_size.get(num_tokens - self._num_prefix)
        if sides is None:
            raise InputError(
                f"{num_tokens} tokens came to an attention, {self._num_prefix} of them no patches, but no image was "
                "cut into as many: LocAt needs all patches of an image"
            )
        return Grid(*sides, self._num_prefix)
