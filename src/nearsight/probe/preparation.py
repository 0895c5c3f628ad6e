"""Images as a frozen model takes them: resized, cut and normalised in batches, where the model computes.

Shape suffixes: N images, C channels, H rows, W columns.
"""

from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from nearsight.augment import grey_levels, normalize
from nearsight.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to uint8 images before a model sees them; all of it identifies cached features."""

    size: tuple[int, int]
    """Rows and columns that the model takes."""
    mean: tuple[float, ...]
    """Per channel, of images in [0, 1]."""
    std: tuple[float, ...]
    """Likewise."""
    crop_pct: float = 1.0
    """Share of the resized image's side that is cut out of its centre. Images of the right size are left alone."""

    def __post_init__(self) -> None:
        if not 0.0 < self.crop_pct <= 1.0:
            raise InputError(f"crop_pct is {self.crop_pct}, but must be greater than 0 and at most 1")

    def __call__(self, images_NCHW: Tensor, device: torch.device) -> Tensor:
        """Normalised float32 on the device, from uint8."""
        from torchvision.transforms.v2.functional import center_crop  # here, because it takes a quarter of a second

        images = images_NCHW.to(device)
        if tuple(images.shape[-2:]) != self.size:
            # As timm does it: the short side is resized, and the centre is cut out.
            target = [floor(side / self.crop_pct) for side in self.size]
            square = target[0] == target[1]
            images = _resized(images, target[:1] if square else target)
            images = center_crop(images, list(self.size))
        return self.normalized(images)

    def whole(self, image_CHW: Tensor, device: torch.device) -> Tensor:
        """A whole image, squeezed to the size the model takes, as a batch of one: nothing of it is cut off."""
        return self.normalized(_resized(image_CHW.to(device), list(self.size)).unsqueeze(0))

    def normalized(self, images_NCHW: Tensor) -> Tensor:
        device = images_NCHW.device
        return normalize(images_NCHW, grey_levels(self.mean, device), grey_levels(self.std, device))


def _resized(images: Tensor, size: list[int]) -> Tensor:
    from torchvision.transforms.v2.functional import InterpolationMode, resize  # here for the same reason

    resized: Tensor = resize(images, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return resized
