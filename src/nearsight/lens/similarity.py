"""Cosine similarity of near and far patch tokens on a GPU: one launch per layer, no copy of the tokens, no Gram matrix.

A program has a tile of pairs of an image's patches. It sums their products and the squares of the tokens over the
channels, divides, and adds up the pairs that share a side, and those that are far apart: whether they are follows from
their numbers. The same as `nearsight.metrics.features.similarity_by_distance`, but tokens are not rounded to their type
again when they are normalised, nor are products.

Shape suffixes: B images, N tokens, P patches, Q the others of pairs, C channels, T tiles of pairs.
"""

import torch
from torch import Tensor

from nearsight.metrics.features import FAR
from nearsight.triton_language import INTERPRETED, Prepared, kernel, launch, tl

_SIDE = 64


def similarity_by_kernel(tokens_BNC: Tensor, patches_P: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Sums over pairs of patches of their cosine similarity: of those that share a side, and of those at least `FAR`
    steps apart, float32 [2, B, T]. T are parts of an image's pairs: who adds them up does it for many layers at once.

    Args:
        tokens_BNC: of any strides; float32, bfloat16 or float16.
        patches_P: where the patches are among them, row by row; int64.
        grid_size: of the patches.
    """
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16
        tokens_BNC = tokens_BNC.float()
    batch, _, channels = tokens_BNC.shape
    tiles, is_wide = -(-len(patches_P) // _SIDE), tokens_BNC.dtype == torch.float32
    sums_2BT = torch.empty(2, batch, tiles * tiles, dtype=torch.float32, device=tokens_BNC.device)
    launch(
        _pairs,
        (tokens_BNC, patches_P, sums_2BT, grid_size[1]),
        lambda: Prepared(
            programs=batch * tiles * tiles,
            numbers=[batch, tiles, len(patches_P), channels, *tokens_BNC.stride()],
            constants={
                "SIDE": _SIDE,
                "STEP": 32 if is_wide else 64,
                "PRECISION": "tf32x3" if is_wide and not INTERPRETED else "ieee",
                "FAR": FAR,
            },
            options={"num_warps": 4},
        ),
    )
    return sums_2BT


@kernel
def _pairs(
    tokens, patches, sums, num_columns, num_images, num_tiles, num_patches, num_channels, tokens_b, tokens_n, tokens_c,
    SIDE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Each pair once: a patch and one that comes after it."""
    program = tl.program_id(0)
    tokens += (program // (num_tiles * num_tiles)).to(tl.int64) * tokens_b
    above, beside = program // num_tiles % num_tiles, program % num_tiles
    number_P, number_Q = above * SIDE + tl.arange(0, SIDE), beside * SIDE + tl.arange(0, SIDE)
    token_P = tokens + tl.load(patches + number_P, mask=number_P < num_patches, other=0) * tokens_n
    token_Q = tokens + tl.load(patches + number_Q, mask=number_Q < num_patches, other=0) * tokens_n
    product_PQ = tl.full([SIDE, SIDE], 0.0, tl.float32)
    square_P = tl.full([SIDE], 0.0, tl.float32)
    square_Q = tl.full([SIDE], 0.0, tl.float32)
    # Below the diagonal there is no pair.
    for start in range(0, tl.where(beside < above, 0, num_channels), STEP):
        channel_C = start + tl.arange(0, STEP)
        used_1C = (channel_C < num_channels)[None, :]
        step_1C = channel_C.to(tl.int64)[None, :] * tokens_c
        values_PC = tl.load(token_P[:, None] + step_1C, mask=used_1C, other=0.0)
        values_QC = tl.load(token_Q[:, None] + step_1C, mask=used_1C, other=0.0)
        product_PQ = tl.dot(values_PC, tl.trans(values_QC), product_PQ, input_precision=PRECISION)
        square_P += tl.sum(values_PC.to(tl.float32) * values_PC.to(tl.float32), 1)
        square_Q += tl.sum(values_QC.to(tl.float32) * values_QC.to(tl.float32), 1)
    size_P, size_Q = tl.maximum(tl.sqrt(square_P), 1e-12), tl.maximum(tl.sqrt(square_Q), 1e-12)
    cosine_PQ = product_PQ / size_P[:, None] / size_Q[None, :]
    down_PQ = tl.abs((number_P // num_columns)[:, None] - (number_Q // num_columns)[None, :])
    right_PQ = tl.abs((number_P % num_columns)[:, None] - (number_Q % num_columns)[None, :])
    is_pair_PQ = (number_P[:, None] < number_Q[None, :]) & (number_Q < num_patches)[None, :]
    near = tl.sum(tl.sum(tl.where(is_pair_PQ & (down_PQ + right_PQ == 1), cosine_PQ, 0.0), 1), 0)
    far = tl.sum(tl.sum(tl.where(is_pair_PQ & (down_PQ + right_PQ >= FAR), cosine_PQ, 0.0), 1), 0)
    tl.store(sums + program, near)
    tl.store(sums + num_images * num_tiles * num_tiles + program, far)
