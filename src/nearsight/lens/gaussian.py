"""How wide and how strong the Gaussians of a LocAt model are (S2 App. G).

S2's Gaussian-augmented attention predicts, for every query patch and head, a variance per axis and a strength α. The
heads of `nearsight.locat` return both. In models of the authors' own code two small layers inside the attention module,
`gaug.log_var` and `gaug.log_alpha`, return what both are made from. What they return is looked at here.

Shape suffixes: B images (or windows), H heads, N tokens, P patches.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.geometry import Geometry
from nearsight.lens.inputs import Batch
from nearsight.lens.measurement import Measurement, measurement, stack_layers
from nearsight.lens.survey import Survey
from nearsight.lens.table import Array, HeadTable
from nearsight.lens.tokens import watching_outputs
from nearsight.locat import GaussianHeads
from nearsight.metrics.attention import to_float64

NUM_BINS = 256
"""Of the distribution of standard deviations, between 0 and the largest that Eq. 5 allows, or one that is given."""
_HEADS = ("log_var", "log_alpha")


@measurement("gaussians")
class Gaussians(Measurement):
    """Per layer and head, over query patches and images: means of σ along rows and columns (`sigma_rows`, `sigma_cols`,
    in patches) and of α (`alpha`), and the distribution of σ along both (`sigma_mass`, in bins up to `sigma_most`).

    NaN in layers without such a bias. The widest σ depends on the grid the model was made for (Eq. 5): the attribute
    `grid_size` of the `gaug` module, or otherwise the grid it is measured on.
    """

    about = "per head of a LocAt model: width and strength of its Gaussians"
    columns = ("sigma_rows", "sigma_cols", "alpha")

    @classmethod
    def summary(cls, table: HeadTable, layers: Sequence[int]) -> str:
        sigma = np.hypot(table.extra["sigma_rows"], table.extra["sigma_cols"]) / np.sqrt(2)
        return f"σ of its Gaussians is {np.nanmin(sigma):.2f} to {np.nanmax(sigma):.2f} patches by head; α is " + (
            f"{np.nanmin(table.extra['alpha']):.2f} to {np.nanmax(table.extra['alpha']):.2f}."
        )

    def __init__(self, model: nn.Module, found: Survey, batch: Batch) -> None:
        self._model = model
        self._geometries = {layer: site.geometry for layer, site in found.layers.items()}
        modules = dict(model.named_modules())
        self._watched: dict[str, tuple[str, str]] = {}
        self._most: dict[str, float] = {}
        for layer, geometry in self._geometries.items():
            gaug = modules.get(f"{layer}.gaug")
            heads = ("",) if isinstance(gaug, GaussianHeads) else _HEADS
            names = {f"{layer}.gaug.{head}".rstrip("."): (layer, head) for head in heads}
            self._watched.update({name: which for name, which in names.items() if name in modules})
            self._most[layer] = _largest_variance(gaug, geometry)
        if not self._watched:
            raise InputError(
                f"{type(model).__name__} has no Gaussian-augmented attention, so there is no σ and α to see"
            )
        self._seen: dict[tuple[str, str], Tensor] = {}

    def watching(self) -> AbstractContextManager[None]:
        return watching_outputs(self._model, list(self._watched), self._look)

    def _look(self, name: str, outputs: list[Tensor]) -> None:
        layer, head = self._watched[name]
        if not head:
            variance_BHP2, strength_BHP = map(to_float64, outputs)
            self._seen[layer, "sigma"], self._seen[layer, "alpha"] = variance_BHP2.sqrt(), strength_BHP
            return
        raw_BHPx = to_float64(_of_patches(outputs[0], self._geometries[layer], name))
        if head == "log_var":
            self._seen[layer, "sigma"] = _variance(raw_BHPx, self._most[layer]).sqrt().expand(-1, -1, -1, 2)
        else:
            self._seen[layer, "alpha"] = F.softplus(raw_BHPx).squeeze(-1)

    def results(self) -> dict[str, Array]:
        seen, self._seen = self._seen, {}
        sigma, alpha, mass = [], [], []
        for layer, most in self._most.items():
            if (layer, "sigma") not in seen or (layer, "alpha") not in seen:
                sigma.append(np.full((1, 2), np.nan))
                alpha.append(np.full((1,), np.nan))
                mass.append(np.full((1, NUM_BINS), np.nan))
                continue
            sigma_BHP2 = seen[layer, "sigma"]
            sigma.append(sigma_BHP2.mean((0, 2)).cpu().numpy())
            alpha.append(seen[layer, "alpha"].mean((0, 2)).cpu().numpy())
            mass.append(_histogram(sigma_BHP2 / math.sqrt(most)).cpu().numpy())
        rows_cols = stack_layers(sigma)
        return {
            "sigma_rows": rows_cols[..., 0],
            "sigma_cols": rows_cols[..., 1],
            "alpha": stack_layers(alpha),
            "sigma_mass": stack_layers(mass),
            "sigma_most": np.sqrt(list(self._most.values())),
        }


def sigma_quantiles(mass: Array, most: Array, levels: Array) -> Array:
    """Standard deviations below which these shares lie, [layers, heads, levels], from `sigma_mass` and `sigma_most`.

    The middles of the first bins by which the shares are reached, of those that anything lies in.
    """
    reached = np.cumsum(mass, axis=-1)[..., None, :]
    # Sums of many small masses are rounded: a share that is almost reached counts as reached.
    wanted = np.asarray(levels)[:, None] * reached[..., -1:] * (1 - 1e-9)
    bins = ((reached < wanted) | (reached <= 0)).sum(-1)
    width = np.asarray(most)[:, None, None] / mass.shape[-1]
    return np.where(np.isnan(mass[..., :1]), np.nan, (bins + 0.5) * width)


def _histogram(share_BHP2: Tensor) -> Tensor:
    """Of values from 0 to 1, by head: [H, bins], each row summing to 1."""
    num_heads = share_BHP2.shape[1]
    bins_BHP2 = (share_BHP2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    offset_H11 = NUM_BINS * torch.arange(num_heads, device=bins_BHP2.device).view(-1, 1, 1)
    counts = torch.bincount((bins_BHP2 + offset_H11).flatten(), minlength=num_heads * NUM_BINS)
    return counts.view(num_heads, NUM_BINS).double() / (share_BHP2.numel() / num_heads)


def _largest_variance(gaug: nn.Module | None, geometry: Geometry) -> float:
    if isinstance(gaug, GaussianHeads):
        in_windows = len(geometry.query_places_WN2) > 1
        width = gaug.config.width
        # A width that is given may be any.
        most = gaug.most if isinstance(width, str) else max(gaug.most, width**2)
        return most * (1.0 if in_windows else gaug.resolution_factor(geometry.grid_size))
    rows, cols = getattr(gaug, "grid_size", geometry.grid_size)
    return float(max(rows, cols)) ** 2


def _variance(raw: Tensor, most: float) -> Tensor:
    """S2 Eq. 5: 0 becomes a variance of 1."""
    shift = math.log(most - 1) if most > 2 else 0.0
    return most * torch.sigmoid(raw - shift)


def _of_patches(output_BHNx: Tensor, geometry: Geometry, name: str) -> Tensor:
    """[B, H, P, x]: without prefix tokens, whether or not the layer was given these."""
    places_N2 = geometry.query_places_WN2[0]
    is_patch = places_N2[:, 0].isfinite()
    if len(geometry.query_places_WN2) > 1 or output_BHNx.dim() != 4:
        raise InputError(f"{name} returns {list(output_BHNx.shape)}: foreign σ and α are read from plain ViTs only")
    if output_BHNx.shape[2] == len(is_patch):
        return output_BHNx[:, :, is_patch.to(output_BHNx.device)]
    if output_BHNx.shape[2] == int(is_patch.sum()):
        return output_BHNx
    raise InputError(f"{name} returns {list(output_BHNx.shape)}, which is neither all tokens nor all patches")
