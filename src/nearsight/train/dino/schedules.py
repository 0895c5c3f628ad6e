"""What changes from step to step: learning rate, weight decay, the teacher's momentum and temperature."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.train.dino.config import DinoProtocol

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
