"""Tile shuffle: the image is cut into squares that change places. It keeps what is local and destroys what is not."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_at_least


@dataclass(frozen=True, kw_only=True)
class TileShuffle(Augmentation):
    """A new permutation of the tiles for every sample; rows and columns that fill no tile stay where they are."""

    name: ClassVar[str] = "tileshuffle"
    stage: ClassVar[Stage] = Stage.OCCLUSION

    tile: int = 8
    """Side of a tile in pixels; 1 shuffles pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("tileshuffle.tile", self.tile, 1)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        smallest, largest, side = int(cells.smallest["tile"]), int(cells.largest["tile"]), min(image_shape[1:])
        if largest > side:
            raise InputError(
                f"tileshuffle.tile is {largest}, but images of {image_shape[1]}×{image_shape[2]} pixels have no such "
                f"tile; choose at most {side}"
            )
        return {"tileshuffle": 1, "tileshuffle.order": (image_shape[1] // smallest) * (image_shape[2] // smallest)}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = batch.images_KBCHW
        channels, height, width = images.shape[-3:]
        tile_K11 = cells["tile"][:, None, None]
        down_K11, across_K11 = height // tile_K11, width // tile_K11
        key_KBT = drawn.sample["tileshuffle.order"]
        # Cells with larger tiles have fewer of them: keys beyond their number sort to the end, where they are not used.
        number_T = torch.arange(key_KBT.shape[-1], device=images.device)
        source_KBT = torch.where(number_T < down_K11 * across_K11, key_KBT, 2.0).argsort(dim=-1, stable=True)

        row_H1 = torch.arange(height, device=images.device).unsqueeze(-1)
        column_W = torch.arange(width, device=images.device)
        tile_row, tile_column = row_H1 // tile_K11, column_W // tile_K11
        tiled_KHW = (tile_row < down_K11) & (tile_column < across_K11)
        here_KHW = torch.where(tiled_KHW, tile_row * across_K11 + tile_column, 0)
        there_KBHW = source_KBT.gather(-1, here_KHW.flatten(1).unsqueeze(1).expand(*key_KBT.shape[:2], -1))
        there_KBHW = there_KBHW.view(*key_KBT.shape[:2], height, width)
        across, tile = across_K11.unsqueeze(1), tile_K11.unsqueeze(1)
        source_row = there_KBHW // across * tile + row_H1 % tile
        source_column = there_KBHW % across * tile + column_W % tile
        moved_KBHW = chosen(cells, drawn.sample["tileshuffle"])[..., None] & tiled_KHW.unsqueeze(1)
        index_KBHW = torch.where(moved_KBHW, source_row * width + source_column, row_H1 * width + column_W)
        index = index_KBHW.flatten(-2).unsqueeze(2).expand(-1, -1, channels, -1)
        return batch.replace(images=images.flatten(-2).gather(-1, index).view_as(images))
