"""A layer norm's scale and shift as part of the projection after it, and their gradients out of the projection's.

With n̂ the normalised rows, W(γ n̂ + β) + b = (W γ) n̂ + (b + W β). From G = Σ dyᵀ n̂ and s = Σ dy over all rows follow
dW = G γ + s βᵀ, dγ = Σ_o W G, dβ = Wᵀ s: nothing has to look at the rows again.

Shape suffixes: K cells, i channels in, o channels out.
"""

import torch
from torch import Tensor

from nearsight.triton_language import kernel, tl


def fold(
    weight_Koi: Tensor,
    bias_Ko: Tensor | None,
    scale_Ki: Tensor,
    shift_Ki: Tensor,
    dtype: torch.dtype,
    *,
    num_more: int = 0,
) -> tuple[Tensor, Tensor]:
    """(W γ in `dtype`, b + W β in float32), each [K, …]; after a cell's rows there is room for some more."""
    num_cells, width_out, width = weight_Koi.shape
    folded_Koi = torch.empty(num_cells, width_out + num_more, width, dtype=dtype, device=weight_Koi.device)
    shifted_Ko = torch.empty(num_cells, width_out + num_more, device=weight_Koi.device)
    _fold_kernel[(-(-width_out // 16), num_cells)](
        weight_Koi,
        bias_Ko,
        scale_Ki,
        shift_Ki,
        folded_Koi,
        shifted_Ko,
        *_cell_strides(weight_Koi, bias_Ko, scale_Ki, shift_Ki),
        IN=width,
        OUT=width_out,
        ROWS=width_out + num_more,
        BLOCK=_power(width),
        num_warps=4,
    )
    return folded_Koi, shifted_Ko


def unfold_gradients(
    gradient_Koi: Tensor, sum_Ko: Tensor, weight_Koi: Tensor, scale_Ki: Tensor, shift_Ki: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dW, dγ, dβ) from G and s, all float32. dW takes the place of G. What cells have of either may lie apart."""
    num_cells, width_out, width = weight_Koi.shape
    scale_gradient_Ki = torch.empty(num_cells, width, device=weight_Koi.device)
    shift_gradient_Ki = torch.empty_like(scale_gradient_Ki)
    block = 16
    _unfold_kernel[(-(-width // block), num_cells)](
        gradient_Koi,
        sum_Ko,
        weight_Koi,
        scale_Ki,
        shift_Ki,
        scale_gradient_Ki,
        shift_gradient_Ki,
        *_cell_strides(gradient_Koi, sum_Ko, weight_Koi, scale_Ki, shift_Ki),
        IN=width,
        OUT=width_out,
        BLOCK=block,
        STEP=64,
        num_warps=4,
    )
    return gradient_Koi, scale_gradient_Ki, shift_gradient_Ki


def _cell_strides(*tensors: Tensor | None) -> list[int]:
    """From a cell to the next; weights are parts of a longer row of all parameters. Within a cell they are dense."""
    return [0 if tensor is None else tensor.stride(0) for tensor in tensors]


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


@kernel
def _fold_kernel(
    weight,
    bias,
    scale,
    shift,
    folded,
    shifted,
    weight_k,
    bias_k,
    scale_k,
    shift_k,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(1).to(tl.int64)
    row_o = tl.program_id(0) * 16 + tl.arange(0, 16)
    channel_i = tl.arange(0, BLOCK)
    used_i = channel_i < IN
    used_oi = (row_o < OUT)[:, None] & used_i[None, :]
    place_oi = row_o[:, None] * IN + channel_i[None, :]
    weight_oi = tl.load(weight + cell * weight_k + place_oi, mask=used_oi, other=0.0)
    scale_i = tl.load(scale + cell * scale_k + channel_i, mask=used_i, other=0.0)
    shift_i = tl.load(shift + cell * shift_k + channel_i, mask=used_i, other=0.0)
    moved_o = tl.sum(weight_oi * shift_i[None, :], 1)
    if bias is not None:
        moved_o += tl.load(bias + cell * bias_k + row_o, mask=row_o < OUT, other=0.0)
    tl.store(shifted + cell * ROWS + row_o, moved_o, mask=row_o < OUT)
    result_oi = (weight_oi * scale_i[None, :]).to(folded.dtype.element_ty)
    tl.store(folded + cell * ROWS * IN + place_oi, result_oi, mask=used_oi)


@kernel
def _unfold_kernel(
    gradient,
    sums,
    weight,
    scale,
    shift,
    scale_gradient,
    shift_gradient,
    gradient_k,
    sums_k,
    weight_k,
    scale_k,
    shift_k,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    cell = tl.program_id(1).to(tl.int64)
    channel_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used_i = channel_i < IN
    scale_i = tl.load(scale + cell * scale_k + channel_i, mask=used_i, other=0.0)
    shift_i = tl.load(shift + cell * shift_k + channel_i, mask=used_i, other=0.0)
    scale_total_i = tl.zeros([BLOCK], tl.float32)
    shift_total_i = tl.zeros([BLOCK], tl.float32)
    for start in range(0, OUT, STEP):
        row_o = start + tl.arange(0, STEP)
        used_oi = (row_o < OUT)[:, None] & used_i[None, :]
        place_oi = row_o[:, None] * IN + channel_i[None, :]
        gradient_oi = tl.load(gradient + cell * gradient_k + place_oi, mask=used_oi, other=0.0)
        weight_oi = tl.load(weight + cell * weight_k + place_oi, mask=used_oi, other=0.0)
        sum_o = tl.load(sums + cell * sums_k + row_o, mask=row_o < OUT, other=0.0)
        scale_total_i += tl.sum(weight_oi * gradient_oi, 0)
        shift_total_i += tl.sum(weight_oi * sum_o[:, None], 0)
        result_oi = gradient_oi * scale_i[None, :] + sum_o[:, None] * shift_i[None, :]
        tl.store(gradient + cell * gradient_k + place_oi, result_oi, mask=used_oi)
    tl.store(scale_gradient + cell * IN + channel_i, scale_total_i, mask=used_i)
    tl.store(shift_gradient + cell * IN + channel_i, shift_total_i, mask=used_i)
