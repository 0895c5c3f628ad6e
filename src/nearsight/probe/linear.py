"""A linear classifier on frozen features, for a grid of learning rates and weight decays at once.

K heads see the same batches. Their logits are one matrix product, [B, C] × [C, K·c], and so are their gradients; each
head has its own learning rate and decay. The best by validation is the result, and it alone sees the test features.

Shape suffixes: N samples, B samples of a batch, C channels, K heads, c classes, H rows, W columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.augment import HorizontalFlip, Pipeline, ResizedCrop
from nearsight.data import ImageSet, epoch_batches, stratified_split
from nearsight.errors import InputError
from nearsight.probe.features import FeatureReader
from nearsight.probe.frozen import Preparation
from nearsight.probe.knn import check_classes_seen
from nearsight.probe.settings import LinearConfig
from nearsight.randomness import Draws

_EPS = 1e-8
_EVALUATED_AT_ONCE = 8192


@dataclass(frozen=True, kw_only=True)
class HeadScore:
    """One head of the grid."""

    learning_rate: float
    weight_decay: float
    validation_accuracy: float


@dataclass(frozen=True, kw_only=True)
class LinearResult:
    """What a linear probe found."""

    test_accuracy: float
    """Of the best head by validation."""
    best: HeadScore
    heads: tuple[HeadScore, ...]
    """All of the grid."""
    right_N: Tensor
    """For which test samples the best head is right, bool."""
    weight_Cc: Tensor
    """Of the best head."""
    bias_c: Tensor


class Heads:
    """K linear classifiers of the same features, and the state of their optimiser."""

    def __init__(self, config: LinearConfig, num_channels: int, num_classes: int, device: torch.device) -> None:
        self.config, self.num_classes = config, num_classes
        self.num_heads = len(config.grid)
        # All heads start with the same weights, with the deviation of DINO's.
        generator = torch.Generator().manual_seed(config.seed)
        weight_Cc = torch.randn(num_channels, num_classes, generator=generator) * 0.01
        self.weight_CKc = weight_Cc.unsqueeze(1).repeat(1, self.num_heads, 1).to(device)
        self.bias_Kc = torch.zeros(self.num_heads, num_classes, device=device)
        parameters = (self.weight_CKc, self.bias_Kc)
        self._first, self._second = ([torch.zeros_like(tensor) for tensor in parameters] for _ in range(2))
        rates, decays = zip(*config.grid, strict=True)
        self._rate_K1 = torch.tensor(rates, device=device).unsqueeze(-1) * config.batch_size / 256
        self._decay_K1 = torch.tensor(decays, device=device).unsqueeze(-1)
        self._steps = 0

    def logits(self, features_BC: Tensor) -> Tensor:
        """[B, K, c]."""
        flat = torch.addmm(self.bias_Kc.flatten(), features_BC, self.weight_CKc.flatten(1))
        return flat.view(-1, self.num_heads, self.num_classes)

    def step(self, features_BC: Tensor, labels_B: Tensor, schedule: float) -> None:
        """One step of every head on its mean cross-entropy; `schedule` multiplies the learning rates."""
        # The gradient of the cross-entropy is written down: softmax − truth.
        error_BKc = self.logits(features_BC).softmax(-1)
        error_BKc -= F.one_hot(labels_B, self.num_classes).unsqueeze(1)
        error_BKc /= len(labels_B)
        gradients = ((features_BC.T @ error_BKc.flatten(1)).view_as(self.weight_CKc), error_BKc.sum(0))
        self._steps += 1
        update = self._sgd if self.config.optimizer == "sgd" else self._adamw
        for number, (weight, gradient) in enumerate(zip((self.weight_CKc, self.bias_Kc), gradients, strict=True)):
            update(number, weight, gradient, self._rate_K1 * schedule)

    def _sgd(self, number: int, weight: Tensor, gradient: Tensor, rate_K1: Tensor) -> None:
        velocity = self._first[number]
        velocity.mul_(self.config.momentum).add_(gradient + self._decay_K1 * weight)
        weight -= rate_K1 * velocity

    def _adamw(self, number: int, weight: Tensor, gradient: Tensor, rate_K1: Tensor) -> None:
        (beta1, beta2), first, second = self.config.betas, self._first[number], self._second[number]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (second / (1 - beta2**self._steps)).sqrt_().add_(_EPS)
        weight *= 1 - rate_K1 * self._decay_K1
        weight -= rate_K1 / (1 - beta1**self._steps) * first / deviation

    def right(self, features_NC: Tensor, labels_N: Tensor) -> Tensor:
        """For which samples each head is right: [N, K] bool on the CPU."""
        parts = zip(features_NC.split(_EVALUATED_AT_ONCE), labels_N.split(_EVALUATED_AT_ONCE), strict=True)
        device = self.bias_Kc.device
        return torch.cat(
            [
                (self.logits(features_BC.to(device)).argmax(-1) == labels_B.to(device).unsqueeze(1)).cpu()
                for features_BC, labels_B in parts
            ]
        )

    def keep(self, best: int) -> None:
        """Keep one head and free the others."""
        self.weight_CKc, self.bias_Kc = self.weight_CKc[:, [best]].contiguous(), self.bias_Kc[[best]]
        self.num_heads = 1


def linear_probe(
    train_NC: Tensor,
    train_labels_N: Tensor,
    test_NC: Tensor,
    test_labels_N: Tensor,
    *,
    num_classes: int,
    config: LinearConfig | None = None,
    device: torch.device | str = "cpu",
    crops: Callable[[Tensor, int], Tensor] | None = None,
) -> LinearResult:
    """Train the grid of heads on the training features, choose by validation, and test the chosen one once.

    `crops`: instead of the training features, (positions of training images, epoch) → features of random crops of them.
    """
    config, device = config or LinearConfig(), torch.device(device)
    check_classes_seen(train_labels_N, test_labels_N)
    training_n, validation_n = stratified_split(train_labels_N, config.validation_fraction, config.seed)
    check_classes_seen(train_labels_N[training_n], train_labels_N[validation_n], "validation")
    heads = Heads(config, train_NC.shape[1], num_classes, device)
    labels_N = train_labels_N.to(device)
    # They are read many times and in any order, so they should not stay on disk.
    stored_NC = train_NC.to(device, copy=True)
    batch_size = min(config.batch_size, len(training_n))
    for epoch in range(config.num_epochs):
        schedule = (1 + cos(pi * epoch / config.num_epochs)) / 2
        for order_1B in epoch_batches(torch.tensor([config.seed]), epoch, len(training_n), batch_size):
            place_B = training_n[order_1B[0]]
            features_BC = stored_NC[place_B.to(device)] if crops is None else crops(place_B, epoch).to(device)
            heads.step(features_BC, labels_N[place_B.to(device)], schedule)
    accuracy_K = heads.right(stored_NC[validation_n.to(device)], train_labels_N[validation_n]).double().mean(0)
    scores = tuple(
        HeadScore(learning_rate=rate, weight_decay=decay, validation_accuracy=float(accuracy))
        for (rate, decay), accuracy in zip(config.grid, accuracy_K, strict=True)
    )
    best = int(accuracy_K.argmax())
    heads.keep(best)
    right_N = heads.right(test_NC, test_labels_N)[:, 0]
    return LinearResult(
        test_accuracy=float(right_N.double().mean()),
        best=scores[best],
        heads=scores,
        right_N=right_N,
        weight_Cc=heads.weight_CKc[:, 0].cpu(),
        bias_c=heads.bias_Kc[0].cpu(),
    )


def cropped_features(
    reader: FeatureReader,
    images: ImageSet,
    preparation: Preparation,
    *,
    seed: int,
    batch_size: int,
    device: torch.device,
) -> Callable[[Tensor, int], Tensor]:
    """(positions of images, epoch) → features of their random resized crops, flipped or not, as DINO trains heads.

    They are computed again in every epoch, because every epoch has other crops.
    """
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
