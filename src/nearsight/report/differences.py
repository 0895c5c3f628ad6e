"""What is compared of measured models, and how far two of them differ.

Two models on the same images are compared image by image: what an image does to both of them does not count then. How
far the images spread is one thing, and how certain their mean is another: that of 1,000 images is 30 times as certain
as one image.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.report.inputs import ModelHeads, shorten
from nearsight.study.statistics import Estimate, mean_interval

LABEL_LIMIT = 60
SMALLEST = 0.02
"""The smallest difference that is called one: of the grid's diagonal, or of the range of entropy. With thousands of
images the interval of any difference excludes 0; this is a fifth of a patch on 8 × 8, and about what the most local
heads of two seeds of one recipe differ by."""
_LEVEL = 0.95
# mean ± 1.96 standard deviations holds about 95 % of the images when their values are about normal.
_COVERAGE = 1.96

Metric = Literal["mad", "entropy"]
Kind = Literal["clear", "clear but for the grids", "small", "perhaps small", "not shown", "no interval"]


def quoted(label: str) -> str:
    return f"“{shorten(label, LABEL_LIMIT)}”"


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantity:
    """A mean attention distance or entropy of one model over images, how the images spread, and their own values."""

    label: str
    """The model."""
    layer: int
    """From 0."""
    head: int | None
    """From 0; None for the average over the layer's heads."""
    mean: float
    std: float
    """Over images. For an average over heads without values: the mean of the heads' deviations, which the true one
    cannot exceed."""
    num_images: int
    uniform: float | None = None
    """The distance of uniform attention on the layer's grid, where that is known."""
    digests: NDArray[np.uint64] | None = None
    values: NDArray[np.float64] | None = None
    """Of single images, by their digests; None where they are not known."""
    is_settled: bool = True
    """Of a head that was chosen: whether both halves of the images choose it."""

    @property
    def has_spread(self) -> bool:
        """One image has none: its deviation of 0 would make every difference look certain."""
        return self.num_images > 1 and bool(np.isfinite(self.std))

    @property
    def low(self) -> float:
        """Of the range that holds about 95 % of the images."""
        # Neither a distance in diagonals nor a normalised entropy leaves [0, 1].
        return max(0.0, self.mean - _COVERAGE * self.std) if self.has_spread else float("nan")

    @property
    def high(self) -> float:
        return min(1.0, self.mean + _COVERAGE * self.std) if self.has_spread else float("nan")

    def in_words(self) -> str:
        if not self.has_spread:
            return f"{self.mean:.3f} ({'one image' if self.num_images == 1 else 'spread not known'})"
        return f"{self.mean:.3f} (spread over images {self.low:.3f} to {self.high:.3f})"

    def scaled(self, factor: float) -> "Quantity":
        values = None if self.values is None else self.values * factor
        return replace(self, mean=self.mean * factor, std=self.std * factor, values=values)


def existing_heads(model: ModelHeads) -> pd.DataFrame:
    """The measured rows of heads that have a distance."""
    rows = model.measured()
    rows = rows[rows["mad"].notna()]
    if rows.empty:
        raise InputError(f"{quoted(model.label)} has no measured head, so there is nothing to read")
    return rows


def most_local_head(model: ModelHeads, among: pd.DataFrame | None = None) -> Quantity:
    """The head with the smallest mean attention distance of the whole model, or `among` some of its rows.

    The smallest of many means is a little too small: chance chose it, too. So, of single images, those of each half of
    them are the values of the head that is the most local on the other half; in most models that is the same head.
    """
    rows = existing_heads(model) if among is None else among
    place = int(rows["mad"].argmin())
    row = rows.iloc[place]
    quantity = Quantity(
        label=model.label,
        layer=int(row["layer"]),
        head=int(row["head"]),
        mean=float(row["mad"]),
        std=float(row["mad_std"]),
        num_images=int(row["num_images"]),
        uniform=model.uniform_distance(int(row["layer"])),
    )
    if model.per_image is None:
        return quantity
    digests = model.per_image.digests
    values, chosen = by_halves(digests, model.image_values("mad", rows), np.argmin)
    return replace(quantity, digests=digests, values=values, is_settled=chosen == {place})


def by_halves(
    digests: NDArray[np.uint64], values_NR: NDArray[np.float64], best: Callable[[NDArray[np.float64]], np.intp]
) -> tuple[NDArray[np.float64], set[int]]:
    """Of the head that is `best` by its mean, values that chance did not choose: those of each half of the images are
    of the head that is the best on the other half; and which heads these are. A single image chooses its own."""
    half = np.unique(digests, return_inverse=True)[1] % 2  # an image that is there twice is in one half
    if not half.any():
        half[:] = 2
    chosen = [int(best(values_NR[half != which].mean(0))) for which in (0, 1)]
    return np.where(half == 0, *(values_NR[:, head] for head in chosen)), set(chosen)


def first_layer_mean(model: ModelHeads, metric: Metric = "mad") -> Quantity:
    """The mean attention distance (or entropy) of the first measured layer, averaged over its heads."""
    rows = existing_heads(model)
    rows = rows[rows["layer"] == rows["layer"].min()]
    layer = int(rows["layer"].iloc[0])
    quantity = Quantity(
        label=model.label,
        layer=layer,
        head=None,
        mean=float(rows[metric].mean()),
        std=float(rows[f"{metric}_std"].mean(skipna=False)),
        num_images=int(rows["num_images"].min()),
        uniform=model.uniform_distance(layer) if metric == "mad" else None,
    )
    if model.per_image is None:
        return quantity
    values = model.image_values(metric, rows).mean(1)
    std = float(values.std()) if len(values) > 1 else float("nan")
    return replace(quantity, std=std, digests=model.per_image.digests, values=values)


def first_layer_name(quantities: Iterable[Quantity]) -> str:
    """What to call the layers of `first_layer_mean`: of models that were measured in part, they are not the first."""
    return "first layer" if all(quantity.layer == 0 for quantity in quantities) else "first measured layer"


@dataclass(frozen=True, kw_only=True, eq=False)
class Difference:
    """The same quantity of two models, and how far they differ."""

    a: Quantity
    b: Quantity
    estimate: Estimate
    """a minus b, with its 95 % interval; `n` is the number of images, or of pairs."""
    agreeing: float | None
    """The share of the images on which the difference has its sign; None where images are not paired."""
    scaled: Estimate | None
    """On different grids: the same, with both scaled to one distance of uniform attention, their mean. On a coarse grid
    even a head that ignores the image has a larger distance than on a fine one."""

    @property
    def is_paired(self) -> bool:
        return self.agreeing is not None

    @property
    def effect(self) -> float:
        """In standard deviations: of the paired differences, or of the images of both models."""
        return self.estimate.value / self.estimate.std if self.estimate.std > 0 else float("nan")

    @property
    def kind(self) -> Kind:
        """Clear is what the whole interval says: there is a difference, and it is at least the smallest called one."""
        found = self.estimate
        if not found.has_interval:
            return "no interval"
        if _exceeds(found):
            is_by_grids = self.scaled is not None and not (
                _exceeds(self.scaled) and self.scaled.value * found.value > 0
            )
            return "clear but for the grids" if is_by_grids else "clear"
        if found.low > -SMALLEST and found.high < SMALLEST:
            return "small"
        return "perhaps small" if found.excludes_zero else "not shown"

    @property
    def clear(self) -> bool:
        return self.kind == "clear"

    @property
    def lower(self) -> Quantity | None:
        """The clearly lower of the two."""
        return (self.a if self.estimate.value < 0 else self.b) if self.clear else None

    def as_json(self) -> dict[str, Any]:
        numbers = {
            "difference": self.estimate.value,
            "low": self.estimate.low,
            "high": self.estimate.high,
            "error": self.estimate.error,
            "effect": self.effect,
        }
        return {
            **{name: value if np.isfinite(value) else None for name, value in numbers.items()},
            "n": self.estimate.n,
            "paired": self.is_paired,
            "agreeing": self.agreeing,
            "verdict": self.kind,
        }


def _exceeds(found: Estimate) -> bool:
    return found.low > SMALLEST or found.high < -SMALLEST


def differ(a: Quantity, b: Quantity) -> Difference:
    """How far the same quantity of two models differs: over the images of both, where there are two at least."""
    scaled = None
    if a.uniform and b.uniform and a.uniform != b.uniform:
        common = (a.uniform + b.uniform) / 2
        scaled = _estimate(a.scaled(common / a.uniform), b.scaled(common / b.uniform))[0]
    estimate, agreeing = _estimate(a, b)
    return Difference(a=a, b=b, estimate=estimate, agreeing=agreeing, scaled=scaled)


def _estimate(a: Quantity, b: Quantity) -> tuple[Estimate, float | None]:
    """a minus b; and where images are paired, the share of them that agree with it."""
    if a.values is not None and b.values is not None:
        assert a.digests is not None
        assert b.digests is not None
        # Of an image that was measured twice, one is taken.
        _, at_a, at_b = np.intersect1d(a.digests, b.digests, return_indices=True)
        if len(at_a) > 1:
            differences = a.values[at_a] - b.values[at_b]
            found = mean_interval(differences, _LEVEL)
            agreeing = float((np.sign(differences) == np.sign(found.value)).mean())
            return replace(found, error=found.std / found.n**0.5), agreeing
    return welch_interval(a, b), None


def welch_interval(a: Quantity, b: Quantity) -> Estimate:
    """a minus b as means over images that have nothing to do with each other (Welch 1947)."""
    value, counts = a.mean - b.mean, (a.num_images, b.num_images)
    if not (a.has_spread and b.has_spread):
        return Estimate(value=value, n=sum(counts))
    from scipy import stats  # here, because it takes most of a second

    # Deviations are of the images at hand; one image less stands for those that might have been.
    variances = [one.std**2 * one.num_images / (one.num_images - 1) for one in (a, b)]
    shares = [variance / count for variance, count in zip(variances, counts, strict=True)]
    total, std = sum(shares), (sum(variances) / 2) ** 0.5
    if total == 0:
        return Estimate(value=value, low=value, high=value, n=sum(counts), std=std, error=0.0)
    error = total**0.5
    freedom = 1 / sum((share / total) ** 2 / (count - 1) for share, count in zip(shares, counts, strict=True))
    half = float(stats.t.ppf((1 + _LEVEL) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(value) / error, freedom))
    return Estimate(value=value, low=value - half, high=value + half, n=sum(counts), std=std, error=error, p=p)
