"""Where on the image things lie: regions of pixels, by number.

While a model is surveyed every element of every tensor has such a number (`trace`). Regions are joined where a model
joins what lies there: a patch is the union of its pixels, a pooled key that of its patches. Number 0 is nowhere (a CLS
token, a register, a weight), 1 is padding.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NOWHERE, PADDING = 0, 1
# Columns of the table of regions.
_FIRST_IMAGE, _LAST_IMAGE, _TOP, _BOTTOM, _LEFT, _RIGHT, _Y, _X, _PIXELS = range(9)
_LOWEST = [_FIRST_IMAGE, _TOP, _LEFT]
_HIGHEST = [_LAST_IMAGE, _BOTTOM, _RIGHT]
_MEANS = [_Y, _X]
_STEPS_PER_PIXEL = 2**20
_EMPTY = [math.inf, -math.inf, math.inf, -math.inf, math.inf, -math.inf, 0.0, 0.0, 0.0]


class Places:
    """The regions met so far. Regions with equal contents have equal numbers."""

    def __init__(self, num_images: int, image_size: tuple[int, int]) -> None:
        self.image_size = height, width = image_size
        image, row, col = (
            axis.flatten().double()
            for axis in torch.meshgrid(
                torch.arange(num_images), torch.arange(height), torch.arange(width), indexing="ij"
            )
        )
        pixels = torch.stack([image, image, row, row, col, col, row, col, torch.ones_like(row)], dim=1)
        self._regions = torch.cat([torch.tensor([_EMPTY, _EMPTY], dtype=torch.float64), pixels])
        self.pixels = torch.arange(2, 2 + len(pixels)).view(num_images, 1, height, width)
        """The number of each pixel of the images."""
        self._known = {tuple(_EMPTY): NOWHERE}

    def union(self, numbers: Tensor, axes: Sequence[int], *, keepdim: bool = False) -> Tensor:
        """Numbers of the regions that hold all regions along these axes. Nowhere and padding add nothing."""
        axes = [axis % numbers.dim() for axis in axes]
        for axis in axes:
            if numbers.stride(axis) == 0 and numbers.shape[axis]:  # one number, repeated: look at it once
                numbers = numbers.narrow(axis, 0, 1)
        lowest, highest = numbers.amin(axes, keepdim=keepdim), numbers.amax(axes, keepdim=keepdim)
        return lowest if torch.equal(lowest, highest) else self._join(numbers, axes, keepdim)

    def _join(self, numbers: Tensor, axes: list[int], keepdim: bool) -> Tensor:
        regions = self._regions[numbers]
        joined = regions.new_empty(*numbers.amin(axes, keepdim=keepdim).shape, len(_EMPTY))
        joined[..., _LOWEST] = regions[..., _LOWEST].amin(axes, keepdim=keepdim)
        joined[..., _HIGHEST] = regions[..., _HIGHEST].amax(axes, keepdim=keepdim)
        weight = regions[..., [_PIXELS]]
        joined[..., [_PIXELS]] = pixels = weight.sum(axes, keepdim=keepdim)
        means = (regions[..., _MEANS] * weight).sum(axes, keepdim=keepdim) / pixels.clamp(min=1)
        # Sums in another order differ in their last bits, but equal places must be equal numbers.
        joined[..., _MEANS] = (means * _STEPS_PER_PIXEL).round() / _STEPS_PER_PIXEL
        return self._number(joined)

    def _number(self, regions: Tensor) -> Tensor:
        """The numbers of these regions; new ones where they are new."""
        distinct, which = torch.unique(regions.view(-1, len(_EMPTY)), dim=0, return_inverse=True)
        numbers: list[int] = []
        new: list[list[float]] = []
        for region in distinct.tolist():
            number = self._known.setdefault(tuple(region), len(self._regions) + len(new))
            if number == len(self._regions) + len(new):
                new.append(region)
            numbers.append(number)
        self._regions = torch.cat([self._regions, torch.tensor(new, dtype=torch.float64).view(-1, len(_EMPTY))])
        return torch.tensor(numbers)[which].view(regions.shape[:-1])

    def resample(self, numbers: Tensor, axis: int, size: int) -> Tensor:
        """Cut an axis into `size` pieces of equal length (±1) and join the regions of each: pooling, a strided
        convolution, or interpolation, seen from where things are."""
        old = numbers.shape[axis]
        if old == size:
            return numbers
        start = torch.arange(size) * old // size
        stop = torch.maximum((torch.arange(1, size + 1) * old + size - 1) // size, start + 1)
        steps = torch.arange(int((stop - start).max()))
        inside = start[:, None] + steps
        padded = torch.cat([numbers, torch.full_like(numbers.narrow(axis, 0, 1), NOWHERE)], dim=axis)
        taken = padded.index_select(axis, torch.where(inside < stop[:, None], inside, old).flatten())
        return self.union(taken.unflatten(axis, (size, len(steps))), [axis % numbers.dim() + 1])

    def pick(self, numbers: Tensor, axis: int, step: int) -> Tensor:
        """Every so many regions along an axis: each stays where it is, but stands for those passed over as well."""
        picked = numbers.index_select(axis, torch.arange(0, numbers.shape[axis], step))
        joined = self.resample(numbers, axis, picked.shape[axis])
        regions, box = self._regions[picked], [*_LOWEST, *_HIGHEST]
        regions[..., box] = self._regions[joined][..., box]
        return torch.where(picked > PADDING, self._number(regions), picked)

    def smaller(self, one: Tensor, other: Tensor) -> Tensor:
        """Of two regions the smaller one; nowhere and padding count as larger than anything."""
        if torch.equal(one, other):
            return one
        sizes = torch.where(self._regions[:, _PIXELS] > 0, self._regions[:, _PIXELS], math.inf)
        sizes[NOWHERE] = math.nan  # padding stays padding beside what is nowhere
        return torch.where((sizes[other] < sizes[one]) | (one == NOWHERE), other, one)

    def image_of(self, numbers: Tensor) -> Tensor:
        """Which image each region lies in; −1 where it lies in none, or in several."""
        first, last = self._regions[numbers, _FIRST_IMAGE], self._regions[numbers, _LAST_IMAGE]
        return torch.where(first == last, first, -1.0).long()

    def centres(self, numbers: Tensor) -> Tensor:
        """(y, x) of the centre of mass of each region, in pixels: [..., 2]; NaN where it is not in one image."""
        centres = self._regions[numbers][..., _MEANS]
        return torch.where((self.image_of(numbers) >= 0).unsqueeze(-1), centres, math.nan)

    def covers_image(self, numbers: Tensor) -> Tensor:
        """Whether a region reaches from edge to edge both ways: it says nothing about where something is."""
        box = self._regions[numbers]
        height, width = self.image_size
        return (box[..., _BOTTOM] - box[..., _TOP] >= height - 1) & (box[..., _RIGHT] - box[..., _LEFT] >= width - 1)


def constant_along(numbers: Tensor, axis: int) -> Tensor | None:
    """The numbers without this axis (kept with size 1), if they do not change along it."""
    first = numbers.narrow(axis, 0, 1)
    return first if numbers.stride(axis) == 0 or bool((numbers == first).all()) else None
