"""Features of random crops: computed anew in every epoch, because no two epochs crop alike.

Shape suffixes: B images, C channels, H rows, W columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nearsight.augment import HorizontalFlip, Pipeline, ResizedCrop
from nearsight.data import ImageSet
from nearsight.errors import InputError
from nearsight.probe.features import FeatureReader
from nearsight.probe.preparation import Preparation
from nearsight.randomness import Draws


def cropped_features(
    reader: FeatureReader,
    images: ImageSet,
    preparation: Preparation,
    *,
    seed: int,
    batch_size: int,
    device: torch.device,
) -> Callable[[Tensor, int], Tensor]:
    """(positions of images, epoch) → features of their random resized crops, flipped or not, as DINO trains heads."""
    rows, columns = preparation.size
    if rows != columns:
        raise InputError(f"random crops are square, but the model takes images of {rows}×{columns} pixels")
    pipeline = Pipeline.stack(
        [[ResizedCrop(size=rows), HorizontalFlip(p=0.5)]],
        num_classes=int(images.labels_N.max()) + 1,
        mean=preparation.mean,
        std=preparation.std,
        device=device,
    )

    seed_1, step = torch.tensor([seed], device=device), torch.zeros((), dtype=torch.int64, device=device)

    def features(positions_B: Tensor, epoch: int) -> Tensor:
        parts = []
        for place_B in positions_B.split(batch_size):
            pixels_1BCHW = images.images_NCHW[place_B].to(device).unsqueeze(0)
            labels_1B = images.labels_N[place_B].to(device).unsqueeze(0)
            draws = Draws(seed_1, torch.tensor(epoch, device=device), step, place_B.unsqueeze(0).to(device))
            parts.append(reader(pipeline(pixels_1BCHW, labels_1B, draws)[0][0]))
        return torch.cat(parts)

    return features
