"""All uniform draws of a step by one call of the generator.

Asking `Draws` stream by stream gives the same numbers, but runs the ten rounds of Philox, some 250 small tensor
operations, once for each stream: more than the augmentations themselves cost on a small batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.lazy import torch
from nearsight.randomness import Draws, key_of, philox, stream_id, to_unit_interval

if TYPE_CHECKING:
    from torch import Tensor

_WORD = 0xFFFFFFFF
_WORDS_PER_LANE = 4
_HALF_STEP = 2.0**-25
"""Draws are multiples of 2⁻²⁴ that include 0, where logarithms and normal variates are infinite."""


@dataclass(frozen=True)
class Drawn:
    """The uniform draws in [0, 1) of one step, by the name of their stream."""

    sample: dict[str, Tensor]
    """Draws that belong to the samples: [K, B, num]."""
    batch: dict[str, Tensor]
    """Draws that belong to the batch: [K, num]."""

    @classmethod
    def of(cls, draws: Draws, sample_nums: Mapping[str, int], batch_nums: Mapping[str, int]) -> Drawn:
        """Equal to `draws.per_sample(name, num)` and `draws.per_batch(name, num)` for every name → num."""
        if not sample_nums and not batch_nums:
            return cls({}, {})
        num_cells, num_samples = draws.index_KB.shape
        sample_stream, sample_lane = _lanes(sample_nums, draws.index_KB.device)
        batch_stream, batch_lane = _lanes(batch_nums, draws.index_KB.device)
        # One row of counters per cell: all lanes of the first sample, of the second, …, and those of the batch.
        index_KBL = draws.index_KB.unsqueeze(-1).expand(-1, -1, len(sample_lane))
        index_Kn = torch.cat((index_KBL.flatten(1), draws.step.expand(num_cells, len(batch_lane))), dim=1)
        stream_n = torch.cat((sample_stream.repeat(num_samples), batch_stream))
        lane_n = torch.cat((sample_lane.repeat(num_samples), batch_lane))
        counter = (index_Kn & _WORD, (draws.epoch & _WORD).unsqueeze(-1), stream_n, lane_n)
        words = philox(key_of(draws.seed_K.unsqueeze(-1)), counter)
        draw_Kn4 = to_unit_interval(torch.stack(words, dim=-1))
        num_sample_lanes = num_samples * len(sample_lane)
        # Unflattened axis by axis: a reshape over all of them would leave a compiled program a division by K per read.
        draw_KBm = draw_Kn4[:, :num_sample_lanes].unflatten(1, (num_samples, len(sample_lane))).flatten(-2)
        return cls(_by_name(draw_KBm, sample_nums), _by_name(draw_Kn4[:, num_sample_lanes:].flatten(1), batch_nums))


def parts_of(draw_KBm: Tensor, num_K: Tensor, most: int, num_parts: int) -> list[Tensor]:
    """Draws in consecutive parts, each as long as its cell's number says: [K, B, most] of every part.

    A cell's draws do not depend on how many the others need; those of a part beyond its number mean nothing.
    """
    place_n = torch.arange(most, device=draw_KBm.device)
    places = [(place_n + part * num_K.unsqueeze(-1)).unsqueeze(1) for part in range(num_parts)]
    return [draw_KBm.gather(-1, place_K1n.expand(-1, draw_KBm.shape[1], -1)) for place_K1n in places]


def _stream_word(name: str) -> int:
    """A function of its own because torch.compile cannot trace the hash behind it."""
    return stream_id(name)


# As `torch.compiler.assume_constant_result` does, which would load the compiler for everybody.
_stream_word._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _num_lanes(num: int) -> int:
    return (num + _WORDS_PER_LANE - 1) // _WORDS_PER_LANE


def _lanes(nums: Mapping[str, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The counter words that distinguish streams and their lanes, one after another: int64 [lanes of all streams]."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    streams = [torch.full((_num_lanes(num),), _stream_word(name), device=device) for name, num in nums.items()]
    lanes = [torch.arange(_num_lanes(num), device=device) for num in nums.values()]
    return torch.cat((none, *streams)), torch.cat((none, *lanes))


def _by_name(draw: Tensor, nums: Mapping[str, int]) -> dict[str, Tensor]:
    starts = itertools.accumulate((_WORDS_PER_LANE * _num_lanes(num) for num in nums.values()), initial=0)
    return {name: draw[..., start : start + num] for (name, num), start in zip(nums.items(), starts, strict=False)}


def standard_normal(uniform: Tensor) -> Tensor:
    """Normal variates from uniform draws that are multiples of 2⁻²⁴, by the inverse of the distribution function."""
    return math.sqrt(2) * torch.erfinv(2 * uniform.clamp(min=_HALF_STEP) - 1)


def symmetric_beta(uniform: Tensor, alpha: Tensor) -> Tensor:
    """Beta(α, α) variates from uniform draws [..., 2]; `alpha` broadcasts against [...].

    Exact for every α > 0 and without rejection, so a fixed number of counter-based draws is enough: Bailey (1994) gives
    a Student-t variate with 2α degrees of freedom from two uniforms, and t/√(2α + t²) is a Beta(α, α) on [-1, 1]
    (Devroye 1986, IX.3). For α = 1 this is Archimedes' theorem: a coordinate of a point on the sphere is uniform.
    """
    radius, angle = uniform.unbind(-1)
    cosine = torch.cos(2 * math.pi * angle)
    # x = t²/2α. For small α it overflows to infinity, and 1/x then gives the ends 0 and 1, as it should.
    x = torch.expm1(-radius.clamp(min=_HALF_STEP).log() / alpha) * cosine.square()
    return 0.5 + 0.5 * torch.copysign(torch.rsqrt(1 + 1 / x), cosine)
