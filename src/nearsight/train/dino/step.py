"""One step of student and teacher: views → teacher → student → loss → backward → AdamW → teacher → centre, as a program
without arguments.

Whatever changes from step to step lies on the device (which images, the schedules, how far training is), and the step
finds its place by itself. So on CUDA it is captured as one graph and replayed: the host neither decides nor waits for
anything within an epoch.

Shape suffixes: S steps, B samples, C channels, H rows, W columns, G global views, V views, P prototypes.
"""

import torch
from torch import Tensor

from nearsight.data import DeviceImages
from nearsight.train.dino.config import DinoProtocol
from nearsight.train.dino.loss import dino_loss, entropy, next_centre, teacher_distributions
from nearsight.train.dino.networks import NetworkCode
from nearsight.train.dino.schedules import Schedules
from nearsight.train.dino.views import MultiCrop
from nearsight.train.dino.weights import Pair
from nearsight.train.processes import Processes
from nearsight.train.stacked import Weights
from nearsight.train.step import Advance, captured


class Step:
    """Calling it trains on the next batch."""

    def __init__(
        self,
        protocol: DinoProtocol,
        network: NetworkCode,
        body: Pair,
        prototypes: Pair,
        crop: MultiCrop,
        images: DeviceImages,
        schedules: Schedules,
        index_SB: Tensor,
        processes: Processes,
    ) -> None:
        """`index_SB`: for the positions of an epoch's images."""
        self.protocol, self.network, self.body, self.prototypes = protocol, network, body, prototypes
        self.crop, self.images, self.index_SB, self.processes = crop, images, index_SB, processes
        self.schedules = schedules.to(images.device)
        self.frozen = False
        """Whether the prototypes stay as they are."""
        self.number = torch.zeros(1, dtype=torch.int64, device=images.device)
        """Steps done since training began."""
        self.centre_P = torch.zeros(protocol.num_prototypes, device=images.device)
        shapes: tuple[tuple[int, ...], ...] = ((), (), (), (protocol.num_prototypes,))
        self.totals = [torch.zeros(shape, dtype=torch.float64, device=images.device) for shape in shapes]
        """Sums over this epoch's steps: loss, mean entropy of the teacher's distributions, entropy of their mean, and
        that mean [P]."""

    def begin(self, epoch: int, index_SB: Tensor) -> None:
        """Go to the start of an epoch."""
        self.index_SB.copy_(index_SB)
        self.number.fill_(epoch * len(index_SB))
        self.frozen = epoch < self.protocol.frozen_epochs
        for total in self.totals:
            total.zero_()

    def __call__(self, batch_BCHW: Tensor | None = None) -> None:
        """`batch_BCHW`: the images, where they do not lie on the device."""
        steps_per_epoch = len(self.index_SB)
        index_B = self.index_SB.index_select(0, self.number % steps_per_epoch)[0]
        images_BCHW = self.images.gather(index_B) if batch_BCHW is None else batch_BCHW
        views = self.crop(images_BCHW, index_B, self.number[0] // steps_per_epoch)
        now = self.schedules.at(self.number)
        with torch.no_grad():
            cosines_GBP = self.network(self.body.teacher | self.prototypes.teacher, [views.global_GBCHW])
            teacher_GBP = teacher_distributions(cosines_GBP, self.centre_P, now.temperature)
        rows = [pair.optimizer.weights_KP.detach().requires_grad_() for pair in (self.body, self.prototypes)]
        student_VBP = self.network(self._student(rows), views.batches, views.draws)
        loss = dino_loss(student_VBP, teacher_GBP, self.protocol.student_temperature)
        learning = [self.body] if self.frozen else [self.body, self.prototypes]
        gradients = torch.autograd.grad(loss, rows[: len(learning)])
        for pair, gradient_KP in zip(learning, self.processes.averaged(gradients), strict=True):
            pair.update(gradient_KP, now.lr, now.weight_decay, clip_norm=self.protocol.clip_norm)
        for pair in (self.body, self.prototypes):
            pair.follow(now.share)
        mean_P, said_P = self.processes.averaged([cosines_GBP.float().mean((0, 1)), teacher_GBP.mean((0, 1))])
        self.centre_P.copy_(next_centre(self.centre_P, mean_P, self.protocol.centre_momentum))
        # The mean's entropy step by step: from one to the next the teacher itself changes, whatever the images.
        summands = (loss.detach(), entropy(teacher_GBP).mean(), entropy(said_P), said_P)
        for total, summand in zip(self.totals, summands, strict=True):
            total += summand
        self.number += 1

    def captured(self) -> Advance:
        """The step as one graph, for as long as `frozen` is what it is."""
        return captured(self, self.state, self.images.device)

    def _student(self, rows: list[Tensor]) -> Weights:
        views = [
            pair.optimizer.arrangement.views(row_KP)
            for pair, row_KP in zip((self.body, self.prototypes), rows, strict=True)
        ]
        return views[0] | views[1]

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [*self.body.state, *self.prototypes.state, self.centre_P, *self.totals, self.number]
