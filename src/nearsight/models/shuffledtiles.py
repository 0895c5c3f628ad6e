"""Images whose tiles have changed places, always in the same way (S3: permuted CIFAR-100).

An image is cut into g×g tiles, and one fixed permutation of them is applied to every image, in training and in
test; g = 32 shuffles the single pixels of a 32-pixel image. It is a layer of the network, in front of its first
convolution, and not a part of the data: crops, flips and mixing happen to whole images, so that every network learns
from the same ones, up to where their pixels are.

For a ViT whose patches lie within tiles nothing changes: its tokens come in another order, and its positions are
learned. A convolution finds other neighbours. Looking into such a ViT, the lens follows the pixels: its distances are
those between the places where patches come from. Patches of pixels from all over the image have no place, and there is
nothing to measure.

Shape suffixes: P pixels of an image, row by row.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least
from nearsight.randomness import permutation

_STREAM = "shuffled tiles"


def shuffled_pixels(image_size: tuple[int, int], num_tiles: int, seed: int) -> Tensor:
    """For every pixel of the shuffled image, which pixel of the original it is: int64 [P].

    `num_tiles` is that of a side, g; `seed` decides the permutation, and nothing else does.
    """
    check_at_least("shuffled_tiles", num_tiles, 1)
    for side in image_size:
        if side % num_tiles:
            raise InputError(
                f"{num_tiles}×{num_tiles} tiles do not divide an image of {image_size[0]}×{image_size[1]} pixels"
            )
    height, width = image_size
    (order,) = permutation(torch.tensor([seed]), _STREAM, torch.tensor(0), num_tiles**2)
    pixels = torch.arange(height * width).view(num_tiles, height // num_tiles, num_tiles, width // num_tiles)
    by_tile = pixels.transpose(1, 2).flatten(0, 1)[order]  # [g², rows of a tile, columns of a tile]
    index_P: Tensor = by_tile.unflatten(0, (num_tiles, num_tiles)).transpose(1, 2).flatten()
    return index_P


class ShuffledTiles(nn.Module):
    """Puts the tiles of images [..., H, W] in the order of its seed. Nothing in it is learned or saved."""

    index_P: Tensor

    def __init__(self, image_size: tuple[int, int], num_tiles: int, seed: int = 0) -> None:
        super().__init__()
        self.image_size, self.num_tiles, self.seed = image_size, num_tiles, seed
        self.register_buffer("index_P", shuffled_pixels(image_size, num_tiles, seed), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) != self.image_size:
            raise InputError(f"tiles of {self.image_size} pixels are shuffled, not of {tuple(images.shape[-2:])}")
        shuffled: Tensor = images.flatten(-2).index_select(-1, self.index_P).unflatten(-1, self.image_size)
        return shuffled

    def extra_repr(self) -> str:
        return f"{self.num_tiles}×{self.num_tiles}, seed={self.seed}"


def shuffle_tiles(model: Any, image_size: tuple[int, int], num_tiles: int, seed: int = 0) -> None:
    """Let a timm model see every image with its tiles shuffled, whichever of its methods is called."""
    first = model.get_submodule(model.pretrained_cfg["first_conv"])
    first.shuffled_tiles = ShuffledTiles(image_size, num_tiles, seed)
    first.register_forward_pre_hook(_shuffled)


def _shuffled(first: Any, inputs: tuple[Tensor]) -> Tensor:
    shuffled: Tensor = first.shuffled_tiles(inputs[0])
    return shuffled
