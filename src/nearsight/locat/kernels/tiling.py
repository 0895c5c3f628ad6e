"""How the kernels cut their work."""

from typing import Any, Literal, NamedTuple

import torch

from nearsight.locat.grid import Grid

_LEAST_SIDE = 16  # of a tile that matrix units take

Pass = Literal["forward", "backward_query", "backward_key"]


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


def side_of_tile(number: int) -> int:
    return max(_LEAST_SIDE, 1 << (number - 1).bit_length())


def _num_key_tiles(grid: Grid, rows: int, cols: int) -> int:
    """Those of the last columns go further down, for the prefix tokens."""
    prefix_rows = -(-grid.num_prefix // cols)
    return (-(-grid.cols // cols) - 1) * -(-grid.rows // rows) + -(-(grid.rows + prefix_rows) // rows)
