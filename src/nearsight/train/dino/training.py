"""How student and teacher train: the epoch, and the state that is needed to go on.

Shape suffixes: S steps, B samples, P prototypes.
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
from nearsight.train.capture import Advance
from nearsight.train.dino.config import DinoConfig
from nearsight.train.dino.loss import entropy
from nearsight.train.dino.networks import DinoNetwork, NetworkCode, build_network
from nearsight.train.dino.schedules import Schedules
from nearsight.train.dino.step import Step
from nearsight.train.dino.views import MultiCrop
from nearsight.train.dino.weights import Pair
from nearsight.train.processes import Processes

_PROTOTYPES = "head.prototypes"


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
    """Nats that the prototypes tell about the images of a batch: entropy of the mean less mean of the entropies."""
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
        # What processes tell each other within a step is in no graph.
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
