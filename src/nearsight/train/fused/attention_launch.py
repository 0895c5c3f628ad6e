"""How attention among few tokens is cut into tiles, and its kernels are launched.

Tiles have sides that are powers of two. 65 tokens as one tile of 128 would be four times the work, so the keys are a
main block of 64 and a tail of 16, each with its tiles of a map.

Shape suffixes: K cells, R images.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsight.triton_language import INTERPRETED, runs_on

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
            *inputs,
            bias_K,
            *written,
            *(float(number) for number in numbers),
            shape.num_images // len(bias_K),
            TOKENS=shape.num_tokens,
            HEADS=shape.num_heads,
            WIDTH=shape.head_size,
            WIDTH_BLOCK=_side_of_tile(shape.head_size),
            MAIN=tiling.main,
            TAIL=_LEAST_SIDE,
            QUERIES=tiling.queries,
            LOOPED=shape.num_tokens if tiling.queries <= 2 * _LEAST_SIDE else min(shape.num_tokens, tiling.main),
            HEADS_PER_PROGRAM=tiling.heads,
            PRECISION="ieee" if INTERPRETED else "tf32x3",
            **constants,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            maxnreg=tiling.registers,
        )
    for result, new in zip(results, written, strict=True):
        if new is not result:
            result.copy_(new)
