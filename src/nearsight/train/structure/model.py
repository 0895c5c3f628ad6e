"""S3's simplified model (3.1): its output, its risk and their gradients, for all seeds at once.

    F(X) = Σ_i σ(D Σ_j S_ij ⟨v, X_j⟩),   S = softmax of the rows of A,   σ(x) = x^power + slope·x

A and v are learned, the diagonal of A is fixed. The gradients are written out: they cost two passes over the patches,
and nothing of a piece of samples outlives it.

Shape suffixes: S seeds, N samples, D patches (rows i, columns j), d dimensions of a patch.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearsight.data.structured import PatchData, normals
from nearsight.data.structured_samples import Samples
from nearsight.train.structure.config import PositionalModel


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
