"""The learning rate over training: linear warm-up, then half a cosine down to zero (S1 §4.3.1)."""

import torch
from torch import Tensor

from nearsight.train.protocol import Protocol


def learning_rates(protocol: Protocol, epoch: int, steps_per_epoch: int) -> Tensor:
    """The learning rate of every step of an epoch (counted from 0), float64 [steps].

    Step s of the warm-up's w steps gets (s + 1) / w of the peak, so that the first step already moves and the last one
    is at the peak; the cosine then ends at zero with the last step of the last epoch.
    """
    step = torch.arange(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch, dtype=torch.float64) + 1
    warmup = min(protocol.warmup_epochs, protocol.max_epochs) * steps_per_epoch
    total = protocol.max_epochs * steps_per_epoch
    rising = step / max(warmup, 1)
    falling = 0.5 * (1 + torch.cos(torch.pi * (step - warmup) / max(total - warmup, 1)))
    return protocol.lr * torch.where(step <= warmup, rising, falling)
