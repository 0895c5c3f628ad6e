"""What a model drops while it trains: whole branches (stochastic depth) or single numbers (dropout).

timm's own layers draw from torch's generator, whose numbers depend on what else is trained. Here what is dropped
belongs to the samples, as all randomness does: the step brings it along with the weights, as buffers with a leading
axis K, and that is all a stacked forward needs. In evaluation there are none, and nothing is dropped.

Shape suffixes: K cells, B samples, n places where a branch can be dropped, V numbers of a sample at one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from timm.layers import calculate_drop_path_rates
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.randomness import Draws, key_of, philox, stream_id, to_unit_interval
from nearsight.train.config import Protocol
from nearsight.train.stacked import Weights
from nearsight.train.stackedweight import StackedWeight, plain
from nearsight.triton_language import kernel, runs_on, tl

_OF_PATHS = "drop_path"
_WORD = 0xFFFFFFFF
_BLOCK = 1024
"""Fours of numbers that a program of the kernel draws for."""


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): scales each sample's branch by its factor, if there are factors.

    It replaces timm's own, which uses torch's generator, whose numbers depend on what else is trained. These
    factors belong to the samples, as all randomness here does, and the step brings them along with the weights: both
    have a leading axis K, and that is all a stacked forward needs. In evaluation there are none.
    """

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
    blocks: tuple[int, ...]
    """In which block each place is."""
    num_blocks: int
    keep_Kn: Tensor
    """Probability that a branch is kept."""

    @classmethod
    def install(cls, model: nn.Module, rates: Sequence[float], device: torch.device) -> "PathDropping":
        """Make places for the factors in the model's blocks. `rates` are the cells' at the last block; the first drops
        nothing, also where it is the only one, and it rises evenly between them, as in timm."""
        blocks = {
            path: names
            for path, module in model.named_modules()
            if (names := [name for name, _ in module.named_children() if name.startswith("drop_path")])
        }
        if not blocks:
            raise InputError(f"drop_path cannot be used: {type(model).__name__} has no blocks with a place for it")
        places = [(number, f"{path}.{name}") for number, path in enumerate(blocks) for name in blocks[path]]
        for _, place in places:
            model.set_submodule(place, DropPath())
        buffers = tuple(f"{place}.factor" for _, place in places)
        numbers = tuple(number for number, _ in places)
        return cls(buffers, numbers, len(blocks), _kept(rates, numbers, len(blocks)).to(device))

    def __call__(self, draws: Draws) -> Weights:
        """The factors [K, B] of a step's samples, by the buffers' names. Their mean is 1."""
        coin_KBn = draws.per_sample(_OF_PATHS, len(self.buffers))
        keep_K1n = self.keep_Kn.unsqueeze(1)
        factor_KBn = (coin_KBn < keep_K1n) / keep_K1n
        return dict(zip(self.buffers, factor_KBn.unbind(-1), strict=True))

    def put(self, position: int, protocol: Protocol) -> None:
        """Give a place to another cell, in the tensor that there is."""
        kept_1n = _kept([protocol.drop_path], self.blocks, self.num_blocks)
        self.keep_Kn[position] = kept_1n[0].to(self.keep_Kn.device)

    def select(self, keep: Tensor) -> "PathDropping":
        """That of the cells at these positions."""
        return replace(self, keep_Kn=self.keep_Kn[keep])


def _kept(rates: Sequence[float], blocks: Sequence[int], num_blocks: int) -> Tensor:
    by_block = torch.tensor([calculate_drop_path_rates(rate, num_blocks) for rate in rates])
    return 1 - by_block[:, list(blocks)]


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) at one place of a model: a sample's numbers are 0 or divided by how often they
    are kept.

    Of number v of a sample, the coin is draw v of the place's stream, as `Draws.per_sample` gives it. There are more of
    these than of all other draws together, so that on a GPU a kernel makes them.
    """

    counter: Tensor | None
    """Of every sample: seed, position in the data set, epoch."""
    keep: Tensor | None

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.register_buffer("counter", None, persistent=False)
        self.register_buffer("keep", None, persistent=False)

    @property
    def stream(self) -> str:
        return f"dropout.{self.number}"

    def forward(self, x: Tensor) -> Tensor:
        if self.counter is None or self.keep is None:
            return x
        counter_B3, keep_B = _of_all_cells(self.counter), _of_all_cells(self.keep)
        factor = _factors(counter_B3, keep_B, stream_id(self.stream), x.shape[1:])
        return (x * factor).to(x.dtype)


def _of_all_cells(buffer: Tensor) -> Tensor:
    """[K, B, …] of a stack in one batch → [K·B, …]; that of one cell stays."""
    return plain(buffer).flatten(0, 1) if isinstance(buffer, StackedWeight) else buffer


@torch.no_grad()
def _factors(counter_B3: Tensor, keep_B: Tensor, stream: int, shape: torch.Size) -> Tensor:
    """0 or 1 / keep for every number of every sample, float32 [B, *shape]."""
    num_values = shape.numel()
    if runs_on(counter_B3.device) and not torch._C._functorch.is_batchedtensor(counter_B3):
        factor_BV = torch.empty((len(counter_B3), num_values), device=counter_B3.device)
        num_fours = -(-num_values // 4)
        _factor_kernel[(-(-num_fours // _BLOCK), len(counter_B3))](
            counter_B3.contiguous(), keep_B.contiguous(), factor_BV, num_values, stream, BLOCK=_BLOCK, num_warps=4
        )
        return factor_BV.view(-1, *shape)
    seed_B1, index_B1, epoch_B1 = (column_B.unsqueeze(-1) for column_B in counter_B3.unbind(-1))
    lanes = torch.arange(-(-num_values // 4), device=counter_B3.device)
    words = philox(key_of(seed_B1), (index_B1 & _WORD, epoch_B1 & _WORD, torch.full_like(lanes, stream), lanes))
    coin_BV = to_unit_interval(torch.stack(words, dim=-1).flatten(-2)[..., :num_values])
    keep_B1 = keep_B.unsqueeze(-1)
    return ((coin_BV < keep_B1) / keep_B1).view(-1, *shape)


@kernel
def _factor_kernel(counter, keep, factor, num_values, stream, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = (lane * 0).to(tl.int64)
    index = (word + tl.load(counter + sample * 3 + 1)).to(tl.uint32)
    epoch = (word + tl.load(counter + sample * 3 + 2)).to(tl.uint32)
    words = tl.philox(tl.load(counter + sample * 3), index, epoch, (word + stream).to(tl.uint32), lane.to(tl.uint32))
    kept = tl.load(keep + sample)
    for part in tl.static_range(4):
        coin = (words[part] >> 8).to(tl.float32) * 5.9604644775390625e-08
        place = lane * 4 + part
        tl.store(factor + sample * num_values + place, tl.where(coin < kept, 1.0 / kept, 0.0), mask=place < num_values)


@dataclass(frozen=True)
class NumberDropping:
    """Where a model drops numbers, and how often each cell keeps them."""

    PLACES: ClassVar = ("pos_drop", "proj_drop", "drop1", "drop2")
    """What timm calls its own: after the embedding, after attention's projection, and in the MLP. Weights of attention
    are not dropped, nor what the classifier reads."""

    places: tuple[str, ...]
    keep_K: Tensor
    """Probability that a number is kept."""

    @classmethod
    def install(cls, model: nn.Module, rates: Sequence[float], device: torch.device) -> "NumberDropping":
        """Put our dropout in the place of timm's; `rates` are the cells'."""
        places = tuple(
            path
            for path, module in model.named_modules()
            if isinstance(module, nn.Dropout) and path.rpartition(".")[2] in cls.PLACES
        )
        if not places:
            raise InputError(f"dropout cannot be used: {type(model).__name__} has no places for it")
        for number, path in enumerate(places):
            model.set_submodule(path, Dropout(number))
        return cls(places, 1 - torch.tensor(rates, device=device))

    def __call__(self, draws: Draws) -> Weights:
        """For every place what says which numbers of a step's samples are kept, by the buffers' names."""
        index_KB = draws.index_KB
        columns = (draws.seed_K.unsqueeze(-1), index_KB, draws.epoch.unsqueeze(-1))
        counter_KB3 = torch.stack([column.expand_as(index_KB) for column in columns], dim=-1)
        keep_KB = self.keep_K.unsqueeze(-1).expand(index_KB.shape)
        return {f"{place}.counter": counter_KB3 for place in self.places} | {
            f"{place}.keep": keep_KB for place in self.places
        }

    def put(self, position: int, protocol: Protocol) -> None:
        """Give a place to another cell, in the tensor that there is."""
        self.keep_K[position] = 1 - protocol.dropout

    def select(self, keep: Tensor) -> "NumberDropping":
        """That of the cells at these positions."""
        return replace(self, keep_K=self.keep_K[keep])


Dropping = PathDropping | NumberDropping
