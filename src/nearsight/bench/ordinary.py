"""How others train: one model, torch's AdamW; eager with torchvision transforms in a DataLoader and CutMix in its
collate, or compiled with its images on the device.

The peers of the stacked engine. They train by the same protocol on the same split. What costs nothing to do well is
done well: fused AdamW, pinned memory and persistent workers, no wait for the device within an epoch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

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
_DRAWN_AT_ONCE = 4096
_EVALUATION_BATCH = 512

Kind = Literal["PIL", "tensors"]
Loader = DataLoader[tuple[Tensor, int]]


class Batches(Protocol):
    """Images and targets, as many times as asked."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def __len__(self) -> int: ...


def _split(config: RunConfig, dataset: Dataset) -> tuple[Tensor, Tensor]:
    return stratified_split(dataset.train.labels_N, config.data.validation_fraction, config.data.split_seed)


def picture_like_images(num: int, side: int = 32) -> Tensor:
    """uint8 [N, 3, side, side]: smooth fields with a little noise. White noise would flatter histograms and lookups."""
    generator = torch.Generator().manual_seed(0)
    images = torch.empty(num, 3, side, side, dtype=torch.uint8)
    for part in images.split(_DRAWN_AT_ONCE):  # in float they would take four times the memory
        coarse = torch.rand(len(part), 3, 5, 5, generator=generator) * 255
        smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")
        part.copy_((smooth + 10 * torch.randn(smooth.shape, generator=generator)).clamp(0, 255))
    return images


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
        v2.RandomCrop(images.shape[-1], padding=PADDING),
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
    """One run of a protocol, epoch by epoch: eager, on the batches of a DataLoader with Modern's augmentations."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, device: torch.device, *, num_workers: int, kind: Kind = "PIL"
    ) -> None:
        protocol = config.protocol
        split = _split(config, dataset)

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
                pin_memory=device.type == "cuda",
                training=training,
            )

        self.training: Batches = loader(split[0], training=True)
        self.validation: Batches = loader(split[1], training=False)
        self._prepare(config, dataset, device)

    def _prepare(self, config: RunConfig, dataset: Dataset, device: torch.device) -> None:
        protocol, on_gpu = config.protocol, device.type == "cuda"
        self.device = device
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


class CompiledLoop(OrdinaryLoop):
    """The loop that one writes by hand for speed: images on the device, no augmentation, `torch.compile` on a GPU."""

    def __init__(self, config: RunConfig, dataset: Dataset, device: torch.device) -> None:
        training_N, validation_N = _split(config, dataset)
        images, labels = dataset.train.images_NCHW.to(device), dataset.train.labels_N.to(device)
        size, place = config.protocol.batch_size, {"mean": dataset.mean, "std": dataset.std}
        self.training = _OnDevice(images, labels, training_N.to(device), size, training=True, **place)
        self.validation = _OnDevice(images, labels, validation_N.to(device), _EVALUATION_BATCH, training=False, **place)
        self._prepare(config, dataset, device)
        if device.type == "cuda":  # on a CPU it takes minutes to compile and gains little
            self.model.compile()


class _OnDevice:
    """Batches of images that lie on the device: whole ones in random order, or all in order."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        index_N: Tensor,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        training: bool,
    ) -> None:
        self.images, self.labels, self.index_N, self.batch_size = images, labels, index_N, batch_size
        self.mean_C11, self.std_C11 = (
            255 * torch.tensor(values, device=images.device).view(-1, 1, 1) for values in (mean, std)
        )
        self.training = training

    def __len__(self) -> int:
        num = len(self.index_N)
        return num // self.batch_size if self.training else -(-num // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        index_N = self.index_N
        if self.training:
            index_N = index_N[torch.randperm(len(index_N), device=index_N.device)]
        for index_B in index_N.split(self.batch_size)[: len(self)]:
            yield (self.images[index_B] - self.mean_C11) / self.std_C11, self.labels[index_B]
