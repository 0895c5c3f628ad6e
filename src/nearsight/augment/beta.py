"""Beta(α, α) from two uniform draws."""

import math

import torch
from torch import Tensor

_HALF_STEP = 2.0**-25
"""Draws are multiples of 2⁻²⁴ that include 0, whose logarithm is infinite."""


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
