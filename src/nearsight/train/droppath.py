"""Stochastic depth (Huang et al. 2016) by coins that belong to the samples, as all randomness here does.

timm's own `DropPath` asks torch's generator, whose numbers depend on what else is trained. Here a block's branch is
multiplied by a factor per sample that the step brings along with the weights: both have a leading axis K, and that is
all a stacked forward wants to know. Where no factors are given, as in evaluation, nothing is dropped.

Shape suffixes: K cells, B samples, n places where a branch can be dropped.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from timm.layers import calculate_drop_path_rates
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.randomness import Draws
from nearsight.train.stacked import Weights

_STREAM = "drop_path"


class DropPath(nn.Module):
    """Stands where timm has its own: scales each sample's branch by its factor, if there are factors."""

    factor: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", None, persistent=False)

    def forward(self, branch: Tensor) -> Tensor:
        if self.factor is None:
            return branch
        factor = self.factor
        while factor.dim() < branch.dim():
            factor = factor.unsqueeze(-1)
        return branch * factor


@dataclass(frozen=True)
class PathDropping:
    """Where a model drops branches, and how often each cell keeps them."""

    buffers: tuple[str, ...]
    """Names of the buffers that take the factors, place by place."""
    keep_Kn: Tensor
    """Probability that a branch is kept."""

    @classmethod
    def install(cls, model: nn.Module, rates: Sequence[float], device: torch.device) -> "PathDropping":
        """Make places for the factors in the model's blocks. `rates` are the cells' at the last block; the first drops
        nothing, also where it is the only one, and it rises evenly between them, as in timm."""
        blocks = getattr(model, "blocks", ())
        places = [
            (number, name)
            for number, block in enumerate(blocks)
            for name, _ in block.named_children()
            if name.startswith("drop_path")
        ]
        if not places:
            raise InputError(f"drop_path cannot be used: {type(model).__name__} has no blocks with a place for it")
        for number, name in places:
            setattr(blocks[number], name, DropPath())
        by_block = torch.tensor([calculate_drop_path_rates(rate, len(blocks)) for rate in rates])
        keep_Kn = 1 - by_block[:, [number for number, _ in places]]
        return cls(tuple(f"blocks.{number}.{name}.factor" for number, name in places), keep_Kn.to(device))

    def __call__(self, draws: Draws) -> Weights:
        """The factors [K, B] of a step's samples, by the buffers' names. Their mean is 1."""
        coin_KBn = draws.per_sample(_STREAM, len(self.buffers))
        keep_K1n = self.keep_Kn.unsqueeze(1)
        factor_KBn = (coin_KBn < keep_K1n) / keep_K1n
        return dict(zip(self.buffers, factor_KBn.unbind(-1), strict=True))

    def select(self, keep: Tensor) -> "PathDropping":
        """That of the cells at these positions."""
        return dataclasses.replace(self, keep_Kn=self.keep_Kn[keep])
