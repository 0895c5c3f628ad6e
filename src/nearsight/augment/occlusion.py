"""What hides or displaces a part of the image.

TileShuffle       the image is cut into squares that change places: keeps what is local and destroys what is not
CutOut            a square of every image is hidden
RandomErasing     a rectangle of the image is replaced by noise or the mean
"""

from __future__ import annotations

from dataclasses import dataclass

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, register_augmentation
from nearsight.augment.boxes import NUM_RECTANGLE_DRAWS, Box, check_ranges, filling, filling_draws, offset, random_sides
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_at_least
from nearsight.lazy import torch


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class TileShuffle(Augmentation):
    """A new permutation of the tiles for every sample; rows and columns that fill no tile stay where they are."""

    name = "tileshuffle"
    stage = Stage.OCCLUSION

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


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class CutOut(Augmentation):
    """DeVries & Taylor 2017: a square centred on a random pixel, clipped at the border, set to the data set's mean."""

    name = "cutout"
    stage = Stage.OCCLUSION
    num_draws = 3

    size: int = 16
    """Side of the square in pixels (the paper: 16 for CIFAR-10, 8 for CIFAR-100); odd sides lose a pixel, as there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("cutout.size", self.size, 1)

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        height, width = batch.images_KBCHW.shape[-2:]
        coin_KB, row_draw_KB, column_draw_KB = drawn.sample["cutout"].unbind(-1)
        half_K1 = cells["size"].unsqueeze(-1) // 2
        row_KB = (row_draw_KB * height).to(torch.int64)
        column_KB = (column_draw_KB * width).to(torch.int64)
        box = Box(row_KB - half_K1, row_KB + half_K1, column_KB - half_K1, column_KB + half_K1)
        hidden_KB1HW = box.mask(height, width) & chosen(cells, coin_KB)[..., None, None, None]
        hidden = torch.where(hidden_KB1HW, batch.mean_C[:, None, None], batch.images_KBCHW.to(torch.float32))
        return batch.replace(images=hidden)


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class RandomErasing(Augmentation):
    """Zhong et al. 2020. The rectangle as torchvision and timm draw it; the filling as timm's, relative to normalised
    images: `noise=1` is its mode "pixel" (S2), `noise=0` its mode "const"."""

    name = "erasing"
    stage = Stage.OCCLUSION

    p: float = 0.25
    """Probability that a sample is erased."""
    min_area: float = 0.02
    """Smallest share of the image."""
    max_area: float = 1 / 3
    """Largest share of the image."""
    min_ratio: float = 0.3
    """Smallest aspect ratio, rows to columns."""
    max_ratio: float = 1 / 0.3
    """Largest aspect ratio."""
    noise: float = 1.0
    """Deviation of the filling in units of the data set's deviation; 0 fills with the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self.name, self.min_area, self.max_area, self.min_ratio, self.max_ratio)
        check_at_least("erasing.noise", self.noise, 0)

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"erasing": 3 + NUM_RECTANGLE_DRAWS, **filling_draws("erasing.noise", cells, image_shape)}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        height, width = batch.images_KBCHW.shape[-2:]
        draw_KBn = drawn.sample["erasing"]
        # The aspect ratio here is rows to columns, so the axes change places; sides are smaller than the image's.
        fits_KB, columns_KB, rows_KB = random_sides(draw_KBn[..., 3:], cells, width, height, margin=1)
        top_KB = offset(draw_KBn[..., 1], rows_KB, height)
        left_KB = offset(draw_KBn[..., 2], columns_KB, width)
        box = Box(top_KB, top_KB + rows_KB, left_KB, left_KB + columns_KB)
        applied_KB = chosen(cells, draw_KBn[..., 0]) & fits_KB
        erased_KB1HW = box.mask(height, width) & applied_KB[..., None, None, None]
        content = filling(batch, cells, drawn, "erasing.noise")
        return batch.replace(images=torch.where(erased_KB1HW, content, batch.images_KBCHW.to(torch.float32)))
