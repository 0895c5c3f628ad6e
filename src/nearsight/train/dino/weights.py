"""What is learned: weights of the student with their optimiser, and of the teacher that follows it.

All numbers of one kind lie in one row, so that an update is a few passes over memory however many parameters there are,
and stay where they are, so that a captured step finds them.

Shape suffixes: K cells, here one; P numbers of all parameters, one after the other; n parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearsight.train.optimizer import AdamW
from nearsight.train.stacked import Weights, stack_weights

_BETAS = (0.9, 0.999)


@dataclass
class Pair:
    """Some weights of the student, and the teacher's."""

    optimizer: AdamW
    """Holds the student's."""
    teacher_KP: Tensor
    parameter_P: Tensor
    """Which parameter each number belongs to."""

    @classmethod
    def start(cls, weights: Mapping[str, Tensor], device: torch.device) -> "Pair":
        """Both with these weights."""
        sizes = torch.tensor([weight.numel() for weight in weights.values()])
        decays = torch.tensor([weight.dim() > 1 for weight in weights.values()])
        optimizer = AdamW.start(
            stack_weights([weights], device),
            betas=_BETAS,
            weight_decay=[0.0],  # it changes with every step
            decay_all=[False],
            clip_norm=[None],  # each parameter is clipped by itself, and not all together
        )
        # Positions and CLS tokens decay here, as in the original.
        optimizer = replace(optimizer, decays_P=decays.repeat_interleave(sizes).to(device))
        parameter_P = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)
        return cls(optimizer, optimizer.weights_KP.clone(), parameter_P)

    @property
    def teacher(self) -> Weights:
        """The teacher's by name, each with a leading axis of 1."""
        return self.optimizer.arrangement.views(self.teacher_KP)

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [*self.optimizer.state, self.teacher_KP]

    @torch.no_grad()
    def update(self, gradient_KP: Tensor, lr_K: Tensor, weight_decay_K: Tensor, *, clip_norm: float) -> None:
        """AdamW on the student, with each parameter's gradient clipped by itself."""
        parts = list(self.optimizer.arrangement.views(gradient_KP).values())
        norm_n = torch.stack(torch._foreach_norm(parts))
        scale_n = (clip_norm / (norm_n + 1e-6)).clamp(max=1.0)
        self.optimizer.weight_decay_K.copy_(weight_decay_K)
        self.optimizer.step(gradient_KP * scale_n.index_select(0, self.parameter_P), lr_K)

    @torch.no_grad()
    def follow(self, share: Tensor) -> None:
        """Let the teacher go this share of the way to the student."""
        self.teacher_KP.lerp_(self.optimizer.weights_KP, share)

    def named(self) -> dict[str, Tensor]:
        """Everything there is, by the names of parameters and what it is of them, in the memory of all."""
        optimizer = self.optimizer
        rows = {
            "student": optimizer.weights_KP,
            "teacher": self.teacher_KP,
            "optimizer/first": optimizer.first_KP,
            "optimizer/second": optimizer.second_KP,
        }
        return {
            f"{kind}/{name}": part
            for kind, row_KP in rows.items()
            for name, part in optimizer.arrangement.parts(row_KP[0]).items()
        }
