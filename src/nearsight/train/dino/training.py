"""How student and teacher train: the step, the epoch, and the state that is needed to go on.

A step is views → teacher → student → loss → backward → AdamW → teacher → centre, as a program without arguments.
Whatever changes from step to step lies on the device (which images, the schedules, how far training is), and the step
finds its place by itself. So on CUDA it is captured as one graph and replayed: the host neither decides nor waits for
anything within an epoch.

Shape suffixes: S steps, B samples, C channels, H rows, W columns, G global views, V views (the global ones first), P
prototypes.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nearsight.augment.pipeline import CompiledPipeline
from nearsight.data import Dataset, DeviceImages, epoch_batches
from nearsight.errors import InputError
from nearsight.train.dino.config import DinoConfig, DinoProtocol
from nearsight.train.dino.networks import DinoNetwork, NetworkCode, Pair, build_network
from nearsight.train.dino.views import MultiCrop
from nearsight.train.processes import Processes
from nearsight.train.stacked import Weights
from nearsight.train.step import Advance, captured

_PROTOTYPES = "head.prototypes"
_IMAGES_OF_LR = 256
"""Images per step that the learning rate is given for; it grows in proportion."""


@dataclass(frozen=True)
class Now:
    """The values of one step, each float32 [1]."""

    lr: Tensor
    weight_decay: Tensor
    share: Tensor
    """Of its way to the student that the teacher goes: 1 less its momentum."""
    temperature: Tensor


@dataclass(frozen=True)
class Schedules:
    """A value for every step of the training, each float64 [steps]."""

    lr: Tensor
    weight_decay: Tensor
    momentum: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, protocol: DinoProtocol, steps_per_epoch: int) -> "Schedules":
        num_steps = protocol.epochs * steps_per_epoch
        peak = protocol.lr * protocol.batch_size / _IMAGES_OF_LR
        warmup = min(protocol.warmup_epochs, protocol.epochs) * steps_per_epoch
        return cls(
            lr=cosine(peak, protocol.min_lr, num_steps, warmup_steps=warmup),
            weight_decay=cosine(protocol.weight_decay, protocol.weight_decay_end, num_steps),
            momentum=cosine(protocol.momentum, 1.0, num_steps),
            temperature=_temperatures(protocol).repeat_interleave(steps_per_epoch),
        )

    def to(self, device: torch.device) -> "Schedules":
        return Schedules(*(values.to(device) for values in vars(self).values()))

    def at(self, number: Tensor) -> Now:
        """At the step with this number, int64 [1], which lies where the schedules do."""
        lr, weight_decay, momentum, temperature = (values.index_select(0, number) for values in vars(self).values())
        # The difference first: near 1 momentum has no room for it in float32.
        return Now(*(value.float() for value in (lr, weight_decay, 1 - momentum, temperature)))


def cosine(start: float, end: float, num_steps: int, *, warmup_steps: int = 0) -> Tensor:
    """In a straight line from 0 to `start`, both included, then half a cosine towards `end`, which the step after the
    last would reach."""
    rising = torch.linspace(0, start, warmup_steps, dtype=torch.float64)
    num_falling = num_steps - warmup_steps
    done = torch.arange(num_falling, dtype=torch.float64) / max(num_falling, 1)
    return torch.cat((rising, end + 0.5 * (start - end) * (1 + torch.cos(math.pi * done))))


def _temperatures(protocol: DinoProtocol) -> Tensor:
    """By epoch."""
    warmup = min(protocol.temperature_warmup_epochs, protocol.epochs)
    first, last = protocol.teacher_temperature_start, protocol.teacher_temperature
    rising = torch.linspace(first, last, protocol.temperature_warmup_epochs, dtype=torch.float64)[:warmup]
    return torch.cat((rising, torch.full((protocol.epochs - warmup,), last, dtype=torch.float64)))


def teacher_distributions(cosines_GBP: Tensor, centre_P: Tensor, temperature: Tensor | float) -> Tensor:
    """Centred and sharpened: softmax((t − c) / τ), float32 [G, B, P]. Nothing flows back."""
    return torch.softmax((cosines_GBP.detach().float() - centre_P) / temperature, dim=-1)


def dino_loss(student_VBP: Tensor, teacher_GBP: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of each view of the student with each global view of the teacher, but for a view with itself.

    Args:
        student_VBP: cosines of the student.
        teacher_GBP: distributions of the teacher.
        temperature: of the student.
    """
    num_global, num_views = len(teacher_GBP), len(student_VBP)
    # Cross-entropy is linear in the target, so a view meets the sum of its targets: V passes, and not G · V.
    all_BP = teacher_GBP.sum(0)
    total = student_VBP.new_zeros((), dtype=torch.float32)
    for view, student_BP in enumerate(student_VBP):
        target_BP = all_BP - teacher_GBP[view] if view < num_global else all_BP
        log_BP = torch.log_softmax(student_BP.float() / temperature, dim=-1)
        total = total - (target_BP * log_BP).sum(-1).mean()
    return total / (num_global * (num_views - 1))


def next_centre(centre_P: Tensor, batch_mean_P: Tensor, momentum: float) -> Tensor:
    """The running mean of the teacher's cosines."""
    return momentum * centre_P + (1 - momentum) * batch_mean_P


def entropy(distribution: Tensor) -> Tensor:
    """In nats, over the last axis."""
    nats: Tensor = torch.special.entr(distribution).sum(-1)
    return nats


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


@dataclass(frozen=True)
class EpochResult:
    """Means over an epoch; learning rate, decay, momentum and centre are those of its last step."""

    loss: float
    lr: float
    weight_decay: float
    momentum: float
    teacher_entropy: float
    """Of the teacher's distribution of a view, in nats: 0 if it names one prototype."""
    prototypes_used: float
    """Effective number in the epoch: e to the entropy of its mean distribution."""
    information: float
    """Nats of information about the images of a batch: entropy of the mean less mean of the entropies."""
    centre_norm: float


class DinoTraining:
    """Student, teacher, centre and optimiser on one device."""

    def __init__(
        self, config: DinoConfig, dataset: Dataset, device: torch.device, processes: Processes | None = None
    ) -> None:
        self.config, self.device = config, device
        self._image_size, self._processes = dataset.image_size, processes or Processes()
        protocol = config.protocol
        num_images = len(dataset.train)
        if num_images < protocol.batch_size:
            raise InputError(
                f"{num_images} training images do not fill one batch of {protocol.batch_size}; take more of them, or a "
                "smaller batch"
            )
        self._processes.check(protocol.batch_size)
        self.steps_per_epoch = num_images // protocol.batch_size
        self.schedules = Schedules.of(protocol, self.steps_per_epoch)
        network = build_network(config, dataset.image_size)
        weights = dict(network.named_parameters())
        # Apart from the others: they learn later, and their optimiser counts its own steps.
        prototypes = {_PROTOTYPES: weights.pop(_PROTOTYPES)}
        self._pairs = {"body": Pair.start(weights, device), "prototypes": Pair.start(prototypes, device)}
        self._images = DeviceImages(dataset.train, device)
        # A compiled program rounds in its own way.
        compiled = device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        share = protocol.batch_size // self._processes.num
        self._step = Step(
            protocol,
            NetworkCode(network, config, dataset.image_size, device),
            self._pairs["body"],
            self._pairs["prototypes"],
            MultiCrop(config.crops, dataset, config.seed, device, compiled=CompiledPipeline() if compiled else None),
            self._images,
            self.schedules,
            torch.zeros(self.steps_per_epoch, share, dtype=torch.int64, device=device),
            self._processes,
        )
        self.centre_P = self._step.centre_P
        """The running mean of the teacher's cosines."""
        self._captured: tuple[bool, Advance] | None = None
        """The step as a graph, and whether prototypes rest in it."""

    @torch.no_grad()
    def network(self, which: Literal["student", "teacher"]) -> DinoNetwork:
        """A copy on the CPU, as it is now."""
        network, state = build_network(self.config, self._image_size), self._named()
        for name, weight in network.named_parameters():
            weight.copy_(state[f"{which}/{name}"])
        return network

    def run_epoch(self, epoch: int, on_step: Callable[[int], None] = lambda _: None) -> EpochResult:
        """Train on every image once, but for an incomplete last batch. `on_step` hears of the steps begun (a GPU may be
        behind); it may raise."""
        seed_K = torch.tensor([self.config.seed], device=self.device)
        batches_SB = epoch_batches(seed_K, epoch, len(self._images), self.config.protocol.batch_size)[:, 0]
        mine_SB = self._processes.share(batches_SB)
        self._step.begin(epoch, mine_SB)
        for number, advance in enumerate(self._steps(mine_SB)):
            advance()
            on_step(number + 1)
        return self._result((epoch + 1) * self.steps_per_epoch - 1)

    def _steps(self, index_SB: Tensor) -> Iterator[Advance]:
        """The steps of the epoch that has begun."""
        if not self._images.resident:
            for images_BCHW, _ in self._images.stream(self._images.positions(index_SB)):
                yield partial(self._step, images_BCHW)
            return
        # The exchange between processes within a step is in no graph.
        advance = self._graph() if self.device.type == "cuda" and self._processes.num == 1 else self._step
        yield from itertools.repeat(advance, self.steps_per_epoch)

    def _graph(self) -> Advance:
        if self._captured is None or self._captured[0] != self._step.frozen:
            self._captured = None  # first: its memory serves the next
            self._captured = self._step.frozen, self._step.captured()
        return self._captured[1]

    def _result(self, last: int) -> EpochResult:
        totals = self._processes.averaged(self._step.totals)
        loss, of_each, of_mean, said_P = (total / self.steps_per_epoch for total in totals)
        return EpochResult(
            loss=float(loss),
            lr=float(self.schedules.lr[last]),
            weight_decay=float(self.schedules.weight_decay[last]),
            momentum=float(self.schedules.momentum[last]),
            teacher_entropy=float(of_each),
            prototypes_used=math.exp(float(entropy(said_P))),
            information=float(of_mean - of_each),
            centre_norm=float(torch.linalg.vector_norm(self.centre_P)),
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that training further depends on, apart from the epoch: randomness has no state."""
        return {name: value.clone() for name, value in self._named().items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        # Into the same memory: a captured step looks nowhere else.
        for name, value in self._named().items():
            value.copy_(state[name])

    def _named(self) -> dict[str, Tensor]:
        named = {"centre": self.centre_P}
        for part, pair in self._pairs.items():
            named |= pair.named() | {f"optimizer/steps/{part}": pair.optimizer.steps_done_K}
        return named
