"""How K cells train as one program: the step, the epoch and the evaluation of a stack. K = 1 is one model.

A cell's numbers depend on its own config and on nothing else: its batches, augmentations and initial weights follow
from its seed, its weights meet only its own images, and its epoch is its own, so cells may join and leave at any epoch.

Shape suffixes: K cells, B samples, S steps, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.augment import Pipeline, normalize, smooth_targets
from nearsight.data import Dataset, DeviceImages, epoch_batches, stratified_split
from nearsight.errors import InputError
from nearsight.randomness import Draws
from nearsight.train.config import RunConfig
from nearsight.train.optimizer import AdamW
from nearsight.train.schedule import learning_rates
from nearsight.train.stacked import Weights, stack_weights, stacked_forward, verify_stacking, weightless

_EVALUATION_BATCH = 512


def initial_model(config: RunConfig, dataset: Dataset) -> nn.Module:
    """The run's model with the initial weights of its seed, made on the CPU so that they are the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return config.model.build(dataset.image_size, dataset.num_classes)


@dataclass(frozen=True)
class EpochResult:
    """What an epoch gave one cell. Losses are means; accuracy is a fraction."""

    train_loss: float
    val_loss: float
    val_acc: float
    lr: float
    """Learning rate of the epoch's last step."""


@dataclass
class Stack:
    """K cells of equal shapes, their weights and optimiser states, on one device."""

    configs: tuple[RunConfig, ...]
    skeleton: nn.Module
    optimizer: AdamW
    epochs_done: list[int]
    pipeline: Pipeline
    smoothing_K: Tensor
    images: DeviceImages
    """The official training set."""
    training_N: Tensor
    """Positions of the images that train."""
    validation_N: Tensor
    """Positions of those held out."""

    @classmethod
    def start(cls, configs: Sequence[RunConfig], dataset: Dataset, device: torch.device) -> "Stack":
        """The cells before their first step."""
        _check_alike(configs, dataset)
        models = [initial_model(config, dataset) for config in configs]
        protocols = [config.protocol for config in configs]
        optimizer = AdamW.start(
            stack_weights([dict(model.named_parameters()) for model in models], device),
            betas=protocols[0].betas,
            weight_decay=[protocol.weight_decay for protocol in protocols],
            decay_all=[protocol.decay_all for protocol in protocols],
            clip_norm=[protocol.clip_norm for protocol in protocols],
        )
        pipeline = Pipeline.stack(
            [protocol.augment for protocol in protocols],
            num_classes=dataset.num_classes,
            mean=dataset.mean,
            std=dataset.std,
            device=device,
        )
        skeleton = weightless(models[0])
        verify_stacking(skeleton, models, dataset.image_size)
        data = configs[0].data
        training_N, validation_N = stratified_split(dataset.train.labels_N, data.validation_fraction, data.split_seed)
        if len(training_N) < protocols[0].batch_size:
            raise InputError(f"{len(training_N)} training images do not fill one batch of {protocols[0].batch_size}")
        return cls(
            tuple(configs),
            skeleton,
            optimizer,
            [0] * len(configs),
            pipeline,
            torch.tensor([protocol.smoothing for protocol in protocols], device=device),
            DeviceImages(dataset.train, device),
            training_N.to(device),
            validation_N.to(device),
        )

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def weights(self) -> Weights:
        return self.optimizer.weights

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch; the images of a last partial batch wait for another epoch's order."""
        return len(self.training_N) // self.configs[0].protocol.batch_size

    def select(self, keep: Sequence[int]) -> "Stack":
        """The stack of the cells at these positions; the others' memory is given up."""
        index = torch.tensor(keep, device=self.device)
        return Stack(
            tuple(self.configs[k] for k in keep),
            self.skeleton,
            self.optimizer.select(index),
            [self.epochs_done[k] for k in keep],
            self.pipeline.select(index),
            self.smoothing_K[index],
            self.images,
            self.training_N,
            self.validation_N,
        )

    def run_epoch(self, on_step: Callable[[int], None] = lambda step: None) -> list[EpochResult]:
        """Train every cell for one epoch of its own and validate it. A cell whose loss is not finite reports that."""
        seed_K = torch.tensor([config.seed for config in self.configs], device=self.device)
        epoch_K = torch.tensor(self.epochs_done, device=self.device)
        batch_size, steps = self.configs[0].protocol.batch_size, self.steps_per_epoch
        index_SKB = self.training_N[epoch_batches(seed_K, epoch_K, len(self.training_N), batch_size)]
        lr_KS = torch.stack(
            [
                learning_rates(config.protocol, epoch, steps)
                for config, epoch in zip(self.configs, self.epochs_done, strict=True)
            ]
        ).to(self.device, torch.float32)
        loss_K = torch.zeros(len(self.configs), dtype=torch.float64, device=self.device)
        for step, (images_KBCHW, labels_KB) in enumerate(self.images.stream(self.images.positions(index_SKB))):
            draws = Draws(seed_K, epoch_K, torch.tensor(step, device=self.device), index_SKB[step])
            loss_K += self._step(images_KBCHW, labels_KB, draws, lr_KS[:, step])
            on_step(step + 1)
            # On the CPU asking is free; on a GPU it would wait for the step, so there a NaN is noticed at the end.
            if self.device.type == "cpu" and not torch.isfinite(loss_K).all():
                break
        self.epochs_done = [epoch + 1 for epoch in self.epochs_done]
        val_loss_K, val_acc_K = self.evaluate(self.images, self.validation_N)
        return [
            EpochResult(*values)
            for values in zip((loss_K / steps).tolist(), val_loss_K, val_acc_K, lr_KS[:, -1].tolist(), strict=True)
        ]

    def _step(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws, lr_K: Tensor) -> Tensor:
        """One optimiser step of every cell; the loss of each before it."""
        images, targets_KBC = self.pipeline(images_KBCHW, labels_KB, draws)
        targets_KBC = smooth_targets(targets_KBC, self.smoothing_K)
        weights_KP = self.optimizer.weights_KP.detach().requires_grad_()
        logits_KBC = self._forward(self.optimizer.arrangement.views(weights_KP), images)
        loss_K = -(targets_KBC * F.log_softmax(logits_KBC, -1)).sum(-1).mean(-1)
        # Cells share no weights, so the gradient of the sum is each cell's own gradient.
        (gradient_KP,) = torch.autograd.grad(loss_K.sum(), weights_KP)
        self.optimizer.step(gradient_KP, lr_K)
        return loss_K.detach()

    def _forward(self, weights: Weights, images_KBCHW: Tensor) -> Tensor:
        reduced = self.configs[0].precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=reduced):
            return stacked_forward(self.skeleton, weights, images_KBCHW).float()

    @torch.no_grad()
    def evaluate(
        self, images: DeviceImages, index_N: Tensor, weights: Weights | None = None
    ) -> tuple[list[float], list[float]]:
        """(mean cross-entropy, accuracy) of every cell on these images, without augmentation or smoothing."""
        weights = self.weights if weights is None else weights
        num_cells = len(next(iter(weights.values())))
        loss_K = torch.zeros(num_cells, dtype=torch.float64, device=self.device)
        correct_K = torch.zeros(num_cells, dtype=torch.int64, device=self.device)
        for images_BCHW, labels_B in images.stream(images.positions(index_N).split(_EVALUATION_BATCH)):
            normal = normalize(images_BCHW, self.pipeline.mean_C, self.pipeline.std_C)
            logits_KBC = self._forward(weights, normal.expand(num_cells, *normal.shape))
            labels_KB = labels_B.expand(num_cells, -1)
            loss_K += F.cross_entropy(logits_KBC.movedim(-1, 1), labels_KB, reduction="none").double().sum(-1)
            correct_K += (logits_KBC.argmax(-1) == labels_KB).sum(-1)
        return (loss_K / len(index_N)).tolist(), (correct_K.double() / len(index_N)).tolist()


def _check_alike(configs: Sequence[RunConfig], dataset: Dataset) -> None:
    """Cells of a stack share shapes; what may differ is in the optimiser, the augmentations and the seed."""
    for config in configs:
        if config.stack_key != configs[0].stack_key:
            raise InputError("cells of one stack differ in model shape, data, precision, batch size or betas")
        if dataset.name != config.data.name:
            raise InputError(f"the run is for {config.data.name}, but the data are {dataset.name}")
