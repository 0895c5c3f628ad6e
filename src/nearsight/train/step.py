"""One training step of a stack: augment → forward → backward → optimiser → metrics, as a program without arguments.

Whatever changes from step to step lies on the device (which images, which learning rates, how far the epoch is), and
the step finds its place by itself. So on CUDA it is captured once, as one graph, and replayed: the host neither decides
nor waits for anything within an epoch.

Shape suffixes: K cells, B samples, S steps of an epoch, C channels or classes, P parameters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.augment import Pipeline, smooth_targets
from nearsight.augment.compiled import CompiledPipeline
from nearsight.data import DeviceImages
from nearsight.randomness import Draws
from nearsight.train.droppath import PathDropping
from nearsight.train.optimizer import AdamW
from nearsight.train.stacked import Weights, stacked_forward
from nearsight.train.teacher import Teacher


@dataclass(frozen=True)
class Epoch:
    """Where the steps of an epoch find what is theirs."""

    seed_K: Tensor
    epoch_K: Tensor
    index_SKB: Tensor
    """Positions of the images."""
    lr_SK: Tensor

    def copy_(self, other: "Epoch") -> None:
        for name, tensor in vars(other).items():
            getattr(self, name).copy_(tensor)


class Step:
    """The step of some cells. Calling it trains every cell on its next batch."""

    def __init__(
        self,
        skeleton: nn.Module,
        optimizer: AdamW,
        statistics: Weights,
        pipeline: Pipeline,
        smoothing_K: Tensor,
        images: DeviceImages,
        epoch: Epoch,
        *,
        reduced: bool,
        augment: CompiledPipeline | None,
        dropping: PathDropping | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.skeleton, self.optimizer, self.statistics = skeleton, optimizer, statistics
        self.pipeline, self.smoothing_K, self.images, self.epoch = pipeline, smoothing_K, images, epoch
        self.reduced, self.augment, self.dropping, self.teacher = reduced, augment, dropping, teacher
        device = images.device
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        """Steps done in this epoch."""
        self.loss_K = torch.zeros(len(smoothing_K), dtype=torch.float64, device=device)
        """Sum of the losses of this epoch's steps, each before its update."""

    def begin(self, epoch: Epoch) -> None:
        """Go to the start of an epoch."""
        self.epoch.copy_(epoch)
        self.number.zero_()
        self.loss_K.zero_()

    def __call__(self, batch: tuple[Tensor, Tensor] | None = None) -> None:
        """`batch`: images and labels, where they do not lie on the device."""
        epoch = self.epoch
        index_KB = epoch.index_SKB.index_select(0, self.number)[0]
        images_KBCHW, labels_KB = batch or (self.images.gather(index_KB), self.images.labels(index_KB))
        draws = Draws(epoch.seed_K, epoch.epoch_K, self.number[0], index_KB)
        images, targets_KBC = self._augmented(images_KBCHW, labels_KB, draws)
        weights_KP = self.optimizer.weights_KP.detach().requires_grad_()
        weights = self.optimizer.arrangement.views(weights_KP) | self.statistics
        if self.dropping is not None:
            weights |= self.dropping(draws)
        if self.teacher is not None:
            # The loss is then the divergence from the teacher plus the teacher's own entropy, which has no gradient.
            targets_KBC = self.teacher(images, reduced=self.reduced)
        logits_KBC = stacked_forward(self.skeleton, weights, images, reduced=self.reduced)
        loss_K = -(targets_KBC * F.log_softmax(logits_KBC, -1)).sum(-1).mean(-1)
        # Cells share no weights, so the gradient of the sum is each cell's own gradient.
        (gradient_KP,) = torch.autograd.grad(loss_K.sum(), weights_KP)
        self.optimizer.step(gradient_KP, epoch.lr_SK.index_select(0, self.number)[0])
        self.loss_K += loss_K.detach()
        self.number += 1

    def _augmented(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        if self.augment is not None:
            return self.augment(self.pipeline, images_KBCHW, labels_KB, draws, self.smoothing_K)
        images, targets_KBC = self.pipeline(images_KBCHW, labels_KB, draws)
        return images, smooth_targets(targets_KBC, self.smoothing_K)

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        optimizer = self.optimizer
        return [
            optimizer.weights_KP,
            optimizer.first_KP,
            optimizer.second_KP,
            optimizer.steps_done_K,
            *self.statistics.values(),
            self.number,
            self.loss_K,
        ]
