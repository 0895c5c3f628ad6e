"""How others train: one model, eager, torch's AdamW, torchvision transforms in a DataLoader, CutMix in its collate.

The peer of the stacked engine. It trains by the same protocol on the same split. What costs nothing to do well is done
well: fused AdamW, pinned memory and persistent workers, no wait for the device within an epoch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from PIL import Image
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torch.utils import data
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

from nearsight.data import Dataset, stratified_split
from nearsight.train import RunConfig

CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)
CUTMIX_P = 0.5
PADDING = 4
_SIZE = 32
_EVALUATION_BATCH = 512

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


class _Pictures(data.Dataset[tuple[Tensor, int]]):
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


class OrdinaryLoop:
    """One run of the Modern protocol, epoch by epoch."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, device: torch.device, *, num_workers: int, kind: Kind = "PIL"
    ) -> None:
        protocol, on_gpu = config.protocol, device.type == "cuda"
        split = stratified_split(dataset.train.labels_N, config.data.validation_fraction, config.data.split_seed)

        def loader(index_N: Tensor, *, training: bool) -> Loader:
            return torchvision_loader(
                dataset.train.images_NCHW[index_N],
                dataset.train.labels_N[index_N],
                kind,
                batch_size=protocol.batch_size if training else _EVALUATION_BATCH,
                num_classes=dataset.num_classes,
                mean=dataset.mean,
                std=dataset.std,
                num_workers=num_workers,
                pin_memory=on_gpu,
                training=training,
            )

        self.device = device
        self.training, self.validation = loader(split[0], training=True), loader(split[1], training=False)
        self.reduced = config.precision == "bf16"
        torch.manual_seed(config.seed)
        self.model = config.model.build(dataset.image_size, dataset.num_classes).to(device)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=protocol.smoothing)
        groups = param_groups_weight_decay(
            self.model, protocol.weight_decay, no_weight_decay_list=("cls_token", "pos_embed")
        )
        self.optimizer = torch.optim.AdamW(groups, lr=protocol.lr, betas=protocol.betas, fused=on_gpu)
        warmup, total = (epochs * len(self.training) for epochs in (protocol.warmup_epochs, protocol.max_epochs))

        def factor(done: int) -> float:
            step = done + 1
            if step <= warmup:
                return step / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def run_epoch(self, on_step: Callable[[int], None] = lambda step: None) -> tuple[float, float]:
        """(training loss, validation accuracy) of one epoch."""
        self.model.train()
        total = torch.zeros((), device=self.device)
        for step, (images, targets) in enumerate(self.training):
            images, targets = self._moved(images), self._moved(targets)
            with self._autocast():
                loss = self.criterion(self.model(images), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            total += loss.detach()
            on_step(step + 1)
        return float(total) / len(self.training), self.evaluate()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The accuracy on the images held out."""
        self.model.eval()
        correct, count = torch.zeros((), dtype=torch.int64, device=self.device), 0
        for images, labels in self.validation:
            with self._autocast():
                logits = self.model(self._moved(images))
            correct += (logits.argmax(-1) == self._moved(labels)).sum()
            count += len(labels)
        return int(correct) / count

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.reduced)
