"""AdamW on stacked weights: K models with their own learning rates and decays, in a handful of fused passes.

Per cell it is `torch.optim.AdamW`, which has no learning rate per slice of a tensor; the tests compare the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.train.stacked import Weights

_EPS = 1e-8


def decays(name: str, weight_K: Tensor) -> bool:
    """Whether weight decay belongs on a parameter: on matrices, not on norms, biases, CLS tokens and positions."""
    return weight_K.dim() - 1 >= 2 and not name.endswith(("cls_token", "pos_embed", "reg_token"))


@dataclass
class AdamW:
    """Optimiser state of K cells. `step` updates the weights in place."""

    weights: Weights
    first: Weights
    second: Weights
    steps_done_K: Tensor
    betas: tuple[float, float]
    weight_decay_K: Tensor
    decay_all_K: Tensor
    clip_norm_K: Tensor
    """Largest gradient norm of each cell; infinite for none."""
    clips: bool
    """Whether any cell clips; known to the host, so that asking costs no synchronisation."""

    @classmethod
    def start(
        cls,
        weights: Weights,
        *,
        betas: tuple[float, float],
        weight_decay: Sequence[float],
        decay_all: Sequence[bool],
        clip_norm: Sequence[float | None],
    ) -> "AdamW":
        device = next(iter(weights.values())).device
        zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        return cls(
            weights,
            zeros,
            {name: zero.clone() for name, zero in zeros.items()},
            torch.zeros(len(weight_decay), dtype=torch.int64, device=device),
            betas,
            torch.tensor(weight_decay, dtype=torch.float32, device=device),
            torch.tensor(decay_all, device=device),
            torch.tensor([torch.inf if norm is None else norm for norm in clip_norm], device=device),
            any(norm is not None for norm in clip_norm),
        )

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr_K: Tensor) -> None:
        """One update with each cell's learning rate."""
        self.steps_done_K += 1
        weights, first, second = (list(group.values()) for group in (self.weights, self.first, self.second))
        gradients = self._clipped(list(gradients)) if self.clips else list(gradients)
        beta1, beta2 = self.betas
        # Bias corrections in float64: 1 - 0.999^t loses half its digits in float32 at the first steps.
        correction1_K = 1 - beta1 ** self.steps_done_K.to(torch.float64)
        correction2_K = 1 - beta2 ** self.steps_done_K.to(torch.float64)
        torch._foreach_mul_(weights, self._shrinkage(lr_K))
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        denominator = torch._foreach_sqrt(second)
        root_K = correction2_K.sqrt().to(torch.float32)
        torch._foreach_div_(denominator, [_per_cell(root_K, weight) for weight in weights])
        torch._foreach_add_(denominator, _EPS)
        update = torch._foreach_div(first, denominator)
        scale_K = (lr_K / correction1_K).to(torch.float32)
        torch._foreach_mul_(update, [_per_cell(scale_K, weight) for weight in weights])
        torch._foreach_sub_(weights, update)

    @torch.no_grad()
    def select(self, keep: Tensor) -> "AdamW":
        """The state of the cells at these positions."""

        def kept(group: Weights) -> Weights:
            return {name: value[keep] for name, value in group.items()}

        return AdamW(
            kept(self.weights),
            kept(self.first),
            kept(self.second),
            self.steps_done_K[keep],
            self.betas,
            self.weight_decay_K[keep],
            self.decay_all_K[keep],
            self.clip_norm_K[keep],
            self.clips,
        )

    def _shrinkage(self, lr_K: Tensor) -> list[Tensor]:
        """The factor by which decay shrinks each parameter."""
        everywhere_K = lr_K * self.weight_decay_K
        only_where_all_K = everywhere_K * self.decay_all_K
        return [
            1 - _per_cell(everywhere_K if decays(name, weight) else only_where_all_K, weight)
            for name, weight in self.weights.items()
        ]

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        squares_K = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
        scale_K = (self.clip_norm_K / (squares_K.sqrt() + 1e-6)).clamp(max=1.0)
        return [gradient * _per_cell(scale_K, gradient) for gradient in gradients]


def _per_cell(value_K: Tensor, like_K: Tensor) -> Tensor:
    return value_K.view(-1, *[1] * (like_K.dim() - 1))
