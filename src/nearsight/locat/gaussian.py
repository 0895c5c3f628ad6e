"""The local bias that GAug adds to attention (S2 Eq. 5-10, App. D and E): its settings, the heads that predict how wide
and how strong it is for each query, and its values between patches.

α times a kernel of the distance is added to the logits between patches. All kernels are functions of r² = Σ_axis
Δ²/(variance + EPS), a squared distance in standard deviations of the query: the Gaussian exp(−r²/2), the Laplace kernel
exp(−r), the inverse distance 1/(1 + r). With `precision` = ½/(variance + EPS) this is r² = 2 Σ_axis precision·Δ². The
Gaussian is the product of a vector over rows and one over columns.

The heads' names `log_var` and `log_alpha` are those of the authors' checkpoints; what they return is not a logarithm.

Shape suffixes: B images, H heads, N tokens, P patches, d head size, C channels (of the bias: columns), a axes (2, or 1
if isotropic), T queries of a tile, R rows, 2 (by row, by column).
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.errors import InputError, check_flag, unknown_name

Kernel = Literal["gaussian", "laplace", "inverse"]
Shape = Kernel | Literal["distance", "none"]
"""How a bias depends on the distance r: the distance itself, too, or no bias at all."""
Scale = Literal["learned", "none", "auto"]
Resolution = Literal["linear", "squared"]

_GENTLE = -8.0
"""Where α = softplus(−8) = 0.0003 begins."""
_EPS = 0.1
_LARGEST_QUOTIENT = 32500.0
_LARGEST_HALF_SQUARE = 6550.0


@dataclass(frozen=True)
class Grid:
    """Where the tokens of one image lie, or of one window of it: some nowhere (CLS, registers), then the patches of a
    grid, row by row."""

    rows: int
    cols: int
    num_prefix: int
    """Tokens in front of the patches."""

    @property
    def num_patches(self) -> int:
        return self.rows * self.cols

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_patches


@dataclass(frozen=True, kw_only=True)
class GaussianConfig:
    """Which local bias; the defaults are S2's model."""

    kernel: Kernel = "gaussian"
    """Of the distance between patches (App. E)."""
    width: Literal["query", "input"] | float = "query"
    """Where the variances come from: the query, the attention's input (App. D.1), or fixed, in patches (App. D.2)."""
    isotropic: bool = False
    """One variance for both axes (Eq. 12)."""
    scale: Scale = "learned"
    """α: learned from the query; "none" for 1 (App. D.3); "auto" for the size of the logits (App. D.4)."""
    resolution: Resolution = "linear"
    """How the variance grows with the grid when images are larger than the model was made for."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kernel", self.kernel, get_args(Kernel)),
            ("scale", self.scale, get_args(Scale)),
            ("resolution", self.resolution, get_args(Resolution)),
        ):
            if value not in known:
                raise unknown_name(name, str(value), known)
        if isinstance(self.width, str):
            if self.width not in ("query", "input"):
                raise InputError(f"width is {self.width!r}, but must be 'query', 'input' or a number of patches")
        elif isinstance(self.width, bool) or not isinstance(self.width, int | float):
            raise InputError(f"width is {self.width!r}, but must be 'query', 'input' or a number of patches")
        elif not (math.isfinite(self.width) and self.width > 0):
            raise InputError(f"width is {self.width}, but a number of patches is finite and above 0")
        check_flag("isotropic", self.isotropic)


class GaussianHeads(nn.Module):
    """Variance and strength of each query patch of one attention.

    Args:
        dim: channels of the attention's input.
        grid_size: (rows, columns) that the model is made for: it bounds the variances, and others are scaled to it.
    """

    def __init__(
        self,
        config: GaussianConfig,
        *,
        dim: int,
        num_heads: int,
        head_dim: int,
        grid_size: tuple[int, int],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.num_heads, self.grid_size = config, num_heads, grid_size
        longest = max(grid_size)
        self.most = float(longest) ** 2
        """The largest variance on that grid."""
        self.shift = math.log(self.most - 1) if self.most > 2 else 0.0
        """What is subtracted from what a head gives, so that 0 becomes a variance of 1."""
        self.eps = _EPS
        while 0.5 * (longest - 1) ** 2 / self.eps**2 > _LARGEST_QUOTIENT:
            self.eps *= 2
        self._largest_half_square = min(0.5 * (longest - 1) ** 2, _LARGEST_HALF_SQUARE)
        num_axes = 1 if config.isotropic else 2
        self.log_var: nn.Linear | None = None
        self.log_alpha: nn.Linear | None = None
        if config.width == "query":
            self.log_var = nn.Linear(head_dim, num_axes, device=device, dtype=dtype)
        elif config.width == "input":
            # Assumed: the input has no heads, so each head gets its own variances from all channels.
            self.log_var = nn.Linear(dim, num_heads * num_axes, device=device, dtype=dtype)
        if config.scale == "learned":
            self.log_alpha = nn.Linear(head_dim, 1, device=device, dtype=dtype)
        self.gate: nn.Parameter | None = None
        """A number for each head that strengths are multiplied by; None: there is none."""
        self.reset_parameters()

    def extra_repr(self) -> str:
        """What its weights do not show."""
        settings = [f"{field.name}={getattr(self.config, field.name)!r}" for field in fields(self.config)]
        return ", ".join([*settings, f"grid_size={self.grid_size}"])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Variances near 1, strengths near ln 2."""
        for head in (self.log_var, self.log_alpha):
            if head is not None:
                nn.init.trunc_normal_(head.weight, std=0.02)
                nn.init.zeros_(head.bias)

    @torch.no_grad()
    def start_gently(self) -> None:
        """Strengths of almost nothing. Their gradient is as small, which AdamW evens out."""
        assert self.log_alpha is not None
        nn.init.zeros_(self.log_alpha.weight)
        nn.init.constant_(self.log_alpha.bias, _GENTLE)

    @torch.no_grad()
    def add_gate(self, start: float, like: Tensor) -> None:
        """Multiply strengths by a gate that is learned."""
        self.gate = nn.Parameter(torch.full((self.num_heads,), start, device=like.device, dtype=like.dtype))

    def forward(
        self, query_BHNd: Tensor, key_BHNd: Tensor, input_BNC: Tensor, grid: Grid, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Variances [B, H, P, 2] and strengths [B, H, P], in float32 at least. `scale` is that of the logits."""
        patches = slice(grid.num_prefix, None)
        # Heads look at all tokens: to leave some out of what they give is less work than out of what they get.
        variance = self._variance(query_BHNd, input_BNC)[:, :, patches]
        if (factor := self.resolution_factor((grid.rows, grid.cols))) != 1:
            variance = variance * factor
        if self.log_alpha is not None:
            strength_BHP = F.softplus(_exact(self.log_alpha(query_BHNd)[:, :, patches, 0]))
        elif self.config.scale == "auto":
            queries_BHP, keys_BHP = (_exact(tokens[:, :, patches]).norm(dim=-1) for tokens in (query_BHNd, key_BHNd))
            strength_BHP = scale * queries_BHP * keys_BHP.mean(-1, keepdim=True)
        else:
            strength_BHP = torch.ones_like(variance[..., 0])
        if self.gate is not None:
            strength_BHP = strength_BHP * self.gate[:, None]
        shape = (*query_BHNd.shape[:2], grid.num_patches)
        return variance.expand(*shape, 2), strength_BHP.expand(shape)

    def of_queries(
        self, query_BHTd: Tensor, key_size_BH1: Tensor | None, extent: tuple[int, int], scale: float
    ) -> tuple[Tensor, Tensor]:
        """The same for queries that lie anywhere: variances [B or 1, H or 1, T, a] and strengths [B, H, T]; those of
        tokens that are no patches mean nothing. `key_size_BH1`: how long the keys of patches are on average."""
        variance = self._variance(query_BHTd, None) * self.resolution_factor(extent)
        if self.log_alpha is not None:
            strength = F.softplus(_exact(self.log_alpha(query_BHTd)[..., 0]))
        elif self.config.scale == "auto":
            assert key_size_BH1 is not None
            strength = scale * _exact(query_BHTd).norm(dim=-1) * key_size_BH1
        else:
            strength = torch.ones_like(variance[..., 0])
        return variance, strength

    def _variance(self, query_BHNd: Tensor, input_BNC: Tensor | None) -> Tensor:
        """Eq. 5, of all tokens, [B or 1, H or 1, N, a]: a raw 0 becomes 1."""
        if self.log_var is None:
            assert not isinstance(self.config.width, str)
            dtype = torch.promote_types(query_BHNd.dtype, torch.float32)
            shape = (1, 1, query_BHNd.shape[2], 1)
            return torch.full(shape, self.config.width**2, device=query_BHNd.device, dtype=dtype)
        if self.config.width == "input":
            assert input_BNC is not None
            raw_BHNa = self.log_var(input_BNC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        else:
            raw_BHNa = self.log_var(query_BHNd)
        return self.most * torch.sigmoid(_exact(raw_BHNa) - self.shift)

    def resolution_factor(self, grid_size: tuple[int, int]) -> float:
        """What variances are multiplied with on another grid."""
        ratio = min(grid_size) / min(self.grid_size)
        return ratio if self.config.resolution == "linear" else ratio**2

    def largest_half_square(self, grid: Grid) -> float:
        """What ½Δ² along an axis is clamped at; infinite where no distance is as long."""
        return self.longest_half_square((grid.rows, grid.cols))

    def longest_half_square(self, extent: tuple[int, int]) -> float:
        """The same, of rows and columns."""
        longest = max(extent)
        reached = 0.5 * (longest - 1) ** 2 > self._largest_half_square
        return self._largest_half_square if reached else math.inf


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def squared_steps(grid: Grid, largest_half_square: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Δ² from each patch to each row and to each column, [P, R] and [P, C]; ½Δ² is at most `largest_half_square`."""
    rows_R, cols_C = (torch.arange(side, device=like.device, dtype=like.dtype) for side in (grid.rows, grid.cols))
    rows_RR, cols_CC = ((side[:, None] - side).square() for side in (rows_R, cols_C))
    if largest_half_square < math.inf:
        rows_RR, cols_CC = (steps.clamp(max=2 * largest_half_square) for steps in (rows_RR, cols_CC))
    return rows_RR.repeat_interleave(grid.cols, dim=0), cols_CC.repeat(grid.rows, 1)


def bias_between_patches(
    precision_BHT2: Tensor, strength_BHT: Tensor, steps: tuple[Tensor, Tensor], kernel: Shape
) -> Tensor:
    """[B, H, T, P]: of some patches as queries, to all patches."""
    rows_BHTR = precision_BHT2[..., :1] * steps[0]
    cols_BHTC = precision_BHT2[..., 1:] * steps[1]
    if kernel == "gaussian":
        scaled_BHTR = strength_BHT[..., None] * torch.exp(-rows_BHTR)
        return (scaled_BHTR[..., None] * torch.exp(-cols_BHTC)[..., None, :]).flatten(-2)
    half_square_BHTP = (rows_BHTR[..., None] + cols_BHTC[..., None, :]).flatten(-2)
    return strength_BHT[..., None] * kernel_of(half_square_BHTP, kernel)


def kernel_of(half_square: Tensor, kernel: Shape) -> Tensor:
    """The kernel where ½r² is this."""
    if kernel == "gaussian":
        return torch.exp(-half_square)
    if kernel == "none":
        return torch.zeros_like(half_square)
    # The root has no derivative at 0, where a patch looks at itself; there the distance depends on no variance.
    radius = (2 * half_square).clamp(min=torch.finfo(half_square.dtype).tiny).sqrt()
    if kernel == "distance":
        return radius
    return torch.exp(-radius) if kernel == "laplace" else 1 / (1 + radius)


def bias_between_tokens(
    precision_BHP2: Tensor, strength_BHP: Tensor, grid: Grid, *, kernel: Shape, largest_half_square: float
) -> Tensor:
    """[B, H, N, N]: 0 for every token that is not a patch. All of it at once, so for few tokens only."""
    steps = squared_steps(grid, largest_half_square, precision_BHP2)
    bias_BHPP = bias_between_patches(precision_BHP2, strength_BHP, steps, kernel)
    return F.pad(bias_BHPP, (grid.num_prefix, 0, grid.num_prefix, 0))


def near_between_tokens(reach_BH: Tensor, grid: Grid) -> Tensor:
    """[B, H, N, N]: where patches are no farther from each other than this; other tokens are near to all."""
    rows_PR, cols_PC = squared_steps(grid, math.inf, reach_BH)
    square_PP = (rows_PR[..., None] + cols_PC[:, None]).flatten(1)
    prefix = (grid.num_prefix, 0, grid.num_prefix, 0)
    return F.pad(square_PP, prefix) <= reach_BH.square()[..., None, None]
