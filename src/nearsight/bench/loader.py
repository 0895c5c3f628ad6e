"""How others feed a model with CIFAR images: torchvision transforms in a DataLoader, CutMix in its collate function."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)
CUTMIX_P = 0.5
PADDING = 4
_SIZE = 32

Kind = Literal["PIL", "tensors"]
Loader = DataLoader[tuple[Tensor, int]]


def picture_like_images(num: int) -> Tensor:
    """uint8 [N, 3, 32, 32]: smooth fields with a little noise. White noise would flatter histograms and lookups."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(num, 3, 5, 5, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(coarse, size=(_SIZE, _SIZE), mode="bilinear")
    return (smooth + 10 * torch.randn(smooth.shape, generator=generator)).clamp(0, 255).to(torch.uint8)


def torchvision_loader(
    images: Tensor,
    labels: Tensor,
    kind: Kind,
    *,
    batch_size: int,
    num_classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    num_workers: int,
    pin_memory: bool = False,
    training: bool = True,
) -> Loader:
    """Batches of normalised images: shuffled full ones with the Modern augmentations, or all in order without any."""
    augment = [
        v2.RandomCrop(_SIZE, padding=PADDING),
        v2.RandomHorizontalFlip(),
        v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
    ]
    transform = v2.Compose(
        [
            *(augment if training else []),
            v2.PILToTensor() if kind == "PIL" else v2.Identity(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean, std),
        ]
    )
    return DataLoader(
        _Pictures(images, labels, transform, as_pil=kind == "PIL"),
        batch_size=batch_size,
        shuffle=training,
        drop_last=training,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        collate_fn=_CollateWithCutMix(num_classes) if training else default_collate,
    )


class _Pictures(Dataset[tuple[Tensor, int]]):
    """A map-style data set as torchvision's: one picture at a time, transformed in the worker."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[object], Tensor], *, as_pil: bool) -> None:
        self.pictures = images
        self.pictures_HWC = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = labels.tolist()
        self.transform = transform
        self.as_pil = as_pil

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = Image.fromarray(self.pictures_HWC[index]) if self.as_pil else self.pictures[index]
        return self.transform(picture), self.labels[index]


class _CollateWithCutMix:
    def __init__(self, num_classes: int) -> None:
        self.mix = v2.RandomApply([v2.CutMix(num_classes=num_classes)], p=CUTMIX_P)

    def __call__(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        images, labels = self.mix(*default_collate(samples))
        return images, labels
