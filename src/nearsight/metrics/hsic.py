"""The Hilbert–Schmidt independence criterion of linear kernels, which CKA is a quotient of.

Shape suffixes: n examples, D features; L and K numbers of representations.
"""

import torch
from torch import Tensor

from nearsight.metrics.precision import to_float64

_ROUNDING = 1e-14
"""Of sums of float64, relative to what is summed."""
_LAST_BITS = 4
"""By how many units of its precision a network's results differ for examples that are the same."""


def centred(features_nD: Tensor, dtype: torch.dtype) -> Tensor:
    """The features less their mean over examples, float64: exactly 0 if all examples are alike.

    They are if they differ by no more than the last bits of `dtype`, which the features were computed in. What is left
    of equal numbers after their mean was subtracted is rounding, and that would pass for a representation of its own.
    """
    features_nD = to_float64(features_nD)
    # Whole numbers are exact. Half precision counts as float32: by its own, a few features that are large and constant,
    # as ViTs have them, would hide all others.
    precision = torch.finfo(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64).eps
    # From the first example: of equal ones that is exact.
    alike = (features_nD - features_nD[0]).norm() <= _LAST_BITS * precision * features_nD.norm()
    return torch.where(alike, 0.0, features_nD - features_nD.mean(0))


def linear_gram(centred_nD: Tensor) -> Tensor:
    """[n, n], with zeros on the diagonal, as the unbiased estimator wants it.

    HSIC does not see where the features' mean lies. The sums that it is the difference of do, and lose all digits to a
    large one: hence of centred features.
    """
    gram_nn = centred_nD @ centred_nD.T
    return gram_nn - torch.diag(gram_nn.diag())


def unbiased_hsic(a_Lnn: Tensor, b_Knn: Tensor) -> Tensor:
    """The unbiased estimator of Song et al. (2012), Eq. 5, for all pairs of `linear_gram`: [L, K]."""
    n = a_Lnn.shape[-1]
    products = a_Lnn.flatten(1) @ b_Knn.flatten(1).T
    sums = torch.outer(a_Lnn.sum((1, 2)), b_Knn.sum((1, 2))) / ((n - 1) * (n - 2))
    rows = a_Lnn.sum(1) @ b_Knn.sum(1).T * (2 / (n - 2))
    return (products + sums - rows) / (n * (n - 3))


def own_unbiased_hsic(a_Lnn: Tensor) -> Tensor:
    """Of each with itself, [L]: 0 if that is but the rounding of what it is the difference of."""
    own_L, n = unbiased_hsic(a_Lnn, a_Lnn).diag(), a_Lnn.shape[-1]
    rounding_L = _ROUNDING * a_Lnn.square().sum((1, 2)) / (n * (n - 3))
    return torch.where(own_L.abs() > rounding_L, own_L, 0.0)
