"""How student and teacher train: the step, the epoch, and the state that both need to go on.

Shape suffixes: S steps, B samples, P prototypes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.data import Dataset, DeviceImages, epoch_batches
from nearsight.errors import InputError
from nearsight.train.dino.config import DinoConfig
from nearsight.train.dino.loss import dino_loss, entropy, next_centre, teacher_distributions
from nearsight.train.dino.networks import Student, build_network
from nearsight.train.dino.schedules import Schedules
from nearsight.train.dino.views import MultiCrop
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
    """Effective number: e to the entropy of its mean distribution."""
    information: float
    """Nats that the prototypes tell about the image: entropy of the mean less mean of the entropies."""
    centre_norm: float


class DinoTraining:
    """Student, teacher, centre and optimiser on one device."""

    def __init__(
        self, config: DinoConfig, dataset: Dataset, device: torch.device, processes: Processes | None = None
    ) -> None:
        self.config, self.device = config, device
        self._processes = processes or Processes()
        protocol = config.protocol
        num_images = len(dataset.train)
        if num_images < protocol.batch_size:
            raise InputError(f"{num_images} training images do not fill one batch of {protocol.batch_size}")
        self._processes.check(protocol.batch_size)
        self.steps_per_epoch = num_images // protocol.batch_size
        self.schedules = Schedules.of(protocol, self.steps_per_epoch)
        self.teacher = build_network(config, dataset.image_size).to(device).requires_grad_(False)
        self.student = Student(build_network(config, dataset.image_size).to(device), protocol.drop_path, device)
        self.centre_P = torch.zeros(protocol.num_prototypes, device=device)
        self._weights = dict(self.student.network.named_parameters())
        # Decay is done by hand: it changes with every step, which this optimiser would need a new program for.
        self._optimizer = torch.optim.AdamW(self._weights.values(), weight_decay=0.0, fused=device.type == "cuda")
        self._images = DeviceImages(dataset.train, device)
        self._crop = MultiCrop(config.crops, dataset, config.seed, device)
        self._sums = _Sums(protocol.num_prototypes, device)

    def run_epoch(self, epoch: int, on_step: Callable[[int], None] = lambda _: None) -> EpochResult:
        """Train on every image once, but for an incomplete last batch. `on_step` hears of the steps done; it may
        raise."""
        seed_K = torch.tensor([self.config.seed], device=self.device)
        batches_SB = epoch_batches(seed_K, epoch, len(self._images), self.config.protocol.batch_size)[:, 0]
        mine_SB = self._processes.share(batches_SB)
        self._sums = _Sums(self.config.protocol.num_prototypes, self.device)
        stream = self._images.stream(self._images.positions(mine_SB))
        for step, (index_B, (images_BCHW, _)) in enumerate(zip(mine_SB, stream, strict=True)):
            self._step(images_BCHW, index_B, epoch, step)
            on_step(step + 1)
        return self._result((epoch + 1) * self.steps_per_epoch - 1)

    def _step(self, images_BCHW: Tensor, index_B: Tensor, epoch: int, step: int) -> None:
        number = epoch * self.steps_per_epoch + step
        protocol = self.config.protocol
        views = self._crop(images_BCHW, index_B, epoch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            with torch.no_grad():
                cosines_GBP = self.teacher([views.global_GBCHW])
            student_VBP = self.student(views)
        with torch.no_grad():
            temperature = float(self.schedules.temperature[number])
            teacher_GBP = teacher_distributions(cosines_GBP, self.centre_P, temperature)
        loss = dino_loss(student_VBP, teacher_GBP, protocol.student_temperature)
        for weight in self._weights.values():
            weight.grad = None
        loss.backward()
        self._update(number, frozen=epoch < protocol.frozen_epochs)
        (mean_P,) = self._processes.averaged([cosines_GBP.float().mean((0, 1))])
        self.centre_P = next_centre(self.centre_P, mean_P, protocol.centre_momentum)
        self._sums.add(loss.detach(), teacher_GBP)

    @torch.no_grad()
    def _update(self, number: int, *, frozen: bool) -> None:
        """AdamW on the student, with each parameter's gradient clipped by itself, then the teacher follows."""
        if frozen:
            self._weights[_PROTOTYPES].grad = None
        moved = [weight for weight in self._weights.values() if weight.grad is not None]
        gradients = self._processes.averaged([weight.grad for weight in moved if weight.grad is not None])
        # In tensors, not numbers: asking the device for a norm would wait for it.
        norms = torch.stack(torch._foreach_norm(gradients))
        scales = (self.config.protocol.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, list(scales.unbind()))
        for weight, gradient in zip(moved, gradients, strict=True):
            weight.grad = gradient
        lr, decay = float(self.schedules.lr[number]), float(self.schedules.weight_decay[number])
        torch._foreach_mul_([weight for weight in moved if weight.ndim > 1], 1 - lr * decay)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        teachers: list[Tensor] = list(self.teacher.parameters())
        momentum = float(self.schedules.momentum[number])
        torch._foreach_lerp_(teachers, list(self._weights.values()), 1 - momentum)

    def _result(self, last: int) -> EpochResult:
        self._sums.totals = self._processes.averaged(self._sums.totals)
        loss, entropy_sum, mean_P = self._sums.means()
        spread = float(entropy(mean_P))
        return EpochResult(
            loss=float(loss),
            lr=float(self.schedules.lr[last]),
            weight_decay=float(self.schedules.weight_decay[last]),
            momentum=float(self.schedules.momentum[last]),
            teacher_entropy=float(entropy_sum),
            prototypes_used=float(torch.tensor(spread).exp()),
            information=spread - float(entropy_sum),
            centre_norm=float(torch.linalg.vector_norm(self.centre_P)),
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that training further depends on, apart from the epoch: randomness has no state."""
        state = {f"student/{name}": weight.detach().clone() for name, weight in self._weights.items()}
        state |= {f"teacher/{name}": weight.clone() for name, weight in self.teacher.named_parameters()}
        for name, weight in self._weights.items():
            for part, value in self._optimizer.state.get(weight, {}).items():
                state[f"optimizer/{part}/{name}"] = value.clone()
        return state | {"centre": self.centre_P.clone()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        teachers = dict(self.teacher.named_parameters())
        for group, weights in (("student", self._weights), ("teacher", teachers)):
            for name, weight in weights.items():
                weight.copy_(state[f"{group}/{name}"])
        self.centre_P = state["centre"].to(self.device)
        for key, value in state.items():
            group, _, rest = key.partition("/")
            if group == "optimizer":
                part, _, name = rest.partition("/")
                place = torch.device("cpu") if part == "step" and self.device.type != "cuda" else self.device
                self._optimizer.state[self._weights[name]][part] = value.to(place)


class _Sums:
    """What is summed over the steps of an epoch, on the device."""

    def __init__(self, num_prototypes: int, device: torch.device) -> None:
        shapes: tuple[tuple[int, ...], ...] = ((), (), (num_prototypes,))
        self.totals = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
        self._num_steps = 0

    def add(self, loss: Tensor, teacher_GBP: Tensor) -> None:
        for total, value in zip(
            self.totals, (loss, entropy(teacher_GBP).mean(), teacher_GBP.mean((0, 1))), strict=True
        ):
            total += value
        self._num_steps += 1

    def means(self) -> list[Tensor]:
        """Loss, entropy of the teacher's distributions, and their mean [P]."""
        return [total / self._num_steps for total in self.totals]
