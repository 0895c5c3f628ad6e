"""S3's simplified model (3.1) as data, its output, its risk and their gradients, for all seeds at once.

    F(X) = Σ_i σ(D Σ_j S_ij ⟨v, X_j⟩),   S = softmax of the rows of A,   σ(x) = x^power + slope·x

A and v are learned, the diagonal of A is fixed. The gradients are written out: they cost two passes over the patches,
and nothing of a piece of samples outlives it.

Shape suffixes: S seeds, N samples, D patches (rows i, columns j), d dimensions of a patch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearsight.configuration import settle_numbers
from nearsight.data.structured import PatchData, StructuredPatches, normals
from nearsight.data.structured_samples import Samples
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
            raise InputError(f"power is {self.power}, but must be odd, so that both labels are treated the same")
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
    """One run without its seed, since all seeds of a run are computed together."""

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


class Weights(NamedTuple):
    attention_SDD: Tensor
    """A, the logits of positional attention."""
    v_Sd: Tensor


class Gradients(NamedTuple):
    """The risk of each seed and its derivatives."""

    risk_S: Tensor
    attention_SDD: Tensor
    """0 on the diagonal."""
    v_Sd: Tensor


class Performance(NamedTuple):
    risk_S: Tensor
    accuracy_S: Tensor
    """NaN where the outputs have overflown."""


def initial_weights(model: PositionalModel, data: PatchData, seed_S: Tensor) -> Weights:
    """Small normal numbers, and the diagonal."""
    D = data.num_patches
    entry = normals(seed_S, "structured.attention", 0, torch.zeros_like(seed_S), D * D).view(-1, D, D)
    attention_SDD = model.init_attention * entry
    attention_SDD.diagonal(dim1=-2, dim2=-1).fill_(model.diagonal_for(data))
    v_Sd = model.init_feature * normals(seed_S, "structured.v", 0, torch.zeros_like(seed_S), data.dim)
    return Weights(attention_SDD, v_Sd)


def risk_and_gradients(weights: Weights, model: PositionalModel, pieces: Iterable[Samples]) -> Gradients:
    """The mean logistic loss over all samples of the pieces, and its gradients."""
    share_SDD = weights.attention_SDD.softmax(-1)
    D = share_SDD.shape[-1]
    num_samples = 0
    risk_S = torch.zeros_like(weights.v_Sd[:, 0])
    by_share_SDD, by_v_Sd = torch.zeros_like(share_SDD), torch.zeros_like(weights.v_Sd)
    for samples in pieces:
        num_samples += samples.label_SN.shape[1]
        projected_SND = samples.project(weights.v_Sd)
        mixed_SND = D * projected_SND @ share_SDD.mT
        even_SND = _even_power(mixed_SND, model)
        margin_SN = samples.label_SN * _activation(mixed_SND, even_SND, model).sum(-1)
        risk_S += softplus(-margin_SN).sum(-1)
        by_output_SN = -samples.label_SN * torch.sigmoid(-margin_SN)
        by_mixed_SND = D * by_output_SN.unsqueeze(-1) * _slope(even_SND, model)
        by_share_SDD += by_mixed_SND.mT @ projected_SND
        by_v_Sd += samples.weighted_sum(by_mixed_SND @ share_SDD, weights.v_Sd)
    by_attention_SDD = share_SDD * (by_share_SDD - (by_share_SDD * share_SDD).sum(-1, keepdim=True))
    by_attention_SDD.diagonal(dim1=-2, dim2=-1).zero_()
    return Gradients(risk_S / num_samples, by_attention_SDD / num_samples, by_v_Sd / num_samples)


def performance(weights: Weights, model: PositionalModel, pieces: Iterable[Samples]) -> Performance:
    """Risk and accuracy on the samples of the pieces."""
    share_SDD = weights.attention_SDD.softmax(-1)
    num_samples = 0
    risk_S, right_S = torch.zeros_like(weights.v_Sd[:, 0]), torch.zeros_like(weights.v_Sd[:, 0])
    for samples in pieces:
        num_samples += samples.label_SN.shape[1]
        mixed_SND = share_SDD.shape[-1] * samples.project(weights.v_Sd) @ share_SDD.mT
        output_SN = _activation(mixed_SND, _even_power(mixed_SND, model), model).sum(-1)
        margin_SN = samples.label_SN * output_SN
        risk_S += softplus(-margin_SN).sum(-1)
        right_S += (margin_SN > 0).sum(-1)
    accuracy_S = (right_S / num_samples).masked_fill(~risk_S.isfinite(), torch.nan)
    return Performance(risk_S / num_samples, accuracy_S)


def _activation(x: Tensor, even: Tensor, model: PositionalModel) -> Tensor:
    return x * (even + model.slope)


def _slope(even: Tensor, model: PositionalModel) -> Tensor:
    return model.power * even + model.slope


def _even_power(x: Tensor, model: PositionalModel) -> Tensor:
    """x^(power − 1), by way of squares: a general power takes longer than all else of a step."""
    half = (model.power - 1) // 2
    return x.square().pow(half) if half else torch.ones_like(x)
