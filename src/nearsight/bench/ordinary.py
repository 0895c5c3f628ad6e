"""The training loop as people write it: one model, eager, a DataLoader, torch's AdamW. The peer of the stacked engine.

It trains by the same protocol on the same split. What costs nothing to do well is done well: fused AdamW, pinned
memory and persistent workers, no wait for the device within an epoch.
"""

import math
from collections.abc import Callable

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from nearsight.bench.loader import Kind, Loader, torchvision_loader
from nearsight.data import Dataset, stratified_split
from nearsight.train import RunConfig

_EVALUATION_BATCH = 512


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
