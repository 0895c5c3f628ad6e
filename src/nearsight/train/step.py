"""One training step of a stack: augment → forward → backward → optimiser → metrics, as a program without arguments.

Whatever changes from step to step lies on the device (which images, which learning rates, how far the epoch is), and
the step finds its place by itself. So on CUDA it is captured once, as one graph, and replayed: the host neither decides
nor waits for anything within an epoch.

One of several processes steps on its share of the batch, and gradients are added up before the optimiser sees them.

Shape suffixes: K cells, B samples, S steps of an epoch, C channels or classes, P parameters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.augment import Pipeline, smooth_targets
from nearsight.augment.pipeline import CompiledPipeline
from nearsight.data import DeviceImages
from nearsight.randomness import Draws
from nearsight.train.capture import Advance, captured
from nearsight.train.droppath import PathDropping
from nearsight.train.optimizer import AdamW
from nearsight.train.share import Share
from nearsight.train.stacked import Weights, stacked_forward
from nearsight.train.teacher import Teacher


@dataclass(frozen=True)
class Epoch:
    """Where the steps of an epoch find what is theirs."""

    seed_K: Tensor
    epoch_K: Tensor
    index_SKB: Tensor
    """Positions of the images; of a share, those it needs."""
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
        share: Share | None = None,
    ) -> None:
        """`share`: what of a batch this process does; None: all of it."""
        self.skeleton, self.optimizer, self.statistics = skeleton, optimizer, statistics
        self.pipeline, self.smoothing_K, self.images, self.epoch = pipeline, smoothing_K, images, epoch
        self.reduced, self.augment, self.dropping, self.teacher = reduced, augment, dropping, teacher
        self.share = share
        device = images.device
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        """Steps done in this epoch."""
        self.loss_K = torch.zeros(len(smoothing_K), dtype=torch.float64, device=device)
        """Sum of the losses of this epoch's steps, each before its update; of a share, its part of them."""

    def begin(self, epoch: Epoch) -> None:
        """Go to the start of an epoch."""
        self.epoch.copy_(epoch)
        self.number.zero_()
        self.loss_K.zero_()

    def __call__(self, batch: tuple[Tensor, Tensor] | None = None) -> None:
        """`batch`: images and labels, where they do not lie on the device."""
        gradient_KP = self._differentiate(batch)
        if self.share is not None:
            self.share.sum_(gradient_KP)
        self._update(gradient_KP)

    def captured(self) -> Advance:
        """The step as one graph. With a share it is two, and what the processes tell each other between them in none:
        whether a graph may hold that depends on versions and settings of the library that does it.

        With a share this has not run yet: it needs two GPUs.
        """
        device = self.images.device
        if self.share is None:
            return captured(self, self.state, device)
        share, gradient_KP = self.share, torch.empty_like(self.optimizer.weights_KP)

        def differentiate() -> None:
            gradient_KP.copy_(self._differentiate())

        first = captured(differentiate, self.state, device)
        second = captured(lambda: self._update(gradient_KP), self.state, device)

        def advance() -> None:
            first()
            share.sum_(gradient_KP)
            second()

        return advance

    def _differentiate(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The gradient [K, P] of the next batch."""
        epoch = self.epoch
        index_KB = epoch.index_SKB.index_select(0, self.number)[0]
        images_KBCHW, labels_KB = batch or (self.images.gather(index_KB), self.images.labels(index_KB))
        draws = Draws(epoch.seed_K, epoch.epoch_K, self.number[0], index_KB)
        images, targets_KBC = self._augmented(images_KBCHW, labels_KB, draws)
        if self.share is not None:
            images, targets_KBC, draws = self.share.own(images, targets_KBC, draws)
        weights_KP = self.optimizer.weights_KP.detach().requires_grad_()
        weights = self.optimizer.arrangement.views(weights_KP) | self.statistics
        if self.dropping is not None:
            weights |= self.dropping(draws)
        if self.teacher is not None:
            # The loss is then the divergence from the teacher plus the teacher's own entropy, which has no gradient.
            targets_KBC = self.teacher(images, reduced=self.reduced)
        logits_KBC = stacked_forward(self.skeleton, weights, images, reduced=self.reduced)
        loss_K = -(targets_KBC * F.log_softmax(logits_KBC, -1)).sum(-1).mean(-1)
        if self.share is not None:
            loss_K = self.share.weighted(loss_K)
        # Cells share no weights, so the gradient of the sum is each cell's own gradient.
        (gradient_KP,) = torch.autograd.grad(loss_K.sum(), weights_KP)
        self.loss_K += loss_K.detach()
        return gradient_KP

    def _update(self, gradient_KP: Tensor) -> None:
        self.optimizer.step(gradient_KP, self.epoch.lr_SK.index_select(0, self.number)[0])
        self.number += 1

    def _augmented(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        if self.augment is not None:
            return self.augment(self.pipeline, images_KBCHW, labels_KB, draws, self.smoothing_K)
        images, targets_KBC = self.pipeline(images_KBCHW, labels_KB, draws)
        return images, smooth_targets(targets_KBC, self.smoothing_K)

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [*self.optimizer.state, *self.statistics.values(), self.number, self.loss_K]
