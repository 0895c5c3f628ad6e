"""The grid of patches that metrics are told."""

from nearsight.errors import InputError


def check_grid(grid_size: tuple[int, int]) -> None:
    """Refuse (rows, columns) that hold no patch: two negative ones multiply to a number of patches too."""
    rows, cols = grid_size
    if rows < 1 or cols < 1:
        raise InputError(f"a grid has at least one row and one column, not {rows}×{cols}")
