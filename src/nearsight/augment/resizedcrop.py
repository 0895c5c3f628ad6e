"""Random resized crop: a rectangle of random size and shape, stretched to the size the model wants."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nearsight.augment.base import Augmentation, Batch, Cells, Stage, chosen, require_grey_levels
from nearsight.augment.erasing import check_ranges
from nearsight.augment.rectangles import NUM_RECTANGLE_DRAWS, offset, random_sides
from nearsight.augment.streams import Drawn
from nearsight.errors import check_at_least


@dataclass(frozen=True, kw_only=True)
class ResizedCrop(Augmentation):
    """`torchvision.transforms.v2.RandomResizedCrop` on tensors: bilinear, antialiased, rounded to grey levels.

    A sample that is not cropped is resized as a whole, so `p` and cells without it work at any output size.
    """

    name: ClassVar[str] = "resizedcrop"
    stage: ClassVar[Stage] = Stage.GEOMETRY
    shared: ClassVar[tuple[str, ...]] = ("size",)

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
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {"resizedcrop": 3 + NUM_RECTANGLE_DRAWS}

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
    def draw(cls, cells: Cells, drawn: Drawn, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, rows and columns of every sample's crop, each int64 [K, B]."""
        draw_KBn = drawn.sample["resizedcrop"]
        fits_KB, rows_KB, columns_KB = random_sides(draw_KBn[..., 3:], cells, height, width, margin=0)
        # When ten tries found none, torchvision takes the largest central crop whose shape is in range.
        shape_K1 = torch.full_like(cells["min_ratio"], width / height).unsqueeze(-1)
        shape_K1 = shape_K1.clamp(cells["min_ratio"].unsqueeze(-1), cells["max_ratio"].unsqueeze(-1))
        central_rows_K1 = (width / shape_K1).round().clamp(max=height).to(torch.int64)
        central_columns_K1 = (height * shape_K1).round().clamp(max=width).to(torch.int64)
        rows_KB = torch.where(fits_KB, rows_KB, central_rows_K1)
        columns_KB = torch.where(fits_KB, columns_KB, central_columns_K1)
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
