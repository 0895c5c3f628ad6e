"""What the kernels of `local_attention` have to know of LocAt's local bias."""

import math
from dataclasses import dataclass

from nearsight.locat.gaussian import GaussianHeads, Grid, Kernel


@dataclass(frozen=True)
class LocalBias:
    """Which local bias, and between which patches."""

    grid: Grid
    kernel: Kernel
    num_axes: int
    """Widths that a query gives: by row and by column, or one for both, or none, if the width is fixed."""
    learns_strength: bool
    """Whether a query gives its strength, which else is 1."""
    most: float
    """The largest variance, or the fixed one."""
    shift: float
    """What is subtracted from what a query gives, so that 0 becomes a variance of 1."""
    eps: float
    """Added to variances."""
    largest_half_square: float
    """What ½Δ² along an axis is clamped at."""

    @classmethod
    def of(cls, gaug: GaussianHeads, grid: Grid) -> "LocalBias | None":
        """That of an attention; None for `width="input"` and `scale="auto"`, which do not come from queries alone.

        (With the latter, a bias of all keys would have a gradient, which `AttentionBranch` takes to be 0.)
        """
        config = gaug.config
        if config.width == "input" or config.scale == "auto":
            return None
        factor = gaug.resolution_factor((grid.rows, grid.cols))
        learns_width = isinstance(config.width, str)
        return cls(
            grid,
            config.kernel,
            num_axes=(1 if config.isotropic else 2) if learns_width else 0,
            learns_strength=config.scale == "learned",
            most=factor * (gaug.most if isinstance(config.width, str) else config.width**2),
            shift=gaug.shift,
            eps=gaug.eps,
            largest_half_square=gaug.largest_half_square(grid),
        )

    @property
    def num_given(self) -> int:
        """How many numbers a query gives."""
        return self.num_axes + self.learns_strength

    def room(self, num_heads: int) -> int:
        """For the numbers of a query, in rows that have those of all heads and stay whole multiples of 16 bytes."""
        return 0 if self.num_given == 0 else 4 if num_heads % 2 == 0 else 8

    @property
    def numbers(self) -> tuple[float, ...]:
        """For kernels, in the order in which these take them."""
        return self.most, self.shift, self.eps, 2 * self.largest_half_square

    @property
    def _is_separable(self) -> bool:
        """Whether a query's bias is a product of a vector over the grid's rows and one over its columns, and blocks of
        keys are whole rows of the grid.
        """
        return self.kernel == "gaussian" and self.grid.cols in (4, 8, 16)

    @property
    def constants(self) -> dict[str, object]:
        """For the compiler."""
        return {
            "PATCHES": self.grid.num_patches,
            "COLS": self.grid.cols,
            "KERNEL": "separable" if self._is_separable else self.kernel,
            "AXES": self.num_axes,
            "LEARNED": self.learns_strength,
            "CLAMPED": math.isfinite(self.largest_half_square),
        }
