"""Attention with a local bias as one operation of torch: how it is registered, launched, and cut into tiles.

It is a registered operation: `torch.compile` leaves it whole, and `torch.vmap` makes one launch of a stack.

Shape suffixes: B images, H heads, N tokens, P patches, d head size, 2 the axes y and x.
"""

import math
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from nearsight.locat.gaussian import Grid, Shape
from nearsight.locat.kernels.passes import backward_key_kernel, backward_query_kernel, forward_kernel
from nearsight.triton_language import INTERPRETED, runs_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 128
_MOST_NUMBERS = 2**31  # from a head's first token to its last: kernels count them in 32 bits
_LEAST_SIDE = 16  # of a tile that matrix units take

Pass = Literal["forward", "backward_query", "backward_key"]


class Inputs(NamedTuple):
    query_BHNd: Tensor
    key_BHNd: Tensor
    value_BHNd: Tensor
    precision_BHP2: Tensor
    strength_BHP: Tensor


class Geometry(NamedTuple):
    rows: int
    cols: int
    num_prefix: int
    scale: float
    """Of the products of queries and keys."""
    largest_half_square: float
    shape: Shape = "gaussian"

    @property
    def grid(self) -> Grid:
        return Grid(self.rows, self.cols, self.num_prefix)


def is_supported(query_BHNd: Tensor, grid: Grid) -> bool:
    """Whether `radial_attention` works on such queries, and keys and values like them."""
    _, num_heads, num_tokens, head_size = query_BHNd.shape
    fits = 1 <= head_size <= _LARGEST_HEAD and num_tokens == grid.num_tokens and grid.num_patches >= 1
    near = num_tokens * max(query_BHNd.stride(2), num_heads * head_size) < _MOST_NUMBERS
    return fits and near and query_BHNd.dtype in _DTYPES and runs_on(query_BHNd.device)


def radial_attention(
    query_BHNd: Tensor,
    key_BHNd: Tensor,
    value_BHNd: Tensor,
    precision_BHP2: Tensor,
    strength_BHP: Tensor,
    grid: Grid,
    *,
    scale: float,
    largest_half_square: float = math.inf,
    shape: Shape = "gaussian",
    reach_BH: Tensor | None = None,
) -> Tensor:
    """softmax(scale · Q Kᵀ + S) V: from patch to patch S = strength · f(r) with r² = 2 Σ_axis precision_axis · Δ²_axis.

    Args:
        query_BHNd: bfloat16, float16 or float32, of any strides; as far as `is_supported`.
        key_BHNd: as above, of the same shape and dtype.
        value_BHNd: as the keys.
        precision_BHP2: float32, ½ / variance by y and by x, in grid cells; 0 or more, of any strides.
        strength_BHP: float32, of any strides.
        grid: where tokens lie; from and to prefix tokens, S is 0.
        scale: of the products of queries and keys; above 0.
        largest_half_square: ½ Δ² of an axis counts as no more than this.
        shape: f: exp(−r²/2), exp(−r), 1/(1 + r), r, or none.
        reach_BH: float32; keys whose patch is farther from that of the query are hidden, in grid cells. Tiles in which
            all are hidden are not computed. Prefix tokens see all tokens and are seen by all.

    Returns:
        [B, H, N, d] in the dtype of the queries, laid out as [B, N, H, d]. Sums and the softmax are float32; weights,
        and gradients of logits, are rounded to that dtype before they are multiplied with values, queries and keys.
    """
    assert is_supported(query_BHNd, grid)
    assert query_BHNd.shape == key_BHNd.shape == value_BHNd.shape
    assert query_BHNd.dtype == key_BHNd.dtype == value_BHNd.dtype
    assert precision_BHP2.shape == (*query_BHNd.shape[:2], grid.num_patches, 2)
    assert strength_BHP.shape == precision_BHP2.shape[:3]
    assert precision_BHP2.dtype == strength_BHP.dtype == torch.float32
    assert reach_BH is None or (reach_BH.shape == query_BHNd.shape[:2] and reach_BH.dtype == torch.float32)
    assert scale > 0  # otherwise the largest logit would not be that of the largest product
    dtype, matrices = query_BHNd.dtype, (query_BHNd, key_BHNd, value_BHNd)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter would multiply the bits
        matrices = query_BHNd.float(), key_BHNd.float(), value_BHNd.float()
    geometry = Geometry(grid.rows, grid.cols, grid.num_prefix, float(scale), float(largest_half_square), shape)
    out_BHNd: Tensor = _attend(*matrices, precision_BHP2, strength_BHP, *geometry, reach_BH)[0]
    return out_BHNd.to(dtype)


@torch.library.custom_op("nearsight::radial_attention", mutates_args=())
def _attend(
    query_BHNd: Tensor, key_BHNd: Tensor, value_BHNd: Tensor, precision_BHP2: Tensor, strength_BHP: Tensor,
    rows: int, cols: int, num_prefix: int, scale: float, largest_half_square: float, shape: str = "gaussian",
    reach_BH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return forward(
        Inputs(query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP),
        Geometry(rows, cols, num_prefix, scale, largest_half_square, cast("Shape", shape)),
        reach_BH,
    )


@torch.library.custom_op("nearsight::radial_attention_backward", mutates_args=())
def _attend_back(
    query_BHNd: Tensor, key_BHNd: Tensor, value_BHNd: Tensor, precision_BHP2: Tensor, strength_BHP: Tensor,
    rows: int, cols: int, num_prefix: int, scale: float, largest_half_square: float, shape: str,
    reach_BH: Tensor | None, out_BHNd: Tensor, log_sum_BHN: Tensor, out_grad_BHNd: Tensor, wanted: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value, precision, strength = backward(
        Inputs(query_BHNd, key_BHNd, value_BHNd, precision_BHP2, strength_BHP),
        Geometry(rows, cols, num_prefix, scale, largest_half_square, cast("Shape", shape)),
        out_BHNd,
        log_sum_BHN,
        out_grad_BHNd,
        reach_BH,
        wanted,
    )
    return query, key, value, precision, strength


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], inputs[-1], *output)
    ctx.geometry = inputs[5:-1]


def _differentiate(ctx: Any, out_grad_BHNd: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, reach_BH, out_BHNd, log_sum_BHN = ctx.saved_tensors
    _, _, _, by_precision, by_strength = ctx.needs_input_grad[:5]
    wanted = 0 if ctx.geometry[-1] == "none" else 2 if by_precision else 1 if by_strength else 0
    grads = _attend_back(*inputs, *ctx.geometry, reach_BH, out_BHNd, log_sum_BHN, out_grad_BHNd, wanted)
    found = [grad if made else None for grad, made in zip(grads[3:], (wanted >= 2, wanted >= 1), strict=True)]
    return *grads[:3], *found, *(None for _ in ctx.geometry), None


def _fold_stack(operation: Any) -> None:
    """Attention has no weights: under `torch.vmap`, a stack of batches is one batch."""

    def of_stack(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        def folded(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            stacked = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            return stacked.flatten(0, 1)

        results = operation(*map(folded, values, in_dims))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), tuple(0 for _ in results)

    operation.register_vmap(of_stack)


_attend.register_fake(lambda *arguments: _new_results(Inputs(*arguments[:5])))
_attend_back.register_fake(lambda *arguments: tuple(_new_gradients(Inputs(*arguments[:5]), arguments[-1])))
_attend.register_autograd(_differentiate, setup_context=_keep)
_fold_stack(_attend)
_fold_stack(_attend_back)


def forward(inputs: Inputs, geometry: Geometry, reach_BH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(output, base-2 logarithm of each query's sum of weights)."""
    out_BHNd, log_sum_BHN = _new_results(inputs)
    bumps = [inputs.precision_BHP2, inputs.strength_BHP]
    _launch("forward", _with_whole_rows(*inputs[:3]), bumps, reach_BH, [out_BHNd, log_sum_BHN], geometry)
    return out_BHNd, log_sum_BHN


def backward(
    inputs: Inputs,
    geometry: Geometry,
    out_BHNd: Tensor,
    log_sum_BHN: Tensor,
    out_grad_BHNd: Tensor,
    reach_BH: Tensor | None = None,
    wanted: int = 2,
) -> Inputs:
    """Gradients by the inputs, from that by the output. `wanted`: 0 for none by precisions and strengths, 1 for those
    by strengths alone; the others have no numbers."""
    grads = _new_gradients(inputs, wanted)
    matrices = _with_whole_rows(*inputs[:3], out_grad_BHNd)
    bumps = [inputs.precision_BHP2, inputs.strength_BHP]
    num_images, num_heads, num_tokens, _ = out_BHNd.shape
    # For each query, what the pass for keys has to know about it: the kernels say what.
    notes_BH5N = log_sum_BHN.new_empty(num_images, num_heads, 5, num_tokens)
    results = [grads.query_BHNd, grads.precision_BHP2, grads.strength_BHP]
    others = [log_sum_BHN, out_BHNd, notes_BH5N, *results]
    _launch("backward_query", matrices, bumps, reach_BH, others, geometry, WANTED=wanted)
    _launch("backward_key", matrices, [], reach_BH, [notes_BH5N, grads.key_BHNd, grads.value_BHNd], geometry)
    return grads


def _new_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What `forward` gives, not yet written."""
    query = inputs.query_BHNd
    return _new_rows(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _new_gradients(inputs: Inputs, wanted: int) -> Inputs:
    """What `backward` gives, not yet written."""
    precision, strength = (
        x.new_empty(x.shape if wanted >= least else (len(x), 0)) for least, x in ((2, inputs[3]), (1, inputs[4]))
    )
    query, key, value = (_new_rows(x) for x in inputs[:3])
    return Inputs(query, key, value, precision, strength)


def _new_rows(like_BHNd: Tensor) -> Tensor:
    """Laid out as [B, N, H, d], so that the heads of a token can be joined without a copy."""
    num_images, num_heads, num_tokens, head_size = like_BHNd.shape
    return like_BHNd.new_empty(num_images, num_tokens, num_heads, head_size).transpose(1, 2)


def _with_whole_rows(*matrices_BHNd: Tensor) -> list[Tensor]:
    """The same matrices, with each row in one piece: kernels take any strides but that of the last axis."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in matrices_BHNd]


_KERNELS: dict[Pass, Any] = {
    "forward": forward_kernel,
    "backward_query": backward_query_kernel,
    "backward_key": backward_key_kernel,
}


def _launch(
    which: Pass,
    matrices: list[Tensor],
    bumps: list[Tensor],
    reach_BH: Tensor | None,
    others: list[Tensor],
    geometry: Geometry,
    **wanted: int,
) -> None:
    """`others` are as made above. No kernel is compiled for a number of images."""
    num_images, num_heads, _, head_size = matrices[0].shape
    grid = geometry.grid
    tiling = tiling_of(which, grid, head_size, matrices[0].dtype)
    furthest = 2 * geometry.largest_half_square
    loops = (
        {} if which == "backward_key" else {"WHOLE_ROWS": tiling.whole_rows(grid), "REST_STAGES": tiling.rest_stages}
    )
    with torch.cuda.device_of(matrices[0]):
        _KERNELS[which][(num_images * num_heads * num_tiles(which, grid, tiling),)](
            *matrices,
            *bumps,
            reach_BH,
            *others,
            geometry.scale,
            furthest,
            num_heads,
            *(stride for matrix in matrices for stride in matrix.stride()[:3]),
            *(stride for bump in bumps for stride in bump.stride()),
            *((0, 0) if reach_BH is None else reach_BH.stride()),
            ROWS=grid.rows,
            COLS=grid.cols,
            PREFIX=grid.num_prefix,
            WIDTH=head_size,
            WIDTH_BLOCK=max(_LEAST_SIDE, 1 << (head_size - 1).bit_length()),
            QUERIES=tiling.queries,
            TILE_ROWS=tiling.rows,
            TILE_COLS=tiling.cols,
            **loops,
            **wanted,
            CLAMPED=furthest < max(grid.rows - 1, grid.cols - 1) ** 2,
            SHAPE=geometry.shape,
            NEAR=reach_BH is not None,
            PRODUCTS="ieee" if INTERPRETED else "tf32x3",
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            maxnreg=tiling.registers,
            enable_fp_fusion=True,  # a product and its sum are one instruction
        )


class Tiling(NamedTuple):
    queries: int
    rows: int
    """Grid rows of a tile of keys."""
    cols: int
    """Grid columns of a tile of keys."""
    warps: int
    stages: int = 2
    registers: int | None = None
    one_loop: bool = False
    """Of passes that are for queries: over all tiles of keys as if each had empty slots, instead of one loop for whole
    tiles and another for the rest.
    """

    def whole_rows(self, grid: Grid) -> int:
        """Grid rows in tiles that are taken for whole."""
        return 0 if self.one_loop else grid.rows // self.rows * self.rows

    @property
    def rest_stages(self) -> int:
        """Of the loop over the other tiles: mostly there is just one."""
        return self.stages if self.one_loop else 1


def tiling_of(which: Pass, grid: Grid, head_size: int, dtype: torch.dtype) -> Tiling:
    """What should be fast on an H200, by what the compiler makes of it: few instructions, and programs that share a
    multiprocessor, so that one computes what matrix units do not while another keeps these busy.

    Shared memory is at most 105 KiB on an H200, and 73 KiB on GPUs that have no more than 99.
    """
    if dtype == torch.float32:
        return _over_grid(grid, 32 if head_size <= 64 else 16, queries=64, warps=4)
    if head_size > 64:
        return _over_grid(grid, 64, queries=64, warps=4)
    if which == "forward" and grid.num_tokens > 64:
        return _over_grid(grid, 64, queries=128, warps=8, registers=128)
    return _over_grid(grid, 64, queries=64, warps=4, registers=128 if which == "forward" else 168)


def _over_grid(grid: Grid, keys: int, **others: Any) -> Tiling:
    """The best shape of tiles of so many keys: empty slots cost most, and after them rows, which have most factors."""
    shapes = [(keys // cols, cols) for cols in (32, 16, 8, 4) if cols <= keys]
    rows, cols = min(shapes, key=lambda shape: _num_key_tiles(grid, *shape))
    return Tiling(rows=rows, cols=cols, **others)


def num_tiles(which: Pass, grid: Grid, tiling: Tiling) -> int:
    """Programs for one head: tiles of queries, or in the pass that is for keys, of their slots."""
    if which == "backward_key":
        return _num_key_tiles(grid, tiling.rows, tiling.cols)
    return -(-grid.num_tokens // tiling.queries)


def _num_key_tiles(grid: Grid, rows: int, cols: int) -> int:
    """Those of the last columns go further down, for the prefix tokens."""
    prefix_rows = -(-grid.num_prefix // cols)
    return (-(-grid.cols // cols) - 1) * -(-grid.rows // rows) + -(-(grid.rows + prefix_rows) // rows)
