"""Patches whose sets carry the label together (S3), and patches that have no structure at all.

S3 is "Vision Transformers provably learn spatial structure" (arXiv 2210.09221). A sample is D patches in d dimensions,
and every patch is `X_j = s_j w* + ξ_j`: a strength along one feature w* of length 1, and noise in all other directions,
ξ_j ~ N(0, σ²(I − w*w*ᵀ)). What the patches say about the label y = ±1 is in the strengths s alone. The D patches are
partitioned into L sets of size C, which need not be neighbours.

Every draw is a function of (seed, stream, step, sample): a sample is the same whatever seeds and samples are drawn with
it. Shape suffixes: S seeds, N samples, D patches, d dimensions of a patch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from nearsight.augment.streams import standard_normal
from nearsight.configuration import register_family, settle_numbers
from nearsight.errors import InputError, check_at_least, check_numbers, check_positive, check_probability, unknown_name
from nearsight.lazy import torch
from nearsight.randomness import permutation, uniform

if TYPE_CHECKING:
    from torch import Tensor

Partition = Literal["contiguous", "strided", "random"]


@dataclass(frozen=True, kw_only=True)
class PatchData(ABC):
    """A distribution of samples: what their patches and labels are."""

    name: ClassVar[str]

    num_sets: int = 5
    """Sets of patches, L."""
    set_size: int = 2
    """Patches of a set, C."""
    dim: int = 100
    """Dimensions of a patch, d."""
    partition: Partition = "random"
    """Which patches are a set: contiguous (0 1 | 2 3 | …), strided (every L-th), or by chance."""
    partition_seed: int = 0
    """Seed of a partition by chance; independent of a run's seed, so that all runs share the sets."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_numbers(self)
        if self.partition not in get_args(Partition):
            raise unknown_name("partition", self.partition, get_args(Partition))
        check_at_least("num_sets", self.num_sets, 2)
        check_at_least("set_size", self.set_size, 2)
        check_at_least("dim", self.dim, 2)

    @property
    def num_patches(self) -> int:
        return self.num_sets * self.set_size

    @property
    @abstractmethod
    def noise_std(self) -> float:
        """Deviation of a patch in each direction but the feature's, σ."""

    @property
    @abstractmethod
    def best_accuracy(self) -> float:
        """Of any classifier, even one that knows the feature and the sets."""

    @property
    @abstractmethod
    def best_risk(self) -> float:
        """Logistic risk of the true probabilities of the labels: the least that there is."""

    @abstractmethod
    def signals(self, seed_S: Tensor, stream: str, step: int, index_N: Tensor) -> tuple[Tensor, Tensor]:
        """The strengths of the feature in the patches [S, N, D] and the labels ±1 [S, N] of these samples, float32."""

    def sets(self) -> Tensor:
        """The set of every patch: [D], int64."""
        place = torch.arange(self.num_patches)
        if self.partition == "strided":
            return place % self.num_sets
        if self.partition == "random":
            place = permutation(torch.tensor([self.partition_seed]), "structured.sets", torch.tensor(0), len(place))[0]
        return place // self.set_size

    def feature(self, seed_S: Tensor, number: int = 0) -> Tensor:
        """The feature w* of each seed: [S, d], of length 1. Other numbers are other features for the same seeds."""
        direction = normals(seed_S, "structured.feature", 0, torch.full_like(seed_S, number), self.dim)
        return torch.nn.functional.normalize(direction, dim=-1)


@dataclass(frozen=True, kw_only=True)
class StructuredPatches(PatchData):
    """One set gives the label, the other patches carry the feature by chance (S3 Def. 2.1 and Assumption 1).

    The patches of the signal set, which is drawn uniformly, have s = y; the others s = ±1 with probability q/2 each,
    otherwise 0.
    """

    name: ClassVar[str] = "structured"

    probability: float | None = None
    """That a patch outside the signal set carries the feature, q; ln(d)/D by default."""
    noise: float | None = None
    """Deviation of a patch in each direction but the feature's, σ; 1/√d by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probability is None and self.chance > 1:
            raise InputError(f"probability ln(d)/D is {self.chance:.3g} with dim {self.dim}; set a probability")
        check_probability("probability", self.chance)
        check_at_least("noise", self.noise_std, 0)

    @property
    def chance(self) -> float:
        """The probability q that holds."""
        return math.log(self.dim) / self.num_patches if self.probability is None else self.probability

    @property
    def noise_std(self) -> float:
        return self.dim**-0.5 if self.noise is None else self.noise

    @property
    def best_accuracy(self) -> float:
        # By Bayes' rule the odds of the labels are those of the numbers of sets that are all +1 and all −1: whichever
        # of these was the signal, the others have the same probability.
        right = sum(p * ((with_y > against) + (with_y == against) / 2) for p, with_y, against in self._uniform_sets())
        return float(right)

    @property
    def best_risk(self) -> float:
        return sum(p * math.log((with_y + against) / with_y) for p, with_y, against in self._uniform_sets())

    def _uniform_sets(self) -> list[tuple[float, int, int]]:
        """(probability, number of sets that are all y, with the signal set, and of sets that are all −y)."""
        others, p = self.num_sets - 1, (self.chance / 2) ** self.set_size
        return [
            (math.comb(others, a) * math.comb(others - a, b) * p ** (a + b) * (1 - 2 * p) ** (others - a - b), 1 + a, b)
            for a in range(others + 1)
            for b in range(others - a + 1)
        ]

    def signals(self, seed_S: Tensor, stream: str, step: int, index_N: Tensor) -> tuple[Tensor, Tensor]:
        drawn = _uniforms(seed_S, f"{stream}.signals", step, index_N, 2 + self.num_patches)
        label_SN = torch.where(drawn[..., 0] < 0.5, -1.0, 1.0)
        signal_set_SN = (drawn[..., 1] * self.num_sets).long()
        by_chance_SND = (drawn[..., 2:] < self.chance / 2).float() - (drawn[..., 2:] >= 1 - self.chance / 2).float()
        is_signal_SND = self.sets().to(seed_S.device) == signal_set_SN.unsqueeze(-1)
        return torch.where(is_signal_SND, label_SN.unsqueeze(-1), by_chance_SND), label_SN


@dataclass(frozen=True, kw_only=True)
class GaussianPatches(PatchData):
    """The negative control: independent Gaussian patches, labelled by a convolution, y = sign Σ_j ⟨w*, X_j⟩³ (S3).

    No patch belongs with another. The sets are still defined, to ask whether a model finds them.
    """

    name: ClassVar[str] = "gaussian"

    scale: float = 1.0
    """Deviation of a patch in every direction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scale", self.scale)

    @property
    def noise_std(self) -> float:
        return self.scale

    @property
    def best_accuracy(self) -> float:
        return 1.0

    @property
    def best_risk(self) -> float:
        return 0.0

    def signals(self, seed_S: Tensor, stream: str, step: int, index_N: Tensor) -> tuple[Tensor, Tensor]:
        strength_SND = self.scale * normals(seed_S[:, None], f"{stream}.signals", step, index_N, self.num_patches)
        label_SN = torch.where(strength_SND.pow(3).sum(-1) < 0, -1.0, 1.0)
        return strength_SND, label_SN


def normals(seed: Tensor, stream: str, step: int, index: Tensor, num: int) -> Tensor:
    """`num` standard normal draws per element of the broadcast of seed and index: [..., num], float32."""
    return standard_normal(uniform(seed, stream, torch.tensor(step, device=index.device), index, num))


def _uniforms(seed_S: Tensor, stream: str, step: int, index_N: Tensor, num: int) -> Tensor:
    return uniform(seed_S[:, None], stream, torch.tensor(step, device=index_N.device), index_N, num)


def _kind(name: str) -> type[PatchData]:
    kinds: dict[str, type[PatchData]] = {kind.name: kind for kind in (StructuredPatches, GaussianPatches)}
    if name not in kinds:
        raise unknown_name("kind of patches", name, kinds)
    return kinds[name]


register_family(PatchData, _kind)
