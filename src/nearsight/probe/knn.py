"""Weighted k-NN classification of frozen features (Wu et al. 2018; Caron et al. 2021, DINO).

The k nearest training images by cosine vote for their classes with weights exp(similarity / T).

Shape suffixes: N training features, Q queries, C channels, c classes, k neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearsight.errors import InputError
from nearsight.lazy import torch
from nearsight.probe.search import ExactIndex, Index, check_enough, unit
from nearsight.probe.settings import KNN_KS, KNN_TEMPERATURE, check_votes

if TYPE_CHECKING:
    from torch import Tensor

_QUERIES_AT_ONCE = 4096


def knn_scores(
    index: Index,
    train_labels_N: Tensor,
    queries_QC: Tensor,
    *,
    num_classes: int,
    ks: Sequence[int] = KNN_KS,
    temperature: float = KNN_TEMPERATURE,
) -> dict[int, Tensor]:
    """k → the share of the votes that each class has, [Q, c]. One search gives those of every k."""
    check_votes(ks, temperature)
    check_enough(len(train_labels_N), max(ks), "training samples")
    similarity_Qk, neighbour_Qk = index.search(queries_QC, max(ks))
    label_Qk = train_labels_N.to(neighbour_Qk.device)[neighbour_Qk]
    # Relative to the nearest, so that no exponential overflows; this does not change the shares.
    vote_Qk = torch.exp((similarity_Qk - similarity_Qk[:, :1]) / temperature)
    scores = {}
    for k in ks:
        votes_Qc = vote_Qk.new_zeros(len(vote_Qk), num_classes).scatter_add_(1, label_Qk[:, :k], vote_Qk[:, :k])
        scores[k] = votes_Qc / votes_Qc.sum(1, keepdim=True)
    return scores


def knn_right(
    train_NC: Tensor,
    train_labels_N: Tensor,
    test_QC: Tensor,
    test_labels_Q: Tensor,
    *,
    num_classes: int,
    ks: Sequence[int] = KNN_KS,
    temperature: float = KNN_TEMPERATURE,
    device: torch.device | str = "cpu",
) -> dict[int, Tensor]:
    """k → for each test feature whether its class gets the most votes, [Q] bool."""
    check_votes(ks, temperature)
    check_enough(len(train_labels_N), max(ks), "training samples")
    check_classes_seen(train_labels_N, test_labels_Q)
    index = ExactIndex(train_NC.to(device))
    right: dict[int, list[Tensor]] = {k: [] for k in ks}
    for part_qC, labels_q in zip(test_QC.split(_QUERIES_AT_ONCE), test_labels_Q.split(_QUERIES_AT_ONCE), strict=True):
        scores = knn_scores(
            index, train_labels_N, part_qC.to(device), num_classes=num_classes, ks=ks, temperature=temperature
        )
        for k in ks:
            right[k].append(scores[k].argmax(1).cpu() == labels_q.cpu())
    return {k: torch.cat(parts) for k, parts in right.items()}


def knn_right_of_others(
    features_NC: Tensor, labels_N: Tensor, *, k: int, temperature: float = KNN_TEMPERATURE
) -> Tensor:
    """For each feature whether its class gets the most votes of the k nearest others, [N] bool (leave one out)."""
    check_votes([k], temperature)
    check_enough(len(labels_N) - 1, k, "other images")
    unit_NC = unit(features_NC)
    right = []
    for at_q in torch.arange(len(labels_N), device=labels_N.device).split(_QUERIES_AT_ONCE):
        similarity_qN = unit_NC[at_q] @ unit_NC.T
        similarity_qN[torch.arange(len(at_q)), at_q] = -torch.inf
        similarity_qk, neighbour_qk = similarity_qN.topk(k)
        vote_qk = torch.exp((similarity_qk - similarity_qk[:, :1]) / temperature)
        votes_qc = vote_qk.new_zeros(len(at_q), int(labels_N.max()) + 1)
        right.append(votes_qc.scatter_add_(1, labels_N[neighbour_qk], vote_qk).argmax(1) == labels_N[at_q])
    return torch.cat(right)


def knn_accuracy(
    train_NC: Tensor,
    train_labels_N: Tensor,
    test_QC: Tensor,
    test_labels_Q: Tensor,
    *,
    num_classes: int,
    ks: Sequence[int] = KNN_KS,
    temperature: float = KNN_TEMPERATURE,
    device: torch.device | str = "cpu",
) -> dict[int, float]:
    """k → share of the test features whose class gets the most votes."""
    right = knn_right(
        train_NC,
        train_labels_N,
        test_QC,
        test_labels_Q,
        num_classes=num_classes,
        ks=ks,
        temperature=temperature,
        device=device,
    )
    return {k: float(right_Q.double().mean()) for k, right_Q in right.items()}


def check_classes_seen(train_labels_N: Tensor, test_labels_Q: Tensor, part: str = "test") -> None:
    """Refuse samples with classes that were not in training; the error names them."""
    unseen = sorted(set(test_labels_Q.tolist()) - set(train_labels_N.tolist()))
    if unseen:
        shown = ", ".join(map(str, unseen[:5])) + (", …" if len(unseen) > 5 else "")
        raise InputError(
            f"{'class' if len(unseen) == 1 else 'classes'} {shown} of the {part} samples "
            f"{'is' if len(unseen) == 1 else 'are'} never seen in training, so that nothing could predict "
            f"{'it' if len(unseen) == 1 else 'them'}; use more training samples"
        )
