"""What is folded into a projection, and its gradients out of the projection's: the scale and shift of the layer norm
before it, and LocAt's heads.

With n̂ the normalised rows, W(γ n̂ + β) + b = (W γ) n̂ + (b + W β). From G = Σ dyᵀ n̂ and s = Σ dy over all rows follow
dW = G γ + s βᵀ, dγ = Σ_o W G, dβ = Wᵀ s: nothing has to look at the rows again.

LocAt's heads are linear in the queries, which are linear in n̂: with q = A n̂ + a a head's queries, what they give is
w q + c = (w A) n̂ + (w a + c). So the projection gives it too, for a few more rows of its matrix, and nothing has to
look at the queries again. From G and s of queries (q) and of what they give (g) follow the gradients as if there were
no such rows, G_q + wᵀ G_g and s_q + wᵀ s_g, and those of the heads, dw = G_g Aᵀ + s_g aᵀ and dc = s_g, each summed over
all attention heads.

Shape suffixes: K cells, i channels in, o channels out, P = o and room for what the queries of each head give, d head
size, E weights of the heads: those of the widths, their offsets, those of the strength and its offset.
"""

import torch
from torch import Tensor

from nearsight.train.fused.local_bias import LocalBias
from nearsight.triton_language import kernel, tl

_COLUMNS = 64
"""Channels of a block, where rows for what queries give are made."""


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
        weight_Koi, bias_Ko, scale_Ki, shift_Ki, folded_Koi, shifted_Ko,
        *_cell_strides(weight_Koi, bias_Ko, scale_Ki, shift_Ki),
        IN=width, OUT=width_out, ROWS=width_out + num_more, BLOCK=_power(width), num_warps=4,
    )  # fmt: skip
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
        gradient_Koi, sum_Ko, weight_Koi, scale_Ki, shift_Ki, scale_gradient_Ki, shift_gradient_Ki,
        *_cell_strides(gradient_Koi, sum_Ko, weight_Koi, scale_Ki, shift_Ki),
        IN=width, OUT=width_out, BLOCK=block, STEP=64, num_warps=4,
    )  # fmt: skip
    return gradient_Koi, scale_gradient_Ki, shift_gradient_Ki


def _cell_strides(*tensors: Tensor | None) -> list[int]:
    """From a cell to the next; weights are parts of a longer row of all parameters. Within a cell they are dense."""
    return [0 if tensor is None else tensor.stride(0) for tensor in tensors]


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def fold_given(
    folded_KPi: Tensor, shifted_KP: Tensor, first_Koi: Tensor, scale_Ki: Tensor, heads_KE: Tensor, local: LocalBias
) -> None:
    """Fill the further rows; the others are as `fold` leaves them."""
    blocks, num_heads, constants = _cut(folded_KPi, first_Koi, heads_KE, local)
    _fold_given_kernel[(blocks, num_heads, len(first_Koi))](
        first_Koi, scale_Ki, heads_KE, folded_KPi, shifted_KP, first_Koi.stride(0), scale_Ki.stride(0),
        **constants, num_warps=4,
    )  # fmt: skip


def unfold_given(
    gradient_KPi: Tensor,
    sum_KP: Tensor,
    shifted_KP: Tensor,
    first_Koi: Tensor,
    scale_Ki: Tensor,
    heads_KE: Tensor,
    local: LocalBias,
) -> Tensor:
    """The gradient of the heads, [K, E]. In G and s, the rows of queries become what they would be without others."""
    blocks, num_heads, constants = _cut(gradient_KPi, first_Koi, heads_KE, local)
    parts = torch.empty(len(first_Koi), num_heads, blocks, heads_KE.shape[1], device=first_Koi.device)
    _unfold_given_kernel[(blocks, num_heads, len(first_Koi))](
        gradient_KPi, sum_KP, shifted_KP, first_Koi, scale_Ki, heads_KE, parts, first_Koi.stride(0),
        scale_Ki.stride(0),
        **constants, num_warps=4,
    )  # fmt: skip
    return parts.sum((1, 2))


def _cut(rows_KPi: Tensor, first_Koi: Tensor, heads_KE: Tensor, local: LocalBias) -> tuple[int, int, dict[str, int]]:
    """Blocks of channels, heads of attention, and what the compiler has to know."""
    num_rows, num_channels = rows_KPi.shape[1:]
    width_out = first_Koi.shape[1]
    head_size = heads_KE.shape[1] // local.num_given - 1
    num_heads = width_out // (3 * head_size)
    assert num_rows == width_out + num_heads * local.room(num_heads)
    assert rows_KPi.is_contiguous()
    constants = {
        "IN": num_channels,
        "OUT": width_out,
        "ROWS": num_rows,
        "WIDTH": head_size,
        "WIDTH_BLOCK": _power(head_size),
        "ROOM": local.room(num_heads),
        "GIVEN": local.num_given,
        "AXES": local.num_axes,
        "COLUMNS": _COLUMNS,
    }
    return -(-num_channels // _COLUMNS), num_heads, constants


@kernel
def _fold_kernel(
    weight, bias, scale, shift, folded, shifted, weight_k, bias_k, scale_k, shift_k,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    gradient, sums, weight, scale, shift, scale_gradient, shift_gradient, gradient_k, sums_k, weight_k, scale_k,
    shift_k,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
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


@kernel
def _fold_given_kernel(
    weight, scale, heads, folded, shifted, weight_k, scale_k,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    ROOM: tl.constexpr, GIVEN: tl.constexpr, AXES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    cell = tl.program_id(2).to(tl.int64)
    channel_i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_di = _load_scaled(weight + cell * weight_k, scale + cell * scale_k, head, channel_i, IN, WIDTH, WIDTH_BLOCK)
    shifted += cell * ROWS
    shifted_d = _load_row(shifted + head * WIDTH, WIDTH, WIDTH_BLOCK)
    for a in tl.static_range(ROOM):
        row = OUT + head * ROOM + a
        given_i = tl.zeros([COLUMNS], tl.float32)
        moved = 0.0
        if a < GIVEN:
            matrix, offset = _places(heads + cell * (GIVEN * (WIDTH + 1)), a, WIDTH, AXES)
            matrix_d = _load_row(matrix, WIDTH, WIDTH_BLOCK)
            given_i = tl.sum(matrix_d[:, None] * weight_di, 0)
            moved = tl.sum(matrix_d * shifted_d, 0) + tl.load(offset)
        place_i = (cell * ROWS + row) * IN + channel_i
        tl.store(folded + place_i, given_i.to(folded.dtype.element_ty), mask=channel_i < IN)
        if tl.program_id(0) == 0:
            tl.store(shifted + row, moved)


@kernel
def _unfold_given_kernel(
    gradient, sums, shifted, weight, scale, heads, parts, weight_k, scale_k,
    IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    ROOM: tl.constexpr, GIVEN: tl.constexpr, AXES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    WEIGHTS: tl.constexpr = GIVEN * (WIDTH + 1)
    head = tl.program_id(1)
    cell = tl.program_id(2).to(tl.int64)
    is_first = (tl.program_id(0) == 0).to(tl.float32)  # of the blocks of channels: sums are added once
    channel_i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    used_i = channel_i < IN
    row_d = tl.arange(0, WIDTH_BLOCK)
    weight_di = _load_scaled(weight + cell * weight_k, scale + cell * scale_k, head, channel_i, IN, WIDTH, WIDTH_BLOCK)
    shifted_d = _load_row(shifted + cell * ROWS + head * WIDTH, WIDTH, WIDTH_BLOCK)
    sums += cell * ROWS
    sum_d = _load_row(sums + head * WIDTH, WIDTH, WIDTH_BLOCK)
    gradient += cell * ROWS * IN
    place_di = (head * WIDTH + row_d)[:, None] * IN + channel_i[None, :]
    used_di = (row_d < WIDTH)[:, None] & used_i[None, :]
    gradient_di = tl.load(gradient + place_di, mask=used_di, other=0.0)
    parts += ((cell * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)) * WEIGHTS
    for a in tl.static_range(GIVEN):
        row = OUT + head * ROOM + a
        matrix, _ = _places(heads + cell * WEIGHTS, a, WIDTH, AXES)
        matrix_d = _load_row(matrix, WIDTH, WIDTH_BLOCK)
        given_i = tl.load(gradient + row * IN + channel_i, mask=used_i, other=0.0)
        sum_of_given = tl.load(sums + row)
        gradient_di += matrix_d[:, None] * given_i[None, :]
        sum_d += matrix_d * sum_of_given
        matrix_part, offset_part = _places(parts, a, WIDTH, AXES)
        part_d = tl.sum(weight_di * given_i[None, :], 1) + shifted_d * (sum_of_given * is_first)
        tl.store(matrix_part + row_d, part_d, mask=row_d < WIDTH)
        tl.store(offset_part, sum_of_given * is_first)
    tl.store(gradient + place_di, gradient_di, mask=used_di)
    if tl.program_id(0) == 0:
        tl.store(sums + head * WIDTH + row_d, sum_d, mask=row_d < WIDTH)


@kernel
def _places(heads, a, WIDTH, AXES):
    """Where the weights of a number lie that queries give, and its offset."""
    matrix = heads + a * WIDTH
    offset = heads + AXES * WIDTH + a
    if a >= AXES:
        matrix += AXES
        offset = heads + AXES * (WIDTH + 1) + WIDTH
    return matrix, offset


@kernel
def _load_scaled(weight, scale, head, channel_i, IN, WIDTH, WIDTH_BLOCK):
    """A head's rows of the projection to queries, times the scale of the norm before it."""
    row_d = tl.arange(0, WIDTH_BLOCK)
    used_i = channel_i < IN
    place_di = (head * WIDTH + row_d)[:, None] * IN + channel_i[None, :]
    weight_di = tl.load(weight + place_di, mask=(row_d < WIDTH)[:, None] & used_i[None, :], other=0.0)
    return weight_di * tl.load(scale + channel_i, mask=used_i, other=0.0)[None, :]


@kernel
def _load_row(row, WIDTH, WIDTH_BLOCK):
    place_d = tl.arange(0, WIDTH_BLOCK)
    return tl.load(row + place_d, mask=place_d < WIDTH, other=0.0)
