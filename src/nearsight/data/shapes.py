"""`shapes`: the embedded image set. Ten textured objects on cluttered grounds, rendered, not downloaded.

A class is a silhouette with its texture, both of which show in a few neighbouring patches: the evidence is local.
Position, size, rotation, all colours, the ground and the clutter are drawn independently of the class, and every
silhouette covers the same area, so colour statistics say nothing about the label.

Image i of a split is a function of (seed, split, i) alone. Scenes are continuous and drawn in float64, so 64×64 shows
the same scenes as 32×32, and the rounding to uint8 comes out equal on every machine.

First the ten objects, as functions of object coordinates, which grow to the right and downwards: `outside(x, y)` is
negative inside the silhouette, positive outside and changes by about 1 per unit length near the edge, so that it can be
blurred over one pixel; `texture(x, y)` is positive where the object shows its second colour. Then the scenes.

Shape suffixes: n images of one class, H rows, W columns; a `Plane` is anything that meets [n, C, H, W] by broadcasting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from nearsight.data.dataset import ImageSet
from nearsight.data.registry import DatasetSpec, register_dataset
from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.lazy import np, torch
from nearsight.randomness import uniform

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Plane: TypeAlias = "NDArray[np.float64]"
Field = Callable[[Plane, Plane], Plane]


@dataclass(frozen=True)
class ObjectClass:
    """One class of the set."""

    name: str
    """Its name."""
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


CLASSES = tuple(kind.name for kind in OBJECTS)
IMAGE_SIZES = (32, 64)

MOST_BYTES = 2**30
"""Of the images of a split, which are all in memory."""
_NUM_DRAWS = 96
_NUM_CLUTTER = 5
_PIXELS_PER_CHUNK = 2**15  # float64 planes of 256 kB stay in the processor's cache


class _Draws:
    """The uniform draws of n images, taken one after the other; each is [n, 1, 1, 1] to meet the pixel axes."""

    def __init__(self, draws_nd: Tensor) -> None:
        self._columns = iter(draws_nd.double().numpy().T[..., None, None, None])

    def between(self, low: float, high: float) -> Plane:
        column: Plane = next(self._columns)
        return low + (high - low) * column

    def coin(self) -> NDArray[np.bool_]:
        return self.between(0, 1) < 0.5

    def angle(self) -> Plane:
        return self.between(0.0, 2 * math.pi)


@dataclass(frozen=True)
class _Canvas:
    """Pixel centres in [-1, 1]², and the width of a pixel there."""

    x: Plane
    """[1, 1, 1, W]"""
    y: Plane
    """[1, 1, H, 1]"""
    pixel: float
    """Width of a pixel."""

    @classmethod
    def of_size(cls, size: int) -> _Canvas:
        centres = (np.arange(size) * 2 + 1) / size - 1
        return cls(centres.reshape(1, 1, 1, size), centres.reshape(1, 1, size, 1), 2 / size)

    def along(self, angle: Plane) -> Plane:
        """How far each pixel lies in a direction."""
        return np.cos(angle) * self.x + np.sin(angle) * self.y

    def seen_from(self, x: Plane, y: Plane, angle: Plane) -> tuple[Plane, Plane]:
        """Coordinates of an object at (x, y) that is turned by `angle`."""
        cos, sin = np.cos(angle), np.sin(angle)
        return (
            (cos * self.x - (cos * x + sin * y)) + sin * self.y,
            (cos * self.y - (cos * y - sin * x)) - sin * self.x,
        )

    def cover(self, outside: Plane) -> Plane:
        """How much of each pixel lies inside: the edge is blurred over one pixel, as a camera would."""
        return np.clip(0.5 - outside * (1 / self.pixel), 0, 1)


def _colour(hue: Plane, saturation: Plane, value: Plane) -> Plane:
    """[n, 3, 1, 1] from hue, saturation and value in [0, 1]; a cosine wheel, smooth in all three."""
    thirds = np.array([0.0, -1 / 3, 1 / 3]).reshape(1, 3, 1, 1)
    wheel: Plane = 0.5 + 0.5 * np.cos(2 * math.pi * (hue + thirds))
    return value * (1 - saturation + saturation * wheel)


def _lay_over(image: Plane, colour: Plane, cover: Plane) -> None:
    """In place, because fresh [n, 3, H, W] arrays per layer would cost more than the arithmetic."""
    image *= 1 - cover
    image += colour * cover


def _ground(draws: _Draws, canvas: _Canvas) -> Plane:
    """A gradient between two colours with two plane waves on it."""
    blend = np.clip(0.5 + draws.between(0.2, 0.6) * canvas.along(draws.angle()), 0, 1)
    hue = draws.between(0, 1)
    first = _colour(hue, draws.between(0.1, 0.7), draws.between(0.25, 0.9))
    second = _colour(hue + draws.between(-0.3, 0.3), draws.between(0.1, 0.7), draws.between(0.25, 0.9))
    image: Plane = first + (second - first) * blend
    for slowest, fastest in ((1.5, 5.0), (6.0, 14.0)):
        phase = draws.between(slowest, fastest) * canvas.along(draws.angle()) + draws.angle()
        image *= 1 + draws.between(0.0, 0.16) * np.sin(phase)
    return image


def _add_clutter(image: Plane, draws: _Draws, canvas: _Canvas) -> None:
    """One ellipse or bar, plain or striped. Stripes here keep texture as such from giving the object away."""
    u, v = canvas.seen_from(draws.between(-1, 1), draws.between(-1, 1), draws.angle())
    half_u, half_v = draws.between(0.08, 0.5), draws.between(0.04, 0.2)
    ellipse = (np.sqrt((u / half_u) ** 2 + (v / half_v) ** 2) - 1) * np.minimum(half_u, half_v)
    bar = np.maximum(np.abs(u) - half_u, np.abs(v) - half_v)
    cover = canvas.cover(np.where(draws.coin(), ellipse, bar)) * draws.between(0.25, 0.75)
    colour = _colour(draws.between(0, 1), draws.between(0.1, 0.8), draws.between(0.2, 0.95))
    stripes = 1 + np.maximum(draws.between(-0.15, 0.3), 0) * np.sin(draws.between(8, 24) * u)
    _lay_over(image, colour * stripes, cover)


def _add_object(image: Plane, kind: ObjectClass, draws: _Draws, canvas: _Canvas) -> None:
    """The object that carries the class, with a soft shadow that lifts it off the ground and light from one side."""
    u, v = canvas.seen_from(draws.between(-0.5, 0.5), draws.between(-0.5, 0.5), draws.between(-0.4, 0.4))
    size = draws.between(0.36, 0.48) * kind.radius
    x, y = u / size, v / size
    outside = kind.outside(x, y) * size
    image *= 1 - 0.55 * np.clip(1 - outside / 0.16, 0, 1) ** 2

    hue = draws.between(0, 1)
    bright = _colour(hue, draws.between(0.35, 0.95), draws.between(0.8, 1.0))
    dark = _colour(hue + draws.between(0.25, 0.75), draws.between(0.4, 1.0), draws.between(0.12, 0.42))
    # Either colour may be the first: how much of an object a texture fills then says nothing about its brightness.
    swapped = draws.coin()
    first, second = np.where(swapped, dark, bright), np.where(swapped, bright, dark)
    blend = np.clip(0.5 + 1.6 * kind.texture(x, y), 0, 1)
    light = draws.angle()
    lit = 1 + 0.14 * (np.cos(light) * x + np.sin(light) * y)
    _lay_over(image, (first + (second - first) * blend) * lit, canvas.cover(outside))


def _render(kind: ObjectClass, draws_nd: Tensor, image_size: int) -> NDArray[np.uint8]:
    """Images [n, 3, H, W] of one class."""
    draws, canvas = _Draws(draws_nd), _Canvas.of_size(image_size)
    image = _ground(draws, canvas)
    for _ in range(_NUM_CLUTTER):
        _add_clutter(image, draws, canvas)
    _add_object(image, kind, draws, canvas)
    return np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)


def make_shapes(num_images: int, *, image_size: int = 32, seed: int = 0, split: str = "train") -> ImageSet:
    """The first `num_images` images of a split. Labels repeat 0 … 9, so any prefix is balanced."""
    check_at_least("the number of shapes images", num_images, 1)
    if image_size not in IMAGE_SIZES:
        raise InputError(f"shapes are drawn at {' or '.join(map(str, IMAGE_SIZES))} pixels, not at {image_size}")
    if split not in ("train", "test"):
        raise unknown_name("split", split, ("train", "test"))
    if (num_bytes := num_images * 3 * image_size**2) > MOST_BYTES:
        raise InputError(f"{num_images} shapes images take {num_bytes} bytes, but {MOST_BYTES} are the most")
    index_N = torch.arange(num_images)
    draws_Nd = uniform(torch.tensor(seed), f"shapes {split}", torch.tensor(0), index_N, _NUM_DRAWS)
    images_NCHW = torch.empty(num_images, 3, image_size, image_size, dtype=torch.uint8)

    def draw(label: int, begin: int) -> None:
        chosen = slice(begin, begin + stride * per_chunk, stride)
        images_NCHW.numpy()[chosen] = _render(OBJECTS[label], draws_Nd[chosen], image_size)

    stride, per_chunk = len(OBJECTS), _PIXELS_PER_CHUNK // image_size**2
    chunks = [(label, begin) for label in range(stride) for begin in range(label, num_images, stride * per_chunk)]
    # numpy releases the interpreter lock; threads over chunks never wait for each other, as after each operation.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(draw, *zip(*chunks, strict=True)))
    return ImageSet(images_NCHW, index_N % stride)


register_dataset(
    "shapes",
    DatasetSpec(
        about="ten textured objects on cluttered grounds; drawn by nearsight, nothing to download",
        find=None,
        draw=make_shapes,
        classes=CLASSES,
        num_classes=10,
        num_train=10_000,
        num_test=2_000,
        image_size=32,
        other_sizes=True,
        mean=(0.438, 0.438, 0.438),
        std=(0.174, 0.174, 0.174),
    ),
)
