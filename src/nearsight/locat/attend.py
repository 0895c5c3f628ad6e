"""One door to attention with a local bias: the fused kernel where there is one, else plain torch.

To whoever looks at torch's functions (`torch.overrides`) it is one function, as `scaled_dot_product_attention` is.

Shape suffixes: B images, H heads, N tokens, P patches, d head size, 2 (by row, by column).
"""

import math

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from nearsight.locat import blocked, kernels
from nearsight.locat.bias import Kernel
from nearsight.locat.grid import Grid


def attend(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    precision_BHP2: Tensor,
    strength_BHP: Tensor,
    grid: Grid,
    *,
    scale: float,
    kernel: Kernel = "gaussian",
    largest_half_square: float = math.inf,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """[B, H, N, d]: softmax(scale · q kᵀ + S + mask) v with S[p, t] = strength_p · kernel of the distance from p to t.

    Args:
        precision_BHP2: ½/(variance + EPS) of each query patch, along rows and along columns.
        strength_BHP: α of each query patch.
        largest_half_square: what ½Δ² along an axis is clamped at.
        mask: added to the logits, or where it is False no attention is paid; it expands to [B, H, N, N].
    """
    tensors = (query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP)
    if has_torch_function(tensors):
        seen: Tensor = handle_torch_function(
            attend,
            tensors,
            *tensors,
            grid,
            scale=scale,
            kernel=kernel,
            largest_half_square=largest_half_square,
            mask=mask,
            dropout_p=dropout_p,
        )
        return seen
    device = query_BHNd.device.type
    # As `scaled_dot_product_attention` does: a norm gives float32. Shapes alone ("meta") know no autocast.
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query_BHNd, key_BHNd, value_BHNd = (tokens.to(dtype) for tokens in tensors[:3])
        tensors = (query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP)
    ordinary = kernel == "gaussian" and mask is None and dropout_p == 0
    if ordinary and device == "cuda" and kernels.is_supported(query_BHNd, grid):
        return kernels.gaussian_attention(*tensors, grid, scale=scale, largest_half_square=largest_half_square)
    return blocked.gaussian_attention(
        *tensors,
        grid,
        scale=scale,
        kernel=kernel,
        largest_half_square=largest_half_square,
        mask=mask,
        dropout_p=dropout_p,
    )
