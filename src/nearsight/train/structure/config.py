"""A run of the simplified model as data: what it learns from, what it is, and how it descends."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from nearsight.configuration import settle_numbers
from nearsight.data.structured import PatchData, StructuredPatches
from nearsight.errors import InputError, check_at_least, check_numbers, unknown_name

Drawn = Literal["stored", "fresh"]


@dataclass(frozen=True, kw_only=True)
class PositionalModel:
    """S3's simplified model (3.1): attention A from positions alone, one direction v that reads the patches."""

    power: int = 5
    """Of the activation x^power + slope·x; odd."""
    slope: float = 0.03
    """Of the activation's linear part, which sets v going (assumed: S3 says only that it is small)."""
    diagonal: float | None = None
    """The fixed diagonal of A; ln ln d by default."""
    init_attention: float = 1e-3
    """Deviation of A's other entries at the start."""
    init_feature: float = 1e-3
    """Deviation of v's entries at the start."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_numbers(self)
        if self.power < 1 or self.power % 2 == 0:
            raise InputError(f"power is {self.power}, but must be odd, so that both labels are treated alike")
        check_at_least("slope", self.slope, 0)
        check_at_least("init_attention", self.init_attention, 0)
        check_at_least("init_feature", self.init_feature, 0)

    def diagonal_for(self, data: PatchData) -> float:
        return math.log(math.log(data.dim)) if self.diagonal is None else self.diagonal


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Gradient descent on the logistic risk."""

    num_samples: int = 10_000
    """Training samples, or those of each step where they are fresh."""
    samples: Drawn = "stored"
    """stored: all steps see the same ones (empirical risk); fresh: each step draws its own (population risk)."""
    steps: int = 1000
    """Steps, each with the gradient of all samples."""
    feature_lr: float = 0.005
    """Step size of v."""
    attention_lr: float = 1.0
    """Step size of A; 0 leaves it as it is. (S3 has one step size for both.)"""
    num_test: int = 10_000
    """Test samples."""
    record_every: int = 10
    """Steps between points of the curves."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_numbers(self)
        if self.samples not in get_args(Drawn):
            raise unknown_name("kind of samples", self.samples, get_args(Drawn))
        for name in ("num_samples", "steps", "num_test", "record_every"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("feature_lr", self.feature_lr, 0)
        check_at_least("attention_lr", self.attention_lr, 0)


@dataclass(frozen=True, kw_only=True)
class StructureRun:
    """One run; the seed is none of it, since all seeds of a run are computed together."""

    data: PatchData = field(default_factory=StructuredPatches)
    model: PositionalModel = field(default_factory=PositionalModel)
    descent: Descent = field(default_factory=Descent)
    feature: int = 0
    """Which feature of the seed the data carry; another number is another feature on the same sets."""
    kept_from: int = 0
    """Start with the attention that feature 0 taught on the same sets, with so many fresh samples a step; 0: with none
    learned."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_at_least("feature", self.feature, 0)
        check_at_least("kept_from", self.kept_from, 0)
        if self.kept_from and self.feature == 0:
            raise InputError("feature is 0, which the attention was learned with; choose another to transfer it to")

    @property
    def before(self) -> "StructureRun":
        """The run that learns the attention to keep."""
        descent = Descent(samples="fresh", num_samples=self.kept_from)
        return StructureRun(data=self.data, model=self.model, descent=descent)
