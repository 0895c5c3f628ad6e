"""What the kernels of attention among few tokens share: tiles of a map, the launch, and the rows of tokens.

Tiles have sides that are powers of two. 65 tokens as one tile of 128 would be four times the work, so the keys are a
main block of 64 and a tail of 16, each with its tiles of a map. In kernels they are a tuple of blocks, the main one
first. Tokens may be taken in another order, as if the first ones came last: `FIRST` is the token to begin with.

Shape suffixes: K cells, R images, N queries or tokens, M keys, d head size. Names in capitals are known to the
compiler.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.triton_language import INTERPRETED, kernel, runs_on, tl

_LEAST_SIDE = 16  # of a tile that matrix units take
_MOST_TOKENS = 128 + _LEAST_SIDE
_LARGEST_HEAD = 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_supported(num_tokens: int, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels work on such tensors."""
    fits = 1 <= num_tokens <= _MOST_TOKENS and 1 <= head_size <= _LARGEST_HEAD
    return fits and dtype in _DTYPES and runs_on(device)


class Tiling(NamedTuple):
    main: int
    """Keys of the main block; those that are left are the tail."""
    queries: int
    """Queries of a tile, a divisor of the main block. If they are many, those of the tail are a tile of their own."""
    warps: int
    heads: int = 1
    """Heads that a program does one after the other; a divisor of their number."""
    stages: int = 2
    registers: int | None = None


def tiling_of(num_tokens: int, head_size: int, dtype: torch.dtype, *, backward: bool) -> Tiling:
    """What was fastest on an H200 for 65 tokens and heads of 24; else the fewest instructions to issue, by what the
    compiler makes, without much register spilling.

    A program of one warp needs no barriers and no sums between warps, as long as its sums stay in its registers.
    Shared memory is at most 99 KiB, which smaller GPUs have too; for float32 and more than 80 tokens, 192 KiB.
    """
    side, width = _side_of_tile(num_tokens), _side_of_tile(head_size)
    # With fewer than 64 tokens, a block and its tail would be as large as the next block, or nearly.
    has_tail = 64 <= side // 2 < num_tokens <= side // 2 + _LEAST_SIDE
    main = side // 2 if has_tail else side
    if dtype == torch.float32:
        return Tiling(main, queries=main, warps=4 if main <= 64 else 8)
    if not backward and main * width <= 64 * 64:
        return Tiling(main, queries=min(main, 32), warps=1)
    if backward and main <= 32:
        return Tiling(main, queries=_LEAST_SIDE, warps=1)
    if backward and main * width <= 64 * 32:
        return Tiling(main, queries=32, warps=2)
    return Tiling(main, queries=32 if backward and main * width > 64 * 64 else min(main, 64), warps=4)


def _side_of_tile(number: int) -> int:
    return max(_LEAST_SIDE, 1 << (number - 1).bit_length())


class Shape(NamedTuple):
    """Of attention."""

    num_images: int
    num_tokens: int
    num_heads: int
    head_size: int


def launch(
    run: Any,
    inputs: Sequence[Tensor],
    bias_K: Tensor,
    results: Sequence[Tensor],
    numbers: Sequence[float],
    shape: Shape,
    tiling: Tiling,
    **constants: Any,
) -> None:
    """Fill `results` for all images and heads.

    Args:
        run: a kernel. It gets everything in this order, then how many images a cell has, and the constants.
        inputs: contiguous and of one dtype, as are the results.
        bias_K: float32, contiguous, cell by cell; the first R / K images are of the first cell, and so on.
        numbers: the first is the scale of the products of queries and keys; above 0.

    The number of images is no argument of the kernels: none of it asks for another one to be compiled.
    """
    dtype, device = inputs[0].dtype, inputs[0].device
    assert is_supported(shape.num_tokens, shape.head_size, dtype, device)
    assert all(x.dtype == dtype for x in (*inputs, *results))
    assert all(x.is_contiguous() for x in (*inputs, bias_K, *results))
    assert all(len(x) == shape.num_images for x in (*inputs, *results))
    assert shape.num_images % len(bias_K) == 0
    assert numbers[0] > 0  # else the largest logit would not be that of the largest product
    assert shape.num_heads % tiling.heads == 0
    written = results
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16
        inputs, written = [x.float() for x in inputs], [x.float() for x in results]
    with torch.cuda.device_of(inputs[0]):
        run[(shape.num_images * shape.num_heads // tiling.heads,)](
            *inputs, bias_K, *written, *(float(number) for number in numbers), shape.num_images // len(bias_K),
            TOKENS=shape.num_tokens, HEADS=shape.num_heads, WIDTH=shape.head_size,
            WIDTH_BLOCK=_side_of_tile(shape.head_size), MAIN=tiling.main, TAIL=_LEAST_SIDE, QUERIES=tiling.queries,
            LOOPED=shape.num_tokens if tiling.queries <= 2 * _LEAST_SIDE else min(shape.num_tokens, tiling.main),
            HEADS_PER_PROGRAM=tiling.heads, PRECISION="ieee" if INTERPRETED else "tf32x3", **constants,
            num_warps=tiling.warps, num_stages=tiling.stages, maxnreg=tiling.registers,
        )  # fmt: skip
    for result, new in zip(results, written, strict=True):
        if new is not result:
            result.copy_(new)


@kernel
def image_and_head(HEADS, HEADS_PER_PROGRAM):
    """The image of a program, and the first of its heads."""
    image = (tl.program_id(0) // (HEADS // HEADS_PER_PROGRAM)).to(tl.int64)
    return image, tl.program_id(0) % (HEADS // HEADS_PER_PROGRAM) * HEADS_PER_PROGRAM


@kernel
def zeros_like(blocks):
    zeros = ()
    for j in tl.static_range(len(blocks)):
        zeros += (tl.zeros(blocks[j].shape, tl.float32),)
    return zeros


@kernel
def weights_of(logits, scale):
    """The exponentials of scale · logits relative to the largest, a tile per block of keys, and their sum."""
    peak_N = tl.max(logits[0], 1)
    for j in tl.static_range(1, len(logits)):
        peak_N = tl.maximum(peak_N, tl.max(logits[j], 1))
    scale *= 1.4426950408889634  # for powers of 2 instead of e
    weights = ()
    sum_N = tl.zeros_like(peak_N)
    for j in tl.static_range(len(logits)):
        weights += (tl.exp2(logits[j] * scale - (peak_N * scale)[:, None]),)
        sum_N += tl.sum(weights[j], 1)
    return weights, sum_N


@kernel
def without_empty_slots(logit_NM, start, TOKENS):
    """The logits of keys from `start` on, with none left for those past the last token."""
    if start + logit_NM.shape[1] > TOKENS:
        key_M = start + tl.arange(0, logit_NM.shape[1])
        logit_NM = tl.where((key_M < TOKENS)[None, :], logit_NM, float("-inf"))
    return logit_NM


@kernel
def weighed(weights, sum_N, values, PRECISION):
    """The mean of the values by the weights, whose sum this is."""
    out_Nd = tl.zeros([weights[0].shape[0], values[0].shape[1]], tl.float32)
    for j in tl.static_range(len(values)):
        out_Nd = tl.dot(weights[j].to(values[j].dtype), values[j], out_Nd, input_precision=PRECISION)
    return out_Nd * (1.0 / sum_N)[:, None]


@kernel
def shares_of(weights, sum_N, values, out_grad_Nd, PRECISION):
    """Weights that add up to 1, their gradients, each a tile per block of keys, and the mean of these by those."""
    inverse_N1 = (1.0 / sum_N)[:, None]
    shares = ()
    share_grads = ()
    mean_grad_N = tl.zeros_like(sum_N)
    for j in tl.static_range(len(values)):
        shares += (weights[j] * inverse_N1,)
        share_grads += (tl.dot(out_grad_Nd, tl.trans(values[j]), input_precision=PRECISION),)
        mean_grad_N += tl.sum(shares[j] * share_grads[j], 1)
    return shares, share_grads, mean_grad_N


@kernel
def load_all(matrix, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK, MAIN, TAIL):
    """The rows of all tokens: those of the main block, and those of the tail if there is one."""
    blocks = (load(matrix, 0, MAIN, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK),)
    if TOKENS > MAIN:
        blocks += (load(matrix, MAIN, TAIL, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK),)
    return blocks


@kernel
def load_numbers(numbers, WIDTH, WIDTH_BLOCK):
    """As many as a row has; 0 past the last."""
    width_d = tl.arange(0, WIDTH_BLOCK)
    return tl.load(numbers + width_d, mask=width_d < WIDTH, other=0.0)


@kernel
def add_bias(rows_Nd, bias_d):
    return rows_Nd + bias_d.to(rows_Nd.dtype)[None, :]


@kernel
def load(matrix, start, SIZE, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK):
    """The rows of SIZE tokens; 0 past the last token and past the last number of a row."""
    offset_Nd, used_Nd = _offsets(start, SIZE, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)
    return tl.load(matrix + offset_Nd, mask=used_Nd, other=0.0)


@kernel
def store(matrix, rows_Nd, start, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK):
    offset_Nd, used_Nd = _offsets(start, rows_Nd.shape[0], ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK)
    tl.store(matrix + offset_Nd, rows_Nd.to(matrix.dtype.element_ty), mask=used_Nd)


@kernel
def _offsets(start, SIZE, ROW, TOKENS, FIRST, WIDTH, WIDTH_BLOCK):
    """Where numbers of tokens lie, and which of them there are."""
    at_N, used_N = places_of(start, SIZE, ROW, TOKENS, FIRST)
    width_1d = tl.arange(0, WIDTH_BLOCK)[None, :]
    return at_N[:, None] + width_1d, used_N[:, None] & (width_1d < WIDTH)


@kernel
def places_of(start, SIZE, ROW, TOKENS, FIRST):
    """Where tokens lie in a matrix with rows that are ROW numbers apart, and which of them there are."""
    position_N = start + tl.arange(0, SIZE)
    token_N = position_N
    if FIRST > 0:
        token_N = tl.where(position_N < TOKENS - FIRST, position_N + FIRST, position_N + FIRST - TOKENS)
    return token_N * ROW, position_N < TOKENS
