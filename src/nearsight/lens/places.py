"""Where on the image things lie: regions of pixels, by number.

While a model is surveyed every element of every tensor has such a number (`trace`). Regions are joined where a model
joins what lies there: a patch is the union of its pixels, a pooled key that of its patches. Number 0 is nowhere (a CLS
token, a register, a weight), 1 is padding.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nearsight.lens.operations import Window

NOWHERE, PADDING = 0, 1
# Columns of the table of regions.
_FIRST_IMAGE, _LAST_IMAGE, _TOP, _BOTTOM, _LEFT, _RIGHT, _Y, _X, _CELL_Y, _CELL_X, _PIXELS, _GRID = range(12)
_LOWEST = [_FIRST_IMAGE, _TOP, _LEFT]
_HIGHEST = [_LAST_IMAGE, _BOTTOM, _RIGHT]
_MEANS = [_Y, _X]  # of what it was made from
_CELL = [_CELL_Y, _CELL_X]  # as one of many on an even grid: windows at the borders are not cut
_STEPS_PER_PIXEL = 2**20
_EMPTY = [math.inf, -math.inf, math.inf, -math.inf, math.inf, -math.inf, *[0.0] * 6]


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
        pixels = torch.stack([image, image, row, row, col, col, row, col, row, col, row**0, row * 0], dim=1)
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
        means = (regions[..., _CELL] * weight).sum(axes, keepdim=keepdim) / pixels.clamp(min=1)
        joined[..., _MEANS] = joined[..., _CELL] = _rounded(means)
        joined[..., _GRID] = NOWHERE
        return self._number(joined)

    def _number(self, regions: Tensor) -> Tensor:
        """The numbers of these regions; new ones where they are new."""
        distinct, which = torch.unique(regions.reshape(-1, len(_EMPTY)), dim=0, return_inverse=True)
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
        """Cut an axis into `size` pieces of equal length (±1) and join the regions of each: interpolation, adaptive
        pooling, a transposed convolution, seen from where things are."""
        if numbers.shape[axis] == size:
            return numbers
        return self.union(_pieces(numbers, axis, size), [axis % numbers.dim() + 1])

    def windows(self, numbers: Tensor, windows: Mapping[int, tuple[int, Window]]) -> Tensor:
        """What a strided convolution or a pooling makes of its axes: for each, how many windows and of which kind."""
        for axis in range(numbers.dim()):
            if axis not in windows and numbers.stride(axis) == 0 and numbers.shape[axis]:
                numbers = numbers.narrow(axis, 0, 1)  # channels, mostly: one number, repeated
        placed = numbers[numbers > PADDING]
        grid = int(placed.min()) if len(placed) else NOWHERE
        means = _CELL
        for axis, (count, window) in windows.items():
            numbers = self._seen(numbers.movedim(axis, -1), count, window, means, grid).movedim(-1, axis)
            means = _MEANS
        return numbers

    def _seen(self, numbers: Tensor, count: int, window: Window, means: list[int], grid: int) -> Tensor:
        """The last axis in windows. Each lies at the centre of the cells it sees, those on the image alone; as a cell
        of a new grid it lies where it would without borders; and it stands for its share of the whole axis, since
        what windows pass over, or see twice, must not make the image smaller or larger."""
        inside = (numbers > PADDING).flatten(end_dim=-2).any(0).nonzero().flatten()
        if not len(inside):
            return numbers.narrow(-1, 0, 1).expand(*numbers.shape[:-1], count)
        first, last = int(inside[0]), int(inside[-1])
        shares = _pieces(numbers.narrow(-1, first, last - first + 1), numbers.dim() - 1, count)
        cells = window.cells(count)
        taken = numbers[..., cells.clamp(0, numbers.shape[-1] - 1)]
        taken = torch.where((cells >= 0) & (cells < numbers.shape[-1]), taken, NOWHERE)
        is_real = (taken > PADDING).unsqueeze(-1)
        num_real = is_real.sum(-2)
        wanted = self._regions[:, [*means, _PIXELS]]
        seen = torch.where(is_real, wanted[taken], 0.0).sum(-2) / num_real.clamp(min=1)
        regions = seen.new_empty(*seen.shape[:-1], len(_EMPTY))
        regions[..., _LOWEST] = self._regions[:, _LOWEST][shares].amin(-2)
        regions[..., _HIGHEST] = self._regions[:, _HIGHEST][shares].amax(-2)
        regions[..., _CELL] = _rounded(self._extended(numbers, window.centre(torch.arange(count)), seen[..., :2]))
        # What looks at every cell blurs the map and moves nothing, at its borders neither.
        regions[..., _MEANS] = regions[..., _CELL] if window.step == 1 else _rounded(seen[..., :2])
        regions[..., _PIXELS] = seen[..., 2] * min(window.size, window.step)
        regions[..., _GRID] = grid
        unseen = torch.where((taken == PADDING).any(-1), PADDING, NOWHERE)
        return torch.where((num_real.squeeze(-1) > 0) & (shares > PADDING).any(-1), self._number(regions), unseen)

    def _extended(self, numbers: Tensor, at: Tensor, otherwise: Tensor) -> Tensor:
        """Where cells of the last axis lie that need not be whole or on the image: [..., 2]; evenly spaced as those
        that are. Where these are not (a map that was rolled), `otherwise`."""
        length = numbers.shape[-1]
        cells = self._regions[:, _CELL][numbers]
        is_real = (numbers > PADDING).unsqueeze(-1)
        index = torch.arange(length, dtype=torch.float64).unsqueeze(-1)
        low = torch.where(is_real, index, length - 1.0).amin(-2, keepdim=True)
        high = torch.where(is_real, index, 0.0).amax(-2, keepdim=True)
        start, stop = (cells.gather(-2, end.long().expand(*end.shape[:-1], 2)) for end in (low, high))
        slope = (stop - start) / (high - low).clamp(min=1)
        is_even = ((cells - start - slope * (index - low)).abs() < 1e-3) | ~is_real
        extended = start + slope * (at.double().unsqueeze(-1) - low)
        return torch.where(is_even.all(-2, keepdim=True).all(-1, keepdim=True), extended, otherwise)

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
        return self._in_one_image(numbers, _MEANS)

    def cells(self, numbers: Tensor) -> Tensor:
        """The same of each region as a cell of its grid, where windows at the borders are not cut: evenly spaced."""
        return self._in_one_image(numbers, _CELL)

    def grids(self, numbers: Tensor) -> Tensor:
        """The grids these regions were pooled from, nowhere for those that are no windows; not that of a summary of
        the image."""
        grids: Tensor = self._regions[numbers[(numbers > PADDING) & ~self.covers_image(numbers)], _GRID].unique()
        return grids

    def mean_size(self, numbers: Tensor) -> float:
        """How many pixels the different regions have on average, summaries of the image left aside; NaN if none."""
        placed = numbers[(numbers > PADDING) & ~self.covers_image(numbers)].unique()
        return float(self._regions[placed, _PIXELS].mean())

    def _in_one_image(self, numbers: Tensor, columns: list[int]) -> Tensor:
        return torch.where((self.image_of(numbers) >= 0).unsqueeze(-1), self._regions[numbers][..., columns], math.nan)

    def covers_image(self, numbers: Tensor) -> Tensor:
        """Whether a region reaches from edge to edge both ways: it says nothing about where something is."""
        box = self._regions[numbers]
        height, width = self.image_size
        return (box[..., _BOTTOM] - box[..., _TOP] >= height - 1) & (box[..., _RIGHT] - box[..., _LEFT] >= width - 1)


def _pieces(numbers: Tensor, axis: int, size: int) -> Tensor:
    """An axis cut into pieces of equal length (±1): [..., size, length, ...]; nowhere fills up the shorter ones."""
    old = numbers.shape[axis]
    start = torch.arange(size) * old // size
    stop = torch.maximum((torch.arange(1, size + 1) * old + size - 1) // size, start + 1)
    steps = torch.arange(int((stop - start).max()))
    inside = start[:, None] + steps
    padded = torch.cat([numbers, torch.full_like(numbers.narrow(axis, 0, 1), NOWHERE)], dim=axis)
    taken = padded.index_select(axis, torch.where(inside < stop[:, None], inside, old).flatten())
    pieces: Tensor = taken.unflatten(axis, (size, len(steps)))
    return pieces


def _rounded(places: Tensor) -> Tensor:
    """Sums in another order differ in their last bits, but equal places must be equal numbers."""
    return (places * _STEPS_PER_PIXEL).round() / _STEPS_PER_PIXEL


def constant_along(numbers: Tensor, axis: int) -> Tensor | None:
    """The numbers without this axis (kept with size 1), if they do not change along it."""
    first = numbers.narrow(axis, 0, 1)
    return first if numbers.stride(axis) == 0 or bool((numbers == first).all()) else None
