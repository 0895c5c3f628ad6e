"""Counter-based randomness: every draw is a function of (seed, stream, epoch, index), and of nothing else.

A generator with hidden state gives a sample other numbers when the batch around it changes, when training resumes, or
when another model is trained beside it. Here the draw for sample 17 in epoch 3 of seed 0 is the same number alone, in a
stack of 24 models, after a crash, on the CPU and on the GPU. The generator is Philox4x32-10 (Salmon et al. 2011, the
one behind cuRAND and `torch.cuda`), written in int64 tensor arithmetic so that it runs on any device and compiles.

Shape suffixes: K cells (models trained together), B samples of a batch, N samples of a data set, n draws.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from nearsight.errors import InputError, check_number
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_GENERATORS = threading.RLock()
"""Held while something is drawn from torch's global generators, or their state is put back: all threads share them."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's global generator starts at a seed, for code that knows no other; afterwards it is as it was.

    Threads that draw by a seed wait for each other.
    """
    with _GENERATORS, torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


@contextmanager
def generators_kept(devices: Sequence[int] | None) -> Iterator[None]:
    """Torch's global generators are afterwards as they were, on the CPU and these devices, or on all."""
    with ExitStack() as kept:
        with _GENERATORS:
            kept.enter_context(torch.random.fork_rng(devices=devices))
        try:
            yield
        finally:
            with _GENERATORS:
                kept.close()


def _multiply_high_low(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both halves of the 64-bit product of two 32-bit words; no step leaves int64, so nothing overflows."""
    upper = b * (a >> 16)
    lower = b * (a & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; shapes broadcast."""
    key0, key1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_high_low(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply_high_low(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = (key0 + _KEY_STEPS[0]) & _MASK
        key1 = (key1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


@cache
def stream_id(name: str) -> int:
    """The 32-bit word of a stream's name. Two streams of one seed are independent."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def key_of(seed: Tensor) -> tuple[Tensor, Tensor]:
    """The two 32-bit words of a 64-bit seed."""
    return seed & _MASK, (seed >> 32) & _MASK


def to_unit_interval(word: Tensor) -> Tensor:
    """32-bit words as float32 in [0, 1): their top 24 bits, so every value is exact."""
    return (word >> 8).to(torch.float32) * 2.0**-24


def words(seed: Tensor, stream: str, epoch: Tensor, index: Tensor, num: int) -> Tensor:
    """`num` random 32-bit words (int64 tensor) per element of the broadcast of seed, epoch and index: [..., num]."""
    lanes = torch.arange((num + 3) // 4, device=index.device)
    key = key_of(seed.unsqueeze(-1))
    stream_word = torch.full((), stream_id(stream), dtype=torch.int64, device=index.device)
    out = philox(key, ((index & _MASK).unsqueeze(-1), (epoch & _MASK).unsqueeze(-1), stream_word, lanes))
    shape = torch.broadcast_shapes(seed.shape, epoch.shape, index.shape)
    return torch.stack(torch.broadcast_tensors(*out), dim=-1).expand(*shape, -1, 4).flatten(-2)[..., :num]


def uniform(seed: Tensor, stream: str, epoch: Tensor, index: Tensor, num: int) -> Tensor:
    """`num` float32 draws in [0, 1) per element."""
    return to_unit_interval(words(seed, stream, epoch, index, num))


def permutation(seed_K: Tensor, stream: str, epoch: Tensor, num: int) -> Tensor:
    """One permutation of range(num) per cell: [K, num]; `epoch` is 0-d or [K].

    The order of random 62-bit keys; a tie (p < 1e-6 among a million) falls to the lower index.
    """
    index = torch.arange(num, device=seed_K.device)
    word_KN2 = words(seed_K.unsqueeze(-1), stream, epoch.unsqueeze(-1), index, 2)
    return torch.argsort((word_KN2[..., 0] << 30) | (word_KN2[..., 1] >> 2), dim=-1, stable=True)


@dataclass(frozen=True)
class Draws:
    """The randomness of one training step of K cells, from which augmentations draw.

    Everything is a tensor on the step's device, so that a captured graph can be replayed with other contents.
    """

    seed_K: Tensor
    """Seed of each cell (int64)."""
    epoch: Tensor
    """Epoch number (int64): one for all cells (0-d), or one for each [K]."""
    step: Tensor
    """Batch number within the epoch, a 0-d int64 tensor."""
    index_KB: Tensor
    """Position in the data set of each sample of the batch (int64)."""

    def of(self, samples: slice) -> Draws:
        """Those of some samples of the batch."""
        return Draws(self.seed_K, self.epoch, self.step, self.index_KB[:, samples])

    def per_sample(self, stream: str, num: int) -> Tensor:
        """Uniform draws [K, B, num] that belong to the samples: a sample keeps its draws whatever batch it is in."""
        return uniform(self.seed_K.unsqueeze(-1), stream, self.epoch.unsqueeze(-1), self.index_KB, num)

    def per_batch(self, stream: str, num: int) -> Tensor:
        """Uniform draws [K, num] that belong to the batch (one mixing coefficient for all of it, say)."""
        return uniform(self.seed_K, stream, self.epoch, self.step, num)


def different_seeds(seeds: Any, *, needed: str = "whole numbers") -> tuple[int, ...]:
    """The seeds as Python's own numbers, since they become part of files; equal ones could not be distinguished."""
    try:
        found = tuple(map(operator.index, seeds))
    except TypeError as error:
        raise InputError(f"seeds are {seeds!r}, but must be {needed}") from error
    if not found or len(set(found)) < len(found):
        raise InputError(f"seeds are {list(found)}, but must be some different numbers")
    for seed in found:
        check_number("a seed", seed)
    return found
