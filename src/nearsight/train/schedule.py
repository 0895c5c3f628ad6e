"""The learning rate over training: linear warm-up, then half a cosine (S1 §4.3.1) or a straight line (S2 §5.1) down."""

import torch
from torch import Tensor

from nearsight.train.protocol import Protocol

TRIANGLE_FLOOR = 1e-7
"""Learning rate at both ends of the triangular schedule (S2)."""


def learning_rates(protocol: Protocol, epoch: int, steps_per_epoch: int) -> Tensor:
    """The learning rate of every step of an epoch (counted from 0), float64 [steps].

    Cosine: step s of the warm-up's w steps gets (s + 1) / w of the peak, so that the first step already moves and the
    last one is at the peak; it then ends at zero with the last step of the last epoch. Triangular: the first step is at
    the floor, the one after the warm-up at the peak, and the one that would come after the last at the floor again.
    """
    done = torch.arange(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch, dtype=torch.float64)
    warmup = min(protocol.warmup_epochs, protocol.max_epochs) * steps_per_epoch
    total = protocol.max_epochs * steps_per_epoch
    if protocol.schedule == "triangular":
        height = torch.where(done < warmup, done / max(warmup, 1), (total - done) / max(total - warmup, 1))
        return TRIANGLE_FLOOR + (protocol.peak_lr - TRIANGLE_FLOOR) * height
    step = done + 1
    rising = step / max(warmup, 1)
    falling = 0.5 * (1 + torch.cos(torch.pi * (step - warmup) / max(total - warmup, 1)))
    return protocol.peak_lr * torch.where(step <= warmup, rising, falling)
