"""The ten objects of the `shapes` set: a silhouette and a texture each, as functions of object coordinates.

`outside(x, y)` is negative inside the silhouette, positive outside and changes by about 1 per unit length near the
edge, so that it can be blurred over one pixel. `texture(x, y)` is positive where the object shows its second colour.
Coordinates grow to the right and downwards.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float64]
Field = Callable[[Plane, Plane], Plane]


@dataclass(frozen=True)
class ObjectClass:
    """One class of the set."""

    name: str
    """What people call it."""
    outside: Field
    """Signed distance to the silhouette (approximate)."""
    texture: Field
    """Where the second colour shows."""
    radius: float
    """The scale at which the silhouette covers π, the area of the unit disc."""


def _larger(first: Plane, second: Plane) -> Plane:
    """Of two signed distances: the overlap of the silhouettes."""
    larger: Plane = np.maximum(first, second)
    return larger


def _smaller(first: Plane, second: Plane) -> Plane:
    """Of two signed distances: both silhouettes as one."""
    smaller: Plane = np.minimum(first, second)
    return smaller


def _angle(x: Plane, y: Plane) -> Plane:
    """From the x axis, in (-π, π]."""
    angle: Plane = np.arctan2(y, x)
    return angle


def _folded_angle(x: Plane, y: Plane, num: int) -> Plane:
    """Angle from the nearest of `num` spokes, in [0, π/num]."""
    turn = _angle(x, y) * (num / (2 * math.pi))
    return np.abs(turn - np.rint(turn)) * (2 * math.pi / num)


def _target(x: Plane, y: Plane) -> Plane:
    return np.hypot(x, y) - 1


def _target_rings(x: Plane, y: Plane) -> Plane:
    return np.cos(2 * math.pi * 1.5 * np.hypot(x, y))


def _lifebuoy(x: Plane, y: Plane) -> Plane:
    return np.abs(np.hypot(x, y) - 0.7) - 0.3


def _lifebuoy_segments(x: Plane, y: Plane) -> Plane:
    return np.sin(4 * _angle(x, y))


def _board(x: Plane, y: Plane) -> Plane:
    return _larger(np.abs(x), np.abs(y)) - 1


def _board_checks(x: Plane, y: Plane) -> Plane:
    return 1.5 * np.sin(1.5 * math.pi * x) * np.sin(1.5 * math.pi * y)


def _tent(x: Plane, y: Plane) -> Plane:
    return np.hypot(x, y) * np.cos(math.pi / 3 - _folded_angle(-y, x, 3)) - 0.5


def _tent_stripes(x: Plane, y: Plane) -> Plane:
    return np.sin(2 * math.pi * 1.7 * x + 0.8)


def _star(x: Plane, y: Plane) -> Plane:
    """Five points: inside one folded sector the edge is the straight line from a point (1, 0) to a notch."""
    notch_x, notch_y = 0.45 * math.cos(math.pi / 5), 0.45 * math.sin(math.pi / 5)
    length = math.hypot(notch_y, 1 - notch_x)
    radius, angle = np.hypot(x, y), _folded_angle(-y, x, 5)
    return ((radius * np.cos(angle) - 1) * notch_y + radius * np.sin(angle) * (1 - notch_x)) / length


def _star_facets(x: Plane, y: Plane) -> Plane:
    return np.sin(5 * _angle(-y, x))


def _plus(x: Plane, y: Plane) -> Plane:
    long, short = _larger(np.abs(x), np.abs(y)), _smaller(np.abs(x), np.abs(y))
    return _larger(long - 1, short - 0.36)


def _plus_tips(x: Plane, y: Plane) -> Plane:
    return np.cos(1.8 * math.pi * _larger(np.abs(x), np.abs(y))) + 0.2


def _moon(x: Plane, y: Plane) -> Plane:
    return _larger(np.hypot(x, y) - 1, 0.78 - np.hypot(x - 0.62, y))


def _moon_craters(x: Plane, y: Plane) -> Plane:
    return np.cos(2 * math.pi * 1.6 * (x + 0.66)) + np.cos(2 * math.pi * 1.6 * y) - 0.2


def _heart(x: Plane, y: Plane) -> Plane:
    """A square standing on its corner with a half disc on each upper side."""
    side = 0.62
    along, across = (np.abs(x) + y) * math.sqrt(0.5), (np.abs(x) - y) * math.sqrt(0.5)
    square = _larger(np.abs(along), np.abs(across)) - side
    lobe = np.hypot(along, across - side) - side
    return _smaller(square, lobe)


def _heart_halves(x: Plane, y: Plane) -> Plane:
    return 3 * x


def _hourglass(x: Plane, y: Plane) -> Plane:
    return _larger(np.abs(y) - 1, (np.abs(x) - 0.85 * np.abs(y) - 0.12) * 0.76)


def _hourglass_bands(x: Plane, y: Plane) -> Plane:
    return np.cos(2 * math.pi * 1.4 * y)


def _flower(x: Plane, y: Plane) -> Plane:
    return (np.hypot(x, y) - 0.75 - 0.25 * np.cos(6 * _angle(x, y))) * 0.7


def _flower_eye(x: Plane, y: Plane) -> Plane:
    return 4 * (0.5 - np.hypot(x, y))


OBJECTS = (
    ObjectClass("target", _target, _target_rings, 1.0),
    ObjectClass("lifebuoy", _lifebuoy, _lifebuoy_segments, 1.0911),
    ObjectClass("chessboard", _board, _board_checks, 0.8862),
    ObjectClass("tent", _tent, _tent_stripes, 1.5551),
    ObjectClass("star", _star, _star_facets, 1.5413),
    ObjectClass("plus", _plus, _plus_tips, 1.1534),
    ObjectClass("moon", _moon, _moon_craters, 1.3321),
    ObjectClass("heart", _heart, _heart_halves, 1.0699),
    ObjectClass("hourglass", _hourglass, _hourglass_bands, 1.2005),
    ObjectClass("flower", _flower, _flower_eye, 1.2978),
)
