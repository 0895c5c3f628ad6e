"""Distance and entropy of attention by plain dense sums in float64.

Shape suffixes: B images, W windows, H heads, N queries, M keys.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """Where the tokens of one attention are."""

    grid_size: tuple[int, int]
    """Rows and columns of the layer's tokens over the whole image."""
    queries_WN2: Tensor
    """(row, column) in cells of that grid; NaN for a token that is no patch."""
    keys_WM2: Tensor
    axes: str = "b h"
    """The leading axes of the map: images, windows and heads; letters without a space between share an axis."""
    allowed_WNM: Tensor | None = None
    """False where a mask forbids to look; everything is allowed by default."""


def head_numbers(attention: Tensor, layer: Layer, num_images: int) -> tuple[Tensor, Tensor]:
    """(mean attention distance, normalised entropy) of each image and head."""
    weights_BWHNM = arranged(attention.double(), layer, num_images)
    patches_WM = layer.keys_WM2[..., 0].isfinite()
    weights_BWHNM = weights_BWHNM * patches_WM[:, None, None, :]
    weights_BWHNM = weights_BWHNM / weights_BWHNM.sum(-1, keepdim=True)
    offset_WNM2 = layer.queries_WN2[:, :, None] - layer.keys_WM2[:, None]
    rows, cols = layer.grid_size
    distance_WNM = offset_WNM2.square().sum(-1).sqrt().nan_to_num(0.0) / (math.hypot(rows - 1, cols - 1) or 1.0)
    distance_BWHN = (weights_BWHNM * distance_WNM[:, None]).sum(-1)
    surprise_BWHNM = torch.where(weights_BWHNM > 0, -weights_BWHNM.log(), 0.0)
    entropy_BWHN = (weights_BWHNM * surprise_BWHNM).sum(-1)
    allowed_WNM = patches_WM[:, None].expand(distance_WNM.shape)
    if layer.allowed_WNM is not None:
        allowed_WNM = allowed_WNM & layer.allowed_WNM
    most_WN = allowed_WNM.sum(-1).clamp(min=1).log()
    entropy_BWHN = torch.where(most_WN[:, None] > 0, entropy_BWHN / most_WN[:, None], 0.0)
    patches_WN = layer.queries_WN2[..., 0].isfinite()
    distance_BHQ, entropy_BHQ = (values.transpose(1, 2)[:, :, patches_WN] for values in (distance_BWHN, entropy_BWHN))
    return distance_BHQ.mean(-1), entropy_BHQ.mean(-1)


def arranged(attention: Tensor, layer: Layer, num_images: int) -> Tensor:
    """[B, W, H, N, M] from the axes of the model."""
    letters = layer.axes.replace(" ", "")
    sizes = {"b": num_images, "w": len(layer.queries_WN2), "h": -1}
    attention = attention.reshape(*(sizes[letter] for letter in letters), *attention.shape[-2:])
    for letter in "bwh":
        if letter not in letters:
            letters += letter
            attention = attention.unsqueeze(len(letters) - 1)
    return attention.permute(*(letters.index(letter) for letter in "bwh"), -2, -1)


def with_shuffled_keys(layer: Layer, seed: int = 0) -> Layer:
    """The layer with its keys at each other's places: a geometry that is surely wrong."""
    keys_WM2 = layer.keys_WM2.clone()
    patches_WM = keys_WM2[..., 0].isfinite()
    places = keys_WM2[patches_WM]
    keys_WM2[patches_WM] = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
    return Layer(layer.grid_size, layer.queries_WN2, keys_WM2, layer.axes, layer.allowed_WNM)
