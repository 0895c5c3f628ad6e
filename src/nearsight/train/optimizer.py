"""AdamW on stacked weights: K models with their own learning rates and decays, as one program on one tensor.

All parameters of all cells lie in one tensor [K, P], and so do their moments: an update is a few passes over it,
however many parameters there are, and a compiled program sees K as one number. Per cell it is `torch.optim.AdamW`,
which has no learning rate per slice of a tensor; the tests compare the two.

Shape suffixes: K cells, P parameters of a cell, one after the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearsight.train.fused.adamw import adamw_update
from nearsight.train.stacked import Weights
from nearsight.triton_language import runs_on

_EPS = 1e-8


def decays(name: str, weight_K: Tensor) -> bool:
    """Whether weight decay belongs on a parameter: on matrices, not on norms, biases, CLS tokens and positions."""
    return weight_K.dim() - 1 >= 2 and not name.endswith(("cls_token", "pos_embed", "reg_token"))


@dataclass(frozen=True)
class Arrangement:
    """Which part of a cell's parameters is which."""

    shapes: dict[str, tuple[int, ...]]

    def views(self, flat_KP: Tensor) -> Weights:
        """The parameters by name, [K, …], sharing memory with the whole."""
        parts = flat_KP.split([math.prod(shape) for shape in self.shapes.values()], dim=1)
        return {
            name: part.view(part.shape[0], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def parts(self, flat_P: Tensor) -> Weights:
        """The parameters of one cell by name, sharing memory with the whole."""
        return {name: part[0] for name, part in self.views(flat_P.unsqueeze(0)).items()}


@dataclass
class AdamW:
    """Optimiser state of K cells. `step` updates the weights in place."""

    arrangement: Arrangement
    weights_KP: Tensor
    first_KP: Tensor
    second_KP: Tensor
    steps_done_K: Tensor
    betas: tuple[float, float]
    weight_decay_K: Tensor
    decay_all_K: Tensor
    decays_P: Tensor
    """Which parameters decay even where not all do."""
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
        flat_KP = torch.cat([weight.detach().flatten(1) for weight in weights.values()], dim=1)
        which = [torch.full((weight[0].numel(),), decays(name, weight)) for name, weight in weights.items()]
        return cls(
            Arrangement({name: tuple(weight.shape[1:]) for name, weight in weights.items()}),
            flat_KP,
            torch.zeros_like(flat_KP),
            torch.zeros_like(flat_KP),
            torch.zeros(len(weight_decay), dtype=torch.int64, device=device),
            betas,
            torch.tensor(weight_decay, dtype=torch.float32, device=device),
            torch.tensor(decay_all, device=device),
            torch.cat(which).to(device),
            torch.tensor([torch.inf if norm is None else norm for norm in clip_norm], device=device),
            any(norm is not None for norm in clip_norm),
        )

    @property
    def weights(self) -> Weights:
        return self.arrangement.views(self.weights_KP)

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [self.weights_KP, self.first_KP, self.second_KP, self.steps_done_K]

    @torch.no_grad()
    def step(self, gradient_KP: Tensor, lr_K: Tensor) -> None:
        """One update with each cell's learning rate."""
        self.steps_done_K += 1
        beta1, beta2 = self.betas
        # Bias corrections in float64: 1 - 0.999^t loses half its digits in float32 at the first steps.
        steps_K = self.steps_done_K.to(torch.float64)
        root_K = (1 - beta2**steps_K).sqrt().to(torch.float32)
        step_K = (lr_K / (1 - beta1**steps_K)).to(torch.float32)
        gradient_scale_K = self._clipping(gradient_KP) if self.clips else None
        if runs_on(gradient_KP.device):
            self._step_fused(gradient_KP, lr_K, gradient_scale_K, step_K, root_K)
        else:
            self._step_plainly(gradient_KP, lr_K, gradient_scale_K, step_K, root_K)

    def _step_plainly(
        self, gradient_KP: Tensor, lr_K: Tensor, gradient_scale_K: Tensor | None, step_K: Tensor, root_K: Tensor
    ) -> None:
        beta1, beta2 = self.betas
        if gradient_scale_K is not None:
            gradient_KP = gradient_KP * gradient_scale_K.unsqueeze(1)
        self.weights_KP.mul_(self._shrinkage(lr_K))
        self.first_KP.lerp_(gradient_KP, 1 - beta1)
        self.second_KP.mul_(beta2).addcmul_(gradient_KP, gradient_KP, value=1 - beta2)
        denominator_KP = self.second_KP.sqrt().div_(root_K.unsqueeze(1)).add_(_EPS)
        self.weights_KP.sub_((self.first_KP / denominator_KP).mul_(step_K.unsqueeze(1)))

    def _step_fused(
        self, gradient_KP: Tensor, lr_K: Tensor, gradient_scale_K: Tensor | None, step_K: Tensor, root_K: Tensor
    ) -> None:
        """The same in one pass over memory; in place, as the plain one."""
        adamw_update(
            self.weights_KP,
            gradient_KP.contiguous(),
            self.first_KP,
            self.second_KP,
            self.decays_P,
            shrinkage_K=lr_K * self.weight_decay_K,
            shrinks_all_K=self.decay_all_K,
            gradient_scale_K=gradient_scale_K,
            step_K=step_K,
            root_K=root_K,
            betas=self.betas,
            eps=_EPS,
        )

    @torch.no_grad()
    def select(self, keep: Tensor) -> "AdamW":
        """The state of the cells at these positions."""
        return replace(
            self,
            weights_KP=self.weights_KP[keep],
            first_KP=self.first_KP[keep],
            second_KP=self.second_KP[keep],
            steps_done_K=self.steps_done_K[keep],
            weight_decay_K=self.weight_decay_K[keep],
            decay_all_K=self.decay_all_K[keep],
            clip_norm_K=self.clip_norm_K[keep],
        )

    def _shrinkage(self, lr_K: Tensor) -> Tensor:
        """The factor by which decay shrinks each parameter: [K, P]."""
        everywhere_K1 = (lr_K * self.weight_decay_K).unsqueeze(1)
        return 1 - everywhere_K1 * (self.decays_P | self.decay_all_K.unsqueeze(1))

    def _clipping(self, gradient_KP: Tensor) -> Tensor:
        """By what each cell's gradient is scaled so that it is no longer than its largest norm."""
        # One by one: in which order a GPU sums several at once depends on how many there are.
        norm_K = torch.stack([torch.linalg.vector_norm(gradient_P) for gradient_P in gradient_KP])
        return (self.clip_norm_K / (norm_K + 1e-6)).clamp(max=1.0)
