"""Biases and masks that depend on the step from query to key alone.

Shape suffixes: W windows, H heads, T queries, M keys, 2 (by row, by column), R and C: rows and columns of a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from nearsight.errors import InputError, check_positive, unknown_name
from nearsight.lazy import torch
from nearsight.locat.inducers.base import SAME_PLACE, Asked, Frame, Gated, Inducer, Radial, register_locality

if TYPE_CHECKING:
    from torch import Tensor, nn


@register_locality
@dataclass(frozen=True, kw_only=True)
class Alibi2d(Gated):
    """ALiBi (Press et al. 2022) in two dimensions: the distance is subtracted from the logits, each head with a slope.

    Slopes are 2^(−8/H), 2^(−16/H), … of H heads, as published, and fixed; a gate that is learned multiplies them.
    """

    name = "alibi2d"
    about = "minus the distance in patches, with a fixed slope for each head (ALiBi in two dimensions)"

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        return {"gate": self.gates(frame)}

    def _slopes(self, own: Any, like: Tensor) -> Tensor:
        """[H]"""
        num_heads = len(own.gate)
        head_H = torch.arange(1, num_heads + 1, device=like.device, dtype=like.dtype)
        return (-8 / num_heads * head_H).exp2()

    def bias(self, own: Any, asked: Asked) -> Tensor:
        slopes_H = self._slopes(own, asked.distances)
        return -self.by_head(own.gate) * self.by_head(slopes_H) * asked.distances[:, None]

    def radial(self, own: Any, asked: Asked) -> Radial:
        slopes_H = self._slopes(own, asked.keys_WM2) / asked.growth
        half = asked.keys_WM2.new_full((), 0.5)
        return Radial("distance", half, (-own.gate * slopes_H)[:, None])


@register_locality
@dataclass(frozen=True, kw_only=True)
class FixedGaussian(Gated):
    """A Gaussian of the distance, of one fixed width for all queries and heads; a gate for each head multiplies it."""

    name = "gaussian"
    about = "a Gaussian of the distance, of one fixed width"

    width: float = 1.0
    """Standard deviation in patches, on the grid that the model was made for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("width", self.width)

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        return {"gate": self.gates(frame)}

    def bias(self, own: Any, asked: Asked) -> Tensor:
        kernel_WTM = torch.exp(-0.5 * (asked.distances / self.width).square())
        return self.by_head(own.gate) * kernel_WTM[:, None]

    def radial(self, own: Any, asked: Asked) -> Radial:
        precision = asked.keys_WM2.new_full((), 0.5 / (self.width * asked.growth) ** 2)
        return Radial("gaussian", precision, own.gate.to(precision.dtype)[:, None])


@register_locality
@dataclass(frozen=True, kw_only=True)
class RelativePositions(Inducer):
    """A learned bias for each step from query to key and each head (as Swin's and BEiT's), which begins at 0.

    The table is that of the extent that the model was made for. On another one, and where keys are pooled, it is
    interpolated between the nearest steps; what lies beyond it has the value of its border.
    """

    name = "relpos"
    about = "a learned bias for each step from query to key; a table of zeros at first"

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        rows, cols = frame.extent
        return {"table": torch.zeros(frame.num_heads, 2 * rows - 1, 2 * cols - 1)}

    def bias(self, own: Any, asked: Asked) -> Tensor:
        sides = asked.made_for
        num_cols = 2 * sides[1] - 1
        table_HS = own.table.view(len(own.table), -1)
        below, shares = [], []
        for axis, (now, made) in enumerate(zip(asked.extent, sides, strict=True)):
            # Borders lie on borders: the longest step of this grid is the longest of that one.
            stretch = (made - 1) / (now - 1) if now > 1 else 1.0
            at_WTM = (asked.steps[..., axis] * stretch + (made - 1)).clamp(0, 2 * (made - 1))
            at_WTM = torch.where((at_WTM - at_WTM.round()).abs() < SAME_PLACE, at_WTM.round(), at_WTM)
            low_WTM = at_WTM.floor()
            below.append(low_WTM.long())
            shares.append(at_WTM - low_WTM)
        (row, col), (down, right) = below, shares
        next_row, next_col = (row + 1).clamp(max=2 * sides[0] - 2), (col + 1).clamp(max=num_cols - 1)
        corners = ((row, 1 - down), (next_row, down))
        sides_of_it = ((col, 1 - right), (next_col, right))
        parts = [
            table_HS[:, r * num_cols + c] * (share_r * share_c).to(table_HS.dtype)
            for r, share_r in corners
            for c, share_c in sides_of_it
        ]
        return torch.stack(parts).sum(0).movedim(0, 1)


@register_locality
@dataclass(frozen=True, kw_only=True)
class Neighborhood(Inducer):
    """Keys farther than a radius are hidden: neighbourhood attention (Hassani et al. 2023), round instead of square.

    A mask has no gate: it takes effect at once, and a trained model has to get used to it.
    """

    name = "neighborhood"
    about = "keys farther than a radius are hidden; takes effect at once"
    starts_plain = False

    radius: float | tuple[float | None, ...] = 2.0
    """In patches, on the grid that the model was made for; None is no limit. One for all, or several (see `by`)."""
    by: Literal["layer", "head"] = "layer"
    """What several radii are of."""

    def __post_init__(self) -> None:
        if self.by not in ("layer", "head"):
            raise unknown_name("way to list radii", str(self.by), ("layer", "head"))
        radii = tuple(self.radius) if isinstance(self.radius, tuple | list) else (self.radius,)
        for radius in radii:
            is_number = isinstance(radius, int | float) and not isinstance(radius, bool)
            if radius is not None and not (is_number and radius >= 0):
                raise InputError(f"radius is {radius!r}, but must be a distance in patches, at least 0, or None")
        settled = tuple(None if radius in (None, math.inf) else float(radius) for radius in radii)
        object.__setattr__(self, "radius", settled if len(settled) > 1 else settled[0])

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        count = frame.num_layers if self.by == "layer" else frame.num_heads
        if isinstance(self.radius, tuple) and len(self.radius) != count:
            raise self.refuse(
                f"{len(self.radius)} radii were given, but {frame.layer_name} is one of {count} {self.by}s"
            )
        asked = Asked(frame.queries_WN2, frame.keys_WM2, frame.extent, frame.extent, number=frame.number)
        kept_WHN = (self._near(asked) & asked.are_patches[:, None]).sum(-1)
        is_query_WN = asked.queries_WT2[..., 0].isfinite()
        if bool((kept_WHN.amin(1)[is_query_WN] < 1).any()):
            raise self.refuse(f"some queries of {frame.layer_name} have no key within that radius; take a larger one")
        return {}

    def _limits(self, asked: Asked) -> list[float]:
        """Of each head, or one of all."""
        radii: tuple[float | None, ...] = self.radius if isinstance(self.radius, tuple) else (self.radius,)
        if self.by == "layer":
            radii = (radii[asked.number if len(radii) > 1 else 0],)
        return [math.inf if radius is None else radius + SAME_PLACE for radius in radii]

    def _near(self, asked: Asked) -> Tensor:
        """[W, H or 1, T, M]"""
        return torch.stack([asked.distances <= limit for limit in self._limits(asked)], dim=1)

    def shown(self, own: Any, asked: Asked) -> Tensor:
        return self._near(asked)

    def radial(self, own: Any, asked: Asked) -> Radial:
        reaches = [limit * asked.growth for limit in self._limits(asked)]
        return Radial(reach=asked.known(("reach", *reaches), partial(asked.keys_WM2.new_tensor, reaches)))
