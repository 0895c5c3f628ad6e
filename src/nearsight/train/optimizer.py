"""AdamW on stacked weights: K models with their own learning rates and decays, as one program on one tensor; and the
moving average of the weights.

All parameters of all cells lie in one tensor [K, P], and so do their moments: an update is a few passes over it (by a
kernel, one), however many parameters there are, and a compiled program sees K as one number. Per cell it is
`torch.optim.AdamW`, which has no learning rate per slice of a tensor; the tests compare the two.

Shape suffixes: K cells, P parameters of a cell, one after the other, G groups that share a rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from timm.models import group_parameters
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.models.checkpoints import is_induced
from nearsight.train.config import Protocol
from nearsight.train.stacked import Weights
from nearsight.triton_language import kernel, runs_on, tl

TRIANGLE_FLOOR = 1e-7
"""Learning rate at both ends of the triangular schedule (S2)."""
_EPS = 1e-8
_BLOCK = 2048
"""Parameters that a program of the kernel updates."""


def learning_rates(protocol: Protocol, epoch: int, steps_per_epoch: int) -> Tensor:
    """The learning rate of every step of an epoch (counted from 0), float64 [steps]: linear warm-up, then half a cosine
    (S1 §4.3.1) or a straight line (S2 §5.1) down.

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


def decays(name: str, weight_K: Tensor) -> bool:
    """Whether weight decay belongs on a parameter: on matrices, not on norms, biases, CLS tokens and positions."""
    return weight_K.dim() - 1 >= 2 and not name.endswith(("cls_token", "pos_embed", "reg_token"))


def groups_of(model: nn.Module, protocol: Protocol) -> dict[str, int]:
    """Parameter → its group: twice its layer, as timm counts them for layer-wise learning rates (the stem is 0, the
    classifier last), and one more for what makes attention local. A model without layers is one."""
    matcher = getattr(model, "group_matcher", None)
    if matcher is None and protocol.layer_decay < 1:
        raise InputError(f"layer_decay cannot be used: {type(model).__name__} does not say which its layers are")
    layers: dict[str, int] = group_parameters(model, matcher(coarse=False) if matcher else lambda _: 0, reverse=True)
    return {name: 2 * layer + is_induced(name) for name, layer in layers.items()}


def group_scales(protocol: Protocol, groups: Mapping[str, int]) -> Tensor:
    """What the learning rate of each group is multiplied by, [G]: 1 for the last layer, less and less before it."""
    below_n = torch.arange(max(groups.values()) // 2, -1, -1, dtype=torch.float64)
    scale_n = protocol.layer_decay**below_n
    return torch.stack([scale_n, protocol.locality_lr * scale_n], 1).flatten().to(torch.float32)


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
    group_P: Tensor | None = None
    """The group of each parameter, where not all learn at one rate."""
    scale_KG: Tensor | None = None
    """And what each cell's learning rate is multiplied by there."""

    @classmethod
    def start(
        cls,
        weights: Weights,
        *,
        betas: tuple[float, float],
        weight_decay: Sequence[float],
        decay_all: Sequence[bool],
        clip_norm: Sequence[float | None],
        groups: Mapping[str, int] | None = None,
        group_scales: Sequence[Tensor] = (),
    ) -> "AdamW":
        """`groups`: of the parameters, by name, if not all learn at one rate; what each cell's is multiplied by."""
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
            *_grouped(weights, groups, group_scales),
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
        step_K1 = step_K.unsqueeze(1)
        if self.scale_KG is not None:
            step_K1 = step_K1 * self.scale_KG[:, self.group_P]
        if gradient_scale_K is not None:
            gradient_KP = gradient_KP * gradient_scale_K.unsqueeze(1)
        self.weights_KP.mul_(self._shrinkage(lr_K))
        self.first_KP.lerp_(gradient_KP, 1 - beta1)
        self.second_KP.mul_(beta2).addcmul_(gradient_KP, gradient_KP, value=1 - beta2)
        denominator_KP = self.second_KP.sqrt().div_(root_K.unsqueeze(1)).add_(_EPS)
        self.weights_KP.sub_((self.first_KP / denominator_KP).mul_(step_K1))

    def _step_fused(
        self, gradient_KP: Tensor, lr_K: Tensor, gradient_scale_K: Tensor | None, step_K: Tensor, root_K: Tensor
    ) -> None:
        """The same in one pass over memory; in place, as the plain one."""
        num_cells, num_parameters = self.weights_KP.shape
        beta1, beta2 = self.betas
        _adamw_kernel[(-(-num_parameters // _BLOCK), num_cells)](
            self.weights_KP, gradient_KP.contiguous(), self.first_KP, self.second_KP, self.decays_P,
            lr_K * self.weight_decay_K, self.decay_all_K, gradient_scale_K, step_K, root_K,
            self.group_P, self.scale_KG, 0 if self.scale_KG is None else self.scale_KG.shape[1], num_parameters,
            1 - beta1, beta2, 1 - beta2, _EPS,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip

    @torch.no_grad()
    def put(
        self,
        position: int,
        weights: Weights,
        *,
        weight_decay: float,
        decay_all: bool,
        clip_norm: float | None,
        group_scales: Tensor | None = None,
    ) -> None:
        """Begin another cell in the place of one, in the tensors that there are."""
        for name, part in self.arrangement.parts(self.weights_KP[position]).items():
            part.copy_(weights[name])
        self.first_KP[position] = 0.0
        self.second_KP[position] = 0.0
        self.steps_done_K[position] = 0
        self.weight_decay_K[position] = weight_decay
        self.decay_all_K[position] = decay_all
        self.clip_norm_K[position] = torch.inf if clip_norm is None else clip_norm
        if self.scale_KG is not None:
            assert group_scales is not None
            self.scale_KG[position] = group_scales

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
            scale_KG=None if self.scale_KG is None else self.scale_KG[keep],
        )

    def _shrinkage(self, lr_K: Tensor) -> Tensor:
        """The factor by which decay shrinks each parameter: [K, P]."""
        shrinkage_KP = (lr_K * self.weight_decay_K).unsqueeze(1) * (self.decays_P | self.decay_all_K.unsqueeze(1))
        return 1 - (shrinkage_KP if self.scale_KG is None else shrinkage_KP * self.scale_KG[:, self.group_P])

    def _clipping(self, gradient_KP: Tensor) -> Tensor:
        """By what each cell's gradient is scaled so that it is no longer than its largest norm."""
        # One by one: in which order a GPU sums several at once depends on how many there are.
        norm_K = torch.stack([torch.linalg.vector_norm(gradient_P) for gradient_P in gradient_KP])
        return (self.clip_norm_K / (norm_K + 1e-6)).clamp(max=1.0)


def _grouped(
    weights: Weights, groups: Mapping[str, int] | None, scales: Sequence[Tensor]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if groups is None:
        return None, None
    device = next(iter(weights.values())).device
    parts = [torch.full((w[0].numel(),), groups[name], dtype=torch.int32) for name, w in weights.items()]
    return torch.cat(parts).to(device), torch.stack(list(scales)).to(device)


@dataclass
class Average:
    """Moving averages of K cells' weights, and of their running statistics: w ← decay · w + (1 − decay) · new, after
    every step, from the initial weights on, as timm's `ModelEmaV3`."""

    weights_KP: Tensor
    statistics: Weights
    share_K: Tensor
    """Of what is new: 1 − decay."""

    @classmethod
    def start(cls, weights_KP: Tensor, statistics: Weights, decay: Sequence[float]) -> "Average":
        copies = {name: statistic.clone() for name, statistic in statistics.items()}
        share_K = 1 - torch.tensor(decay, dtype=torch.float64)
        return cls(weights_KP.clone(), copies, share_K.to(weights_KP.device, torch.float32))

    @property
    def state(self) -> list[Tensor]:
        """What an update changes."""
        return [self.weights_KP, *self.statistics.values()]

    @torch.no_grad()
    def update(self, weights_KP: Tensor, statistics: Weights) -> None:
        self.weights_KP.lerp_(weights_KP, self.share_K.unsqueeze(1))
        for name, statistic in statistics.items():
            mean = self.statistics[name]
            if statistic.is_floating_point():
                mean.lerp_(statistic, self.share_K.view(-1, *[1] * (statistic.dim() - 1)))
            else:
                mean.copy_(statistic)

    @torch.no_grad()
    def put(self, position: int, weights_KP: Tensor, statistics: Weights, decay: float) -> None:
        """Begin another cell's in the place of one, with the weights that it begins with."""
        self.weights_KP[position] = weights_KP[position]
        for name, statistic in statistics.items():
            self.statistics[name][position] = statistic[position]
        self.share_K[position] = 1 - decay

    def select(self, keep: Tensor) -> "Average":
        """Those of the cells at these positions."""
        statistics = {name: statistic[keep] for name, statistic in self.statistics.items()}
        return Average(self.weights_KP[keep], statistics, self.share_K[keep])


@kernel
def _adamw_kernel(
    weights, gradient, first, second, decays, shrinkage, shrinks_all, gradient_scale, step, root, groups, scales,
    num_groups, num_parameters, share1, beta2, share2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(1).to(tl.int64)
    place_P = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used_P = place_P < num_parameters
    at_P = cell * num_parameters + place_P
    gradient_P = tl.load(gradient + at_P, mask=used_P, other=0.0)
    if gradient_scale is not None:
        gradient_P *= tl.load(gradient_scale + cell)
    first_P = tl.load(first + at_P, mask=used_P, other=0.0)
    first_P += share1 * (gradient_P - first_P)
    second_P = tl.load(second + at_P, mask=used_P, other=0.0) * beta2 + gradient_P * gradient_P * share2
    shrinks_P = (tl.load(decays + place_P, mask=used_P, other=0) != 0) | (tl.load(shrinks_all + cell) != 0)
    decayed_P = tl.load(shrinkage + cell) * tl.where(shrinks_P, 1.0, 0.0)
    moved_P = first_P / (tl.sqrt(second_P) / tl.load(root + cell) + eps) * tl.load(step + cell)
    if scales is not None:
        group_P = tl.load(groups + place_P, mask=used_P, other=0)
        scale_P = tl.load(scales + cell * num_groups + group_P, mask=used_P, other=0.0)
        decayed_P *= scale_P
        moved_P *= scale_P
    weight_P = tl.load(weights + at_P, mask=used_P, other=0.0) * (1.0 - decayed_P) - moved_P
    tl.store(first + at_P, first_P, mask=used_P)
    tl.store(second + at_P, second_P, mask=used_P)
    tl.store(weights + at_P, weight_P, mask=used_P)
