"""Which images train, which are held out, and which are measured: integer arithmetic only.

Positions are ordered by their 62-bit Philox keys, which no machine, torch version or thread count changes. A split
depends on the labels, the fraction and the seed, so every protocol of a study is validated on the same images.

Shape suffixes: N images of the set, n chosen ones.
"""

import torch
from torch import Tensor

from nearsight.errors import InputError, check_fraction
from nearsight.randomness import permutation


def _shuffled(num: int, stream: str, seed: int) -> Tensor:
    return permutation(torch.tensor([seed]), stream, torch.tensor(0), num)[0]


def _per_class_shares(labels_N: Tensor, num: int) -> Tensor:
    """How many of `num` images each class gives, in proportion to its size; largest remainders first, then low labels.

    Rounding class by class would let the total drift by up to half an image per class.
    """
    counts_C = torch.bincount(labels_N)
    product_C = counts_C * num
    shares_C = product_C // len(labels_N)
    remainders_C = product_C % len(labels_N)
    order_C = torch.argsort(remainders_C, descending=True, stable=True)
    shares_C[order_C[: num - int(shares_C.sum())]] += 1
    return shares_C


def _choose_per_class(labels_N: Tensor, num: int, stream: str, seed: int) -> tuple[Tensor, Tensor]:
    """(rest, chosen): `num` positions with the class proportions of the whole, both ascending."""
    order_N = _shuffled(len(labels_N), stream, seed)
    by_class_N = order_N[torch.argsort(labels_N[order_N], stable=True)]
    sorted_labels_N = labels_N[by_class_N]
    counts_C = torch.bincount(labels_N)
    rank_N = torch.arange(len(labels_N)) - (counts_C.cumsum(0) - counts_C)[sorted_labels_N]
    chosen_N = torch.zeros(len(labels_N), dtype=torch.bool)
    chosen_N[by_class_N] = rank_N < _per_class_shares(labels_N, num)[sorted_labels_N]
    return torch.nonzero(~chosen_N).flatten(), torch.nonzero(chosen_N).flatten()


def stratified_split(labels_N: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """(train, held out) positions, both ascending: `fraction` is held out, with the class proportions of the whole."""
    check_fraction("the held-out fraction", fraction)
    num_held_out = round(len(labels_N) * fraction)
    if not 0 < num_held_out < len(labels_N):
        raise InputError(
            f"{len(labels_N)} images cannot be split with {fraction} held out: one part would be empty; take more of "
            "them, or hold out another share"
        )
    return _choose_per_class(labels_N.cpu(), num_held_out, "stratified split", seed)


def balanced_subset(labels_N: Tensor, num: int, seed: int = 0) -> Tensor:
    """`num` ascending positions with the class proportions of the whole set."""
    if not 0 < num <= len(labels_N):
        raise InputError(f"{num} images were asked for, but there are {len(labels_N)}; ask for 1 to {len(labels_N)}")
    return _choose_per_class(labels_N.cpu(), num, "balanced subset", seed)[1]


def measuring_subset(num_available: int, num: int, seed: int = 0) -> Tensor:
    """The ascending positions of the images a model is measured on: `num` of them, or all when there are fewer."""
    if num < 1:
        raise InputError(f"{num} images were asked for, but at least 1 is needed to measure")
    return _shuffled(num_available, "measuring subset", seed)[:num].sort().values
