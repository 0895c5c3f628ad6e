"""The scale of a loss whose gradients are float16, so that small ones are not rounded to 0.

Each cell has its own, as `torch.amp.GradScaler` would for a model: it doubles after so many steps without an overflow,
and after one with it is halved, and the step is skipped. All of it lies on the device, and is part of a checkpoint.

Shape suffixes: K cells, P parameters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.train.optimizer import AdamW

FIRST_SCALE = 2.0**16
_GROWTH, _BACKOFF, _STEPS_TO_GROWTH = 2.0, 0.5, 2000


@dataclass
class LossScale:
    """Of K cells. `step` updates it in place."""

    scale_K: Tensor
    """By which losses are multiplied, float32."""
    finite_steps_K: Tensor
    """Steps without an overflow since the scale was last changed."""

    @classmethod
    def start(cls, num_cells: int, device: torch.device) -> "LossScale":
        steps_K = torch.zeros(num_cells, dtype=torch.int64, device=device)
        return cls(torch.full((num_cells,), FIRST_SCALE, device=device), steps_K)

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [self.scale_K, self.finite_steps_K]

    @torch.no_grad()
    def step(self, optimizer: AdamW, scaled_gradient_KP: Tensor, lr_K: Tensor) -> None:
        """An update with the gradient of the scaled losses, of those cells whose gradient is finite."""
        gradient_KP = scaled_gradient_KP * self.scale_K.double().reciprocal().float().unsqueeze(1)
        is_finite_K = gradient_KP.isfinite().all(dim=1)
        before = [tensor.clone() for tensor in optimizer.state]
        optimizer.step(gradient_KP, lr_K)
        for tensor, old in zip(optimizer.state, before, strict=True):
            stays_K = is_finite_K.view(-1, *[1] * (tensor.dim() - 1))
            tensor.copy_(torch.where(stays_K, tensor, old))
        self._update(is_finite_K)

    def _update(self, is_finite_K: Tensor) -> None:
        self.finite_steps_K.add_(1).mul_(is_finite_K)
        grows_K = self.finite_steps_K >= _STEPS_TO_GROWTH
        grown_K = self.scale_K * _GROWTH
        larger_K = torch.where(grows_K & grown_K.isfinite(), grown_K, self.scale_K)
        self.scale_K.copy_(torch.where(is_finite_K, larger_K, self.scale_K * _BACKOFF))
        self.finite_steps_K.mul_(~grows_K)

    def put(self, position: int) -> None:
        """Begin another cell in the place of one."""
        self.scale_K[position] = FIRST_SCALE
        self.finite_steps_K[position] = 0

    def select(self, keep: Tensor) -> "LossScale":
        """That of the cells at these positions."""
        return LossScale(self.scale_K[keep], self.finite_steps_K[keep])
