"""A number with its spread over images, and two of them side by side."""

from dataclasses import dataclass

import numpy as np

from nearsight.report.inputs import shorten

# mean ± 1.96 standard deviations holds about 95 % of the images when their values are about normal.
COVERAGE = 1.96
LABEL_LIMIT = 60


def quoted(label: str) -> str:
    return f"“{shorten(label, LABEL_LIMIT)}”"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean attention distance or entropy of one model, with its spread over images."""

    label: str
    """The model."""
    layer: int
    """From 0."""
    head: int | None
    """From 0; None for the average over the layer's heads."""
    mean: float
    std: float
    """Over images. For an average over heads: the mean of the heads' deviations, which the true one cannot exceed."""
    num_images: int
    uniform: float | None = None
    """The distance of a head that looks everywhere alike on the layer's grid, where that is known."""

    @property
    def has_interval(self) -> bool:
        """One image has no spread: its deviation of 0 would make every difference look certain."""
        return self.num_images > 1 and bool(np.isfinite(self.std))

    @property
    def low(self) -> float:
        # Neither a distance in diagonals nor a normalised entropy leaves [0, 1].
        return max(0.0, self.mean - COVERAGE * self.std) if self.has_interval else float("nan")

    @property
    def high(self) -> float:
        return min(1.0, self.mean + COVERAGE * self.std) if self.has_interval else float("nan")

    def in_words(self) -> str:
        if not self.has_interval:
            return f"{self.mean:.3f} (no interval)"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The same quantity of two models."""

    a: Estimate
    b: Estimate

    @property
    def clear(self) -> bool:
        return self.lower is not None

    @property
    def lower(self) -> Estimate | None:
        """The clearly lower of the two: the intervals exist and do not overlap.

        Distances on different grids must be apart in diagonals and also relative to uniform attention: on a coarse grid
        even a head that ignores the image has a larger distance than on a fine one.
        """
        lower = self._lower_by(1.0, 1.0)
        if lower is None or not self.grids_differ:
            return lower
        assert self.a.uniform is not None
        assert self.b.uniform is not None
        return lower if self._lower_by(self.a.uniform, self.b.uniform) is lower else None

    @property
    def grids_differ(self) -> bool:
        return bool(self.a.uniform) and bool(self.b.uniform) and self.a.uniform != self.b.uniform

    def _lower_by(self, unit_a: float, unit_b: float) -> Estimate | None:
        # Without an interval both comparisons are with NaN, and false.
        if self.a.high / unit_a < self.b.low / unit_b:
            return self.a
        return self.b if self.b.high / unit_b < self.a.low / unit_a else None

    def verdict(self, clear_words: str) -> str:
        if self.lower is not None:
            return f"The intervals do not overlap: {clear_words.format(quoted(self.lower.label))}."
        if self._lower_by(1.0, 1.0) is not None:
            return (
                "The intervals do not overlap, but relative to heads that look everywhere alike they do: "
                "no clear difference."
            )
        if self.a.has_interval and self.b.has_interval:
            return "The intervals overlap: no clear difference."
        return "An interval needs at least two images: no clear difference can be stated."
