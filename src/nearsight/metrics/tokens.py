"""Tokens that stand out: by their norm (outliers), by what attention they receive (sinks), by where they lie.

Shape suffixes: N tokens (prefix tokens such as CLS and registers first, then patches row by row), P patches; leading
axes (batch, heads, …) are carried through.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.errors import InputError, check_at_least
from nearsight.metrics.attention import check_grid, to_float64

FENCES = 3.0
"""Interquartile ranges above the upper quartile: what Tukey (1977) calls far out. Of norms with a normal distribution
one in 800,000 is."""
RATIO = 2.0
"""Times the median that an outlier has at least: where all norms are nearly equal, quartiles differ by rounding."""
TIMES = 10.0
"""Times what a patch receives on average that a sink receives at least."""


def outlier_tokens(norms_P: Tensor, *, fences: float = FENCES, ratio: float = RATIO) -> Tensor:
    """Which patch tokens have an outlying norm, among those of one image and layer: [..., P] bool (Darcet et al. 2024).

    Darcet et al. (arXiv 2309.16588) cut at a norm of 150, which suits one model; Jiang et al. (arXiv 2506.08010) choose
    a number for each. Here a norm is an outlier if it is above Q3 + `fences`·(Q3 − Q1) of the image's own norms
    (Tukey's rule; quartiles are interpolated linearly) and above `ratio` times their median. So fewer than a
    quarter of an image's patches are outliers, whatever the distribution: a second mode that is larger is not made of
    outliers. Among fewer than five patches there are none.
    """
    return norms_P > outlier_bound(norms_P.sort(-1).values, fences=fences, ratio=ratio)


def outlier_bound(sorted_P: Tensor, *, fences: float = FENCES, ratio: float = RATIO) -> Tensor:
    """What norms of `outlier_tokens` are above, from norms in ascending order: [..., 1]."""
    check_at_least("fences", fences, 0)
    check_at_least("ratio", ratio, 1)
    low, high = quantile(sorted_P, 0.25), quantile(sorted_P, 0.75)
    # Beyond the upper quartile by as many ranges.
    return torch.maximum(torch.lerp(low, high, 1 + fences), ratio * quantile(sorted_P, 0.5))


def quantile(sorted_P: Tensor, level: float) -> Tensor:
    """Interpolated linearly: [..., 1]."""
    below, part = divmod(level * (sorted_P.shape[-1] - 1), 1)
    at = min(int(below), sorted_P.shape[-1] - 1)
    return torch.lerp(sorted_P[..., at : at + 1], sorted_P[..., at : at + 2][..., -1:], part)


def received_attention(attn: Tensor, *, num_prefix_tokens: int = 1) -> Tensor:
    """The attention that each token receives from the patches, on average: [..., heads, N] float64, which sums to 1.

    `attn` is [..., heads, N, N] after the softmax. These are the column means of a map; the first ones are the shares
    of CLS and registers.
    """
    if attn.dim() < 3 or attn.shape[-1] != attn.shape[-2]:
        raise InputError(f"attention of shape [..., heads, N, N] is needed, not {list(attn.shape)}")
    if not 0 <= num_prefix_tokens < attn.shape[-1]:
        raise InputError(f"{num_prefix_tokens} prefix tokens leave no patch among {attn.shape[-1]} tokens")
    return to_float64(attn[..., num_prefix_tokens:, :]).mean(-2)


def sink_patches(received_P: Tensor, *, times: float = TIMES) -> Tensor:
    """Which patches are attention sinks: those that receive more than `times` the mean of all patches, [..., P] bool.

    Sinks are known from language models (Xiao et al. 2024, arXiv 2309.17453); in ViTs without registers a few patches
    take their place (Darcet et al. 2024). What counts is the ratio among patches, so that it does not matter how much
    CLS receives. Fewer than one in `times` patches can be sinks, and among `times` patches or fewer there are none.
    """
    check_at_least("times", times, 1)
    return received_P > times * received_P.mean(-1, keepdim=True)


def gini(values_P: Tensor) -> Tensor:
    """The Gini coefficient of values that are not negative, over the last axis: [...] float64.

    0 where all are equal, 1 − 1/P where one has everything: half the mean absolute difference of all pairs, relative to
    the mean. NaN if their sum is 0.
    """
    sorted_P = to_float64(values_P.sort(-1).values)
    count = sorted_P.shape[-1]
    weight_P = torch.arange(1 - count, count, 2, dtype=torch.float64, device=sorted_P.device)
    return (sorted_P @ weight_P) / (count * sorted_P.sum(-1))


def patch_coverage(masks_BHW: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """The share of each patch that a mask of pixels covers: [B, P] float64, patches row by row.

    Masks are True, or 1, on what is looked for; their sides are multiples of the grid's.
    """
    check_grid(grid_size)
    rows, cols = grid_size
    height, width = masks_BHW.shape[-2:]
    if masks_BHW.dim() != 3 or height % rows or width % cols:
        raise InputError(
            f"masks [B, height, width] with sides that are multiples of {rows}×{cols} are needed, not "
            f"{list(masks_BHW.shape)}"
        )
    return F.avg_pool2d(to_float64(masks_BHW)[:, None], (height // rows, width // cols)).flatten(1)


def background_share(weights_P: Tensor, background_P: Tensor) -> Tensor:
    """The share of some weights on patches that lies on the background: [...] float64.

    ViTs that use background patches to represent the whole image ("lazy aggregation", Shi, Yu and Yang 2026, arXiv
    2602.22394) put more there than its area. The weights may be CLS's attention, what patches receive, or whatever
    scores patches; none is negative. `background_P` says which patches are background, or which part of each
    (`patch_coverage`); it is broadcast to the weights. Uniform weights have `background_P.mean(-1)`: compare with that.
    NaN if all weights are 0.
    """
    weights_P, background_P = to_float64(weights_P), to_float64(background_P)
    if weights_P.shape[-1] != background_P.shape[-1]:
        raise InputError(f"{weights_P.shape[-1]} weights do not fit {background_P.shape[-1]} patches of background")
    return (weights_P * background_P).sum(-1) / weights_P.sum(-1)
