"""What moves the picture.

RandomCrop        a crop of the zero-padded image, at the image's own size
ResizedCrop       a rectangle of random size and shape, stretched to the size the model wants
HorizontalFlip    left and right change places
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, register_augmentation, require_grey_levels
from nearsight.augment.boxes import NUM_RECTANGLE_DRAWS, check_ranges, offset, random_sides
from nearsight.augment.streams import Drawn
from nearsight.errors import check_at_least
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class RandomCrop(Augmentation):
    """Pads with black on all sides and cuts the original size out again (torchvision's `RandomCrop(size, padding)`)."""

    name = "crop"
    stage = Stage.GEOMETRY
    num_draws = 3

    padding: int = 4
    """Black pixels added on each side; the picture moves by up to this many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("crop.padding", self.padding, 0)

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = batch.images_KBCHW
        channels, height, width = images.shape[-3:]
        draw_KB3 = drawn.sample["crop"]
        padding_K11 = cells["padding"][:, None, None]
        shift_KB2 = (draw_KB3[..., 1:] * (2 * padding_K11 + 1)).to(torch.int64) - padding_K11
        shift_KB2 = shift_KB2 * chosen(cells, draw_KB3[..., :1])
        row_KBH = torch.arange(height, device=images.device) + shift_KB2[..., :1]
        column_KBW = torch.arange(width, device=images.device) + shift_KB2[..., 1:]
        inside_KBHW = _within(row_KBH, height).unsqueeze(-1) & _within(column_KBW, width).unsqueeze(-2)
        source_KBHW = row_KBH.clamp(0, height - 1).unsqueeze(-1) * width + column_KBW.clamp(0, width - 1).unsqueeze(-2)
        index = source_KBHW.flatten(-2).unsqueeze(-2).expand(*images.shape[:2], channels, -1)
        moved = images.flatten(-2).gather(-1, index).view_as(images)
        return batch.replace(images=moved.mul_(inside_KBHW.unsqueeze(-3)))


def _within(position: torch.Tensor, size: int) -> torch.Tensor:
    return (position >= 0) & (position < size)


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class ResizedCrop(Augmentation):
    """`torchvision.transforms.v2.RandomResizedCrop` on tensors: bilinear, antialiased, rounded to grey levels.

    A sample that is not cropped is resized as a whole, so `p` and cells without it work at any output size.
    """

    name = "resizedcrop"
    stage = Stage.GEOMETRY
    shared = ("size",)
    num_draws = 3 + NUM_RECTANGLE_DRAWS

    size: int = 0
    """Side of the result in pixels; 0 keeps the size of the images. The same in all cells of a stack."""
    min_area: float = 0.08
    """Smallest share of the image."""
    max_area: float = 1.0
    """Largest share of the image."""
    min_ratio: float = 3 / 4
    """Smallest aspect ratio, columns to rows."""
    max_ratio: float = 4 / 3
    """Largest aspect ratio."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self.name, self.min_area, self.max_area, self.min_ratio, self.max_ratio)
        check_at_least("resizedcrop.size", self.size, 0)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self.size == 0

    @classmethod
    def output_shape(cls, cells: Cells, image_shape: torch.Size) -> torch.Size:
        size = int(cells.largest["size"])
        return torch.Size((image_shape[0], size or image_shape[1], size or image_shape[2]))

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = require_grey_levels("resizedcrop", batch.images_KBCHW)
        height, width = images.shape[-2:]
        _, out_height, out_width = cls.output_shape(cells, images.shape[-3:])
        top, left, rows, columns = cls.draw(cells, drawn, height, width)
        vertical_KBhH = resize_weights(top, rows, height, out_height)
        horizontal_KBwW = resize_weights(left, columns, width, out_width)
        # Weights of the whole image at its own size are the unit matrix, so untouched samples stay bit-identical.
        resized = vertical_KBhH.unsqueeze(2) @ images.to(torch.float32) @ horizontal_KBwW.unsqueeze(2).mT
        return batch.replace(images=resized.round().clamp(0, 255).to(torch.uint8))

    @classmethod
    def draw(
        cls, cells: Cells, drawn: Drawn, height: int | Tensor, width: int | Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, rows and columns of every sample's crop, each int64 [K, B]. Images have one size, or each its own:
        `height` and `width` are int64 [K, B] then."""
        draw_KBn = drawn.sample["resizedcrop"]
        fits_KB, rows_KB, columns_KB = random_sides(draw_KBn[..., 3:], cells, height, width, margin=0)
        # When ten tries found none, torchvision takes the largest central crop whose shape is in range.
        narrow_K1, wide_K1 = cells["min_ratio"].unsqueeze(-1), cells["max_ratio"].unsqueeze(-1)
        shape_Kb = (torch.ones_like(narrow_K1) * (width / height)).clamp(narrow_K1, wide_K1)
        central_rows_Kb = (width / shape_Kb).round().clamp(max=height).to(torch.int64)
        central_columns_Kb = (height * shape_Kb).round().clamp(max=width).to(torch.int64)
        rows_KB = torch.where(fits_KB, rows_KB, central_rows_Kb)
        columns_KB = torch.where(fits_KB, columns_KB, central_columns_Kb)
        top_KB = torch.where(fits_KB, offset(draw_KBn[..., 1], rows_KB, height), (height - rows_KB) // 2)
        left_KB = torch.where(fits_KB, offset(draw_KBn[..., 2], columns_KB, width), (width - columns_KB) // 2)
        cropped_KB = chosen(cells, draw_KBn[..., 0])
        crop = torch.where(cropped_KB, torch.stack((top_KB, left_KB, rows_KB, columns_KB)), 0)
        top_KB, left_KB, rows_KB, columns_KB = crop.unbind(0)
        return (
            top_KB,
            left_KB,
            torch.where(cropped_KB, rows_KB, height),
            torch.where(cropped_KB, columns_KB, width),
        )


def resize_weights(start_KB: Tensor, length_KB: Tensor, size_in: int, size_out: int) -> Tensor:
    """Antialiased bilinear weights [K, B, size_out, size_in] that stretch [start, start + length) to `size_out` pixels.

    A triangle around each output pixel's centre, as wide as an output pixel or an input pixel, whichever is wider, cut
    off at the crop's edge and normalised: the filter of `torch.nn.functional.interpolate(..., antialias=True)`.
    """
    scale = (length_KB.to(torch.float32) / size_out)[..., None, None]
    start = start_KB[..., None, None]
    centre_o1 = (torch.arange(size_out, device=start_KB.device, dtype=torch.float32) + 0.5).unsqueeze(-1) * scale
    pixel_i = torch.arange(size_in, device=start_KB.device) - start
    inside = (pixel_i >= 0) & (pixel_i < length_KB[..., None, None])
    distance = (pixel_i + 0.5 - centre_o1).abs() / scale.clamp(min=1)
    weight = torch.where(inside, (1 - distance).clamp(min=0), 0.0)
    return weight / weight.sum(-1, keepdim=True)


@register_augmentation
@dataclass(frozen=True, kw_only=True)
class HorizontalFlip(Augmentation):
    """Mirrors left and right (torchvision's `RandomHorizontalFlip`)."""

    name = "flip"
    stage = Stage.GEOMETRY

    p: float = 0.5
    """Probability that a sample is mirrored."""

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        images = batch.images_KBCHW
        flipped_KB111 = chosen(cells, drawn.sample["flip"])[..., None, None]
        return batch.replace(images=torch.where(flipped_KB111, images.flip(-1), images))
