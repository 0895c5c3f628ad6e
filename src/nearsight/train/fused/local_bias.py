"""LocAt's local bias in the kernels of `local_attention`: what they have to know of it, and how they make it: from what
queries give to widths and strengths, a bias, and back.

Patches are the first tokens here, row by row, and tokens that are none come after them.

Shape suffixes: N queries, M keys = R grid rows × C grid columns, A numbers that a query gives. Names in capitals are
known to the compiler.
"""

import math
from dataclasses import dataclass

from nearsight.locat.gaussian import GaussianHeads, Grid, Kernel
from nearsight.locat.kernels.parts import add_products, add_rows, falls, places, row_factors, squares
from nearsight.train.fused.attention_parts import places_of
from nearsight.triton_language import kernel, tl


@dataclass(frozen=True)
class LocalBias:
    """Which local bias, and between which patches."""

    grid: Grid
    kernel: Kernel
    num_axes: int
    """Widths that a query gives: by row and by column, or one for both, or none, if the width is fixed."""
    learns_strength: bool
    """Whether a query gives its strength, which is 1 otherwise."""
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


@kernel
def load_given(rows, offsets, start, SIZE, ROW, TOKENS, FIRST, AXES, LEARNED):
    """The numbers that queries give: widths first."""
    at_N, used_N = places_of(start, SIZE, ROW, TOKENS, FIRST)
    given = ()
    for a in tl.static_range(AXES + LEARNED):
        given += (tl.load(rows + at_N + a, mask=used_N, other=0.0).to(tl.float32) + tl.load(offsets + a),)
    return given


@kernel
def store_given(rows, given, start, SIZE, ROW, TOKENS, FIRST, ROOM):
    """Beside each other; 0 where there is room for more."""
    at_N, used_N = places_of(start, SIZE, ROW, TOKENS, FIRST)
    number_1A = tl.arange(0, ROOM)[None, :]
    given_NA = tl.zeros([SIZE, ROOM], tl.float32)
    for a in tl.static_range(len(given)):
        given_NA = tl.where(number_1A == a, given[a][:, None], given_NA)
    tl.store(rows + at_N[:, None] + number_1A, given_NA.to(rows.dtype.element_ty), mask=used_N[:, None])


@kernel
def bumps_of(given, position_N, numbers, PATCHES, AXES, LEARNED):
    """(precision by y, by x, strength) of queries, and their slopes by what is given: of precisions, minus that.

    Tokens that are no patches have strength 0.
    """
    most, shift, eps, _ = numbers
    precision_y_N = tl.zeros(position_N.shape, tl.float32) + 0.5 / (most + eps)
    slope_y_N = tl.zeros(position_N.shape, tl.float32)
    strength_N = tl.full(position_N.shape, 1.0, tl.float32)
    slope_N = tl.zeros(position_N.shape, tl.float32)
    if AXES > 0:
        precision_y_N, slope_y_N = _precision(given[0], most, shift, eps)
    precision_x_N = precision_y_N
    slope_x_N = slope_y_N
    if AXES > 1:
        precision_x_N, slope_x_N = _precision(given[1], most, shift, eps)
    if LEARNED:
        strength_N, slope_N = _softplus(given[AXES])
    is_patch_N = position_N < PATCHES
    strength_N = tl.where(is_patch_N, strength_N, 0.0)
    return precision_y_N, precision_x_N, strength_N, slope_y_N, slope_x_N, tl.where(is_patch_N, slope_N, 0.0)


@kernel
def _precision(given_N, most, shift, eps):
    """½/(variance + EPS), and minus its slope. The variance is most / inverse."""
    power_N = (shift - given_N) * 1.4426950408889634
    inverse_N = 1.0 + tl.exp2(tl.where(power_N > 80.0, 80.0, power_N))  # 1 / sigmoid, and finite, but NaN stays NaN
    quotient_N = 1.0 / (most + eps * inverse_N)
    return 0.5 * inverse_N * quotient_N, 0.5 * most * (inverse_N - 1.0) * quotient_N * quotient_N


@kernel
def _softplus(given_N):
    """(ln(1 + exp(given)), its slope)."""
    small_N = tl.exp2(-tl.abs(given_N) * 1.4426950408889634)
    larger_N = tl.where(given_N >= 0, 1.0, small_N)
    return tl.maximum(given_N, 0.0) + tl.log2(1.0 + small_N) * 0.6931471805599453, larger_N / (1.0 + small_N)


@kernel
def add_bump(product_NM, bumps, position_N, scale, first, numbers, PATCHES, COLS, KERNEL, CLAMPED):
    """Products of queries with the keys from `first` on, plus bias / scale: it is scaled with them."""
    height_N1 = (bumps[2] * (1.0 / scale))[:, None]
    if KERNEL == "separable":
        row_NR, col_NC, _, _ = _factors(bumps, position_N, first, product_NM.shape[1], numbers, PATCHES, COLS, CLAMPED)
        return add_products(product_NM, row_NR * height_N1, col_NC)
    else:
        kernel_NM, _, _, _ = _kernel(
            bumps, position_N, first, product_NM.shape[1], numbers, PATCHES, COLS, KERNEL, CLAMPED
        )
        return product_NM + height_N1 * kernel_NM


@kernel
def add_bump_sums(sums, gradient_NM, bumps, position_N, first, numbers, PATCHES, COLS, KERNEL, CLAMPED):
    """Over keys from `first` on, logits' gradients times: minus the kernel's slopes by the precisions, by y and by x;
    and the kernel.
    """
    by_y_N, by_x_N, by_kernel_N = sums
    SIZE: tl.constexpr = gradient_NM.shape[1]
    if KERNEL == "separable":
        row_NR, col_NC, square_y_NR, square_x_NC = _factors(
            bumps, position_N, first, SIZE, numbers, PATCHES, COLS, CLAMPED
        )
        level_NC = add_rows(tl.zeros_like(col_NC), gradient_NM, row_NR) * col_NC
        level_y_NC = add_rows(tl.zeros_like(col_NC), gradient_NM, row_NR * square_y_NR) * col_NC
        by_y_N += tl.sum(level_y_NC, 1)
        by_x_N += tl.sum(level_NC * square_x_NC, 1)
        by_kernel_N += tl.sum(level_NC, 1)
    else:
        kernel_NM, slope_NM, square_y_NM, square_x_NM = _kernel(
            bumps, position_N, first, SIZE, numbers, PATCHES, COLS, KERNEL, CLAMPED
        )
        by_y_N += tl.sum(gradient_NM * slope_NM * square_y_NM, 1)
        by_x_N += tl.sum(gradient_NM * slope_NM * square_x_NM, 1)
        by_kernel_N += tl.sum(gradient_NM * kernel_NM, 1)
    return by_y_N, by_x_N, by_kernel_N


@kernel
def _factors(bumps, position_N, first, SIZE, numbers, PATCHES, COLS, CLAMPED):
    """(factor by row, factor by column, Δ² by y, Δ² by x) of Gaussians, for the grid rows of the keys from `first` on.

    The factor is 0 for rows past the last: these are tokens that are no patches.
    """
    precision_y_N = bumps[0]
    precision_x_N = bumps[1]
    y_N, x_N = places(position_N, 0, COLS)
    square_y_NR = squares(y_N, first // COLS, SIZE // COLS, numbers[3], CLAMPED)
    square_x_NC = squares(x_N, 0, COLS, numbers[3], CLAMPED)
    steep_y_N = precision_y_N * -1.4426950408889634  # for powers of 2 instead of e
    steep_x_N = precision_x_N * -1.4426950408889634
    row_NR = row_factors(square_y_NR, steep_y_N, first // COLS, PATCHES // COLS, first + SIZE <= PATCHES)
    return row_NR, tl.exp2(square_x_NC * steep_x_N[:, None]), square_y_NR, square_x_NC


@kernel
def _kernel(bumps, position_N, first, SIZE, numbers, PATCHES, COLS, KERNEL, CLAMPED):
    """(kernel, slope, Δ² by y, Δ² by x) of keys from `first` on: by a precision, the kernel changes by −slope·Δ².

    It is 0 for keys that are no patches.
    """
    precision_y_N = bumps[0]
    precision_x_N = bumps[1]
    y_N, x_N = places(position_N, 0, COLS)
    position_M = first + tl.arange(0, SIZE)
    y_M, x_M = places(position_M, 0, COLS)
    away_y_NM = y_N[:, None] - y_M[None, :]
    away_x_NM = x_N[:, None] - x_M[None, :]
    square_y_NM = away_y_NM * away_y_NM
    square_x_NM = away_x_NM * away_x_NM
    if CLAMPED:
        square_y_NM = tl.minimum(square_y_NM, numbers[3])
        square_x_NM = tl.minimum(square_x_NM, numbers[3])
    half_NM = square_y_NM * precision_y_N[:, None] + square_x_NM * precision_x_N[:, None]
    if KERNEL == "gaussian":
        kernel_NM = tl.exp(-half_NM)
        slope_NM = kernel_NM
    else:
        kernel_NM, slope_NM = falls(2.0 * half_NM, KERNEL)
    if first + SIZE > PATCHES:
        is_patch_1M = (position_M < PATCHES)[None, :]
        kernel_NM = tl.where(is_patch_1M, kernel_NM, 0.0)
        slope_NM = tl.where(is_patch_1M, slope_NM, 0.0)
    return kernel_NM, slope_NM, square_y_NM, square_x_NM


@kernel
def gradients_from_sums(bumps, sums, AXES, LEARNED):
    """Gradients of the numbers that queries give, from the sums over all keys of `add_bump_sums`."""
    _, _, strength_N, slope_y_N, slope_x_N, slope_N = bumps
    by_y_N, by_x_N, by_kernel_N = sums
    gradients = ()
    if AXES == 1:
        gradients += (strength_N * slope_y_N * (by_y_N + by_x_N),)
    if AXES == 2:
        gradients += (strength_N * slope_y_N * by_y_N, strength_N * slope_x_N * by_x_N)
    if LEARNED:
        gradients += (slope_N * by_kernel_N,)
    return gradients
