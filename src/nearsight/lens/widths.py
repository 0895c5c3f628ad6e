"""How far the Gaussians of LocAt reach, and how strong they are, layer by layer over images (S2 App. G, Fig. 6).

Of each patch and head: the standard deviations along rows and columns, in patches, and α. Numbers are counted in bins
of 0.2 % on a logarithmic scale, so that memory does not grow with images; a quantile is exact to half a bin.

Shape suffixes: B images, H heads, P patches, 2 (by row, by column), L layers, N bins.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.running import batches, running
from nearsight.locat.gaussian import GaussianHeads

ROWS, COLUMNS, ALPHA = "sigma_rows", "sigma_columns", "alpha"
"""What is looked at: the standard deviation along rows (up and down), along columns (left and right), and α."""
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_SMALLEST, _LARGEST, _BINS = 1e-6, 1e6, 2**14
_STEP = np.log(_LARGEST / _SMALLEST) / _BINS


@dataclass
class _Counts:
    """Of positive numbers."""

    bins_N: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, dtype=np.int64))
    total: float = 0.0
    square: float = 0.0

    def add(self, numbers: Tensor) -> None:
        values = numbers.detach().double().flatten()
        place = ((values.clamp(_SMALLEST, _LARGEST) / _SMALLEST).log() / _STEP).long().clamp(max=_BINS - 1)
        self.bins_N += torch.bincount(place, minlength=_BINS).cpu().numpy()
        self.total += float(values.sum())
        self.square += float(values.square().sum())

    def row(self) -> dict[str, float]:
        number = int(self.bins_N.sum())
        mean = self.total / number
        ranks = np.searchsorted(np.cumsum(self.bins_N), np.array(PERCENTILES) / 100 * number)
        middles = _SMALLEST * np.exp((ranks + 0.5) * _STEP)
        spread = max(0.0, self.square / number - mean**2) ** 0.5
        return {"mean": mean, "std": spread, **{f"p{p}": float(m) for p, m in zip(PERCENTILES, middles, strict=True)}}


@dataclass(frozen=True, kw_only=True)
class Widths:
    """What the Gaussians of a model are on some images."""

    frame: pd.DataFrame
    """A row for each layer and each of `sigma_rows`, `sigma_columns` and `alpha`: mean, std and percentiles over
    images, heads and patches; `largest`, the bound of a deviation on this grid (NaN for α)."""
    num_images: int


def gaussian_widths(
    model: nn.Module, images: Tensor | Iterable[Tensor], *, batch_size: int = 16, device: torch.device | None = None
) -> Widths:
    """Statistics of all Gaussians in a LocAt model on normalised images."""
    heads = {name: module for name, module in model.named_modules() if isinstance(module, GaussianHeads)}
    if not heads:
        raise InputError(f"{type(model).__name__} has no Gaussian-augmented attention; nearsight.add_locat adds it")
    counts: dict[str, dict[str, _Counts]] = {name: {key: _Counts() for key in (ROWS, COLUMNS, ALPHA)} for name in heads}
    bounds: dict[str, float] = {}
    num_images = 0
    with running(model, device) as run, ExitStack() as hooks:
        for name, module in heads.items():
            hook = module.register_forward_hook(partial(_count, counts[name], bounds, name))
            hooks.callback(hook.remove)
        for batch in batches(images, batch_size):
            run.model(run.brought(batch))
            num_images += len(batch)
    if not num_images:
        raise InputError("there are no images to look at")
    rows: list[Mapping[str, Any]] = [
        {
            "layer": layer,
            "layer_name": name.removesuffix(".gaug"),
            "what": key,
            **counts[name][key].row(),
            "largest": np.nan if key == ALPHA else bounds[name],
        }
        for layer, name in enumerate(name for name in heads if name in bounds)
        for key in (ROWS, COLUMNS, ALPHA)
    ]
    return Widths(frame=pd.DataFrame(rows), num_images=num_images)


def _count(
    counts: dict[str, _Counts],
    bounds: dict[str, float],
    name: str,
    heads: GaussianHeads,
    inputs: tuple[Any, ...],
    gaussians: tuple[Tensor, Tensor],
) -> None:
    variance_BHP2, strength_BHP = gaussians
    for key, numbers in ((ROWS, variance_BHP2[..., 0]), (COLUMNS, variance_BHP2[..., 1])):
        counts[key].add(numbers.sqrt())
    counts[ALPHA].add(strength_BHP)
    grid = inputs[3]
    bounds[name] = (heads.most * heads.resolution_factor((grid.rows, grid.cols))) ** 0.5
