"""Where on the image things lie: regions of pixels, by number.

While a model is surveyed every element of every tensor has such a number (`trace`). Regions are joined where a model
joins what lies there: a patch is the union of its pixels, a pooled key that of its patches. Number 0 is nowhere (a CLS
token, a register, a weight), 1 is padding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nearsight.lens.operations import Window

NOWHERE, PADDING = 0, 1
# Columns of the table of regions.
_FIRST_IMAGE, _LAST_IMAGE, _EARLIEST, _LATEST, _TOP, _BOTTOM, _LEFT, _RIGHT = range(8)
_T, _Y, _X, _CELL_T, _CELL_Y, _CELL_X, _PIXELS, _GRID = range(8, 16)
_LOWEST = [_FIRST_IMAGE, _EARLIEST, _TOP, _LEFT]
_HIGHEST = [_LAST_IMAGE, _LATEST, _BOTTOM, _RIGHT]
_MEANS = [_T, _Y, _X]  # of what it was made from
_CELL = [_CELL_T, _CELL_Y, _CELL_X]  # as one of many on an even grid: windows at the borders are not cut
_STEPS_PER_PIXEL = 2**20
_EMPTY = [math.inf, -math.inf] * 4 + [0.0] * 8


class Places:
    """The regions met so far. Regions with equal contents have equal numbers."""

    def __init__(self, num_images: int, image_size: tuple[int, int], num_frames: int = 1) -> None:
        self.image_size = height, width = image_size
        self.pixels = torch.arange(2, 2 + num_images * num_frames * height * width)
        """The number of each pixel of each frame of the images; a picture has one frame."""
        self.pixels = self.pixels.view(num_images, num_frames, height, width)
        # Not those of pixels, which are many, and follow from their numbers.
        self._regions = torch.tensor([_EMPTY, _EMPTY], dtype=torch.float64)
        self._known = {_contents(self._regions[:1])[0]: NOWHERE}

    def _of(self, numbers: Tensor, columns: Sequence[int]) -> Tensor:
        """These columns of the regions with these numbers: [..., columns]."""
        shape, numbers = numbers.shape, without_repetitions(numbers)
        last_pixel = 1 + self.pixels.numel()
        is_pixel = (numbers > PADDING) & (numbers <= last_pixel)
        rows = torch.where(numbers > last_pixel, numbers - self.pixels.numel(), numbers.clamp(max=PADDING))
        found = self._regions[:, list(columns)][rows]
        if is_pixel.any():
            found = torch.where(is_pixel.unsqueeze(-1), self._of_pixels(numbers, columns), found)
        return found.expand(*shape, len(columns))

    def _of_pixels(self, numbers: Tensor, columns: Sequence[int]) -> Tensor:
        """The same, as if all of them were pixels."""
        _, frames, height, width = self.pixels.shape
        number = numbers - 2
        image, frame = number // (frames * height * width), number // (height * width) % frames
        row, col = number // width % height, number % width
        values = [axis for axis in (image, frame, row, col) for _ in range(2)] + [frame, row, col] * 2
        values += [torch.ones_like(image), torch.zeros_like(image)]
        return torch.stack([values[column].double() for column in columns], dim=-1)

    def union(self, numbers: Tensor, axes: Sequence[int], *, keepdim: bool = False) -> Tensor:
        """Numbers of the regions that hold all regions along these axes. Nowhere and padding add nothing."""
        axes = [axis % numbers.dim() for axis in axes]
        shape = [1 if axis in axes else size for axis, size in enumerate(numbers.shape) if keepdim or axis not in axes]
        numbers = without_repetitions(numbers)
        lowest, highest = numbers.amin(axes, keepdim=keepdim), numbers.amax(axes, keepdim=keepdim)
        return (lowest if torch.equal(lowest, highest) else self._join(numbers, axes, keepdim)).expand(shape)

    def _join(self, numbers: Tensor, axes: list[int], keepdim: bool) -> Tensor:
        numbers, times = _without_runs(numbers, axes)
        regions = self._of(numbers, range(len(_EMPTY)))
        joined = regions.new_empty(*numbers.amin(axes, keepdim=keepdim).shape, len(_EMPTY))
        joined[..., _LOWEST] = regions[..., _LOWEST].amin(axes, keepdim=keepdim)
        joined[..., _HIGHEST] = regions[..., _HIGHEST].amax(axes, keepdim=keepdim)
        weight = regions[..., [_PIXELS]] * times.unsqueeze(-1)
        joined[..., [_PIXELS]] = pixels = weight.sum(axes, keepdim=keepdim)
        means = (regions[..., _CELL] * weight).sum(axes, keepdim=keepdim) / pixels.clamp(min=1)
        joined[..., _MEANS] = joined[..., _CELL] = _rounded(means)
        joined[..., _GRID] = NOWHERE
        return self._number(joined)

    def _number(self, regions: Tensor) -> Tensor:
        """The numbers of these regions; new ones where they are new."""
        distinct, which = torch.unique(regions.reshape(-1, len(_EMPTY)) + 0.0, dim=0, return_inverse=True)  # no −0
        next_number, numbers, new = len(self._regions) + self.pixels.numel(), [], []
        for row, content in enumerate(_contents(distinct)):
            number = self._known.setdefault(content, next_number)
            if number == next_number:
                new.append(row)
                next_number += 1
            numbers.append(number)
        self._regions = torch.cat([self._regions, distinct[new]])
        return torch.tensor(numbers)[which].view(regions.shape[:-1])

    def resample(self, numbers: Tensor, axis: int, size: int, *, between: bool = False) -> Tensor:
        """Cut an axis into `size` pieces of equal length (±1) and join the regions of each: adaptive pooling, a
        transposed convolution, seen from where things are. What is interpolated lies `between` cells, evenly."""
        axis = axis % numbers.dim()
        if numbers.shape[axis] == size:
            return numbers
        joined = self.union(_pieces(numbers, axis, size), [axis + 1])
        if not between or bool((joined <= PADDING).any()):
            return joined
        scale = numbers.shape[axis] / size
        at = (torch.arange(size) + 0.5) * scale - 0.5
        regions = self._of(joined.movedim(axis, -1), range(len(_EMPTY)))
        cells = _rounded(self._extended(numbers.movedim(axis, -1), at, regions[..., _CELL]))
        regions[..., _MEANS] = regions[..., _CELL] = cells
        return self._number(regions).movedim(-1, axis)

    def windows(self, numbers: Tensor, windows: Mapping[int, tuple[int, Window]]) -> Tensor:
        """What a strided convolution or a pooling makes of its axes: for each, how many windows and of which kind."""
        for axis in range(numbers.dim()):
            if axis not in windows and numbers.stride(axis) == 0 and numbers.shape[axis]:
                numbers = numbers.narrow(axis, 0, 1)  # channels, mostly: one number, repeated
        if (of_pixels := self._windows_of_pixels(numbers, windows)) is not None:
            return of_pixels
        placed = numbers[numbers > PADDING]
        grid = int(placed.min()) if len(placed) else NOWHERE
        means = _CELL
        for axis, (count, window) in windows.items():
            numbers = self._seen(numbers.movedim(axis, -1), count, window, means, grid).movedim(-1, axis)
            means = _MEANS
        return numbers

    def _windows_of_pixels(self, numbers: Tensor, windows: Mapping[int, tuple[int, Window]]) -> Tensor | None:
        """The same of the pixels themselves, as most models begin: along each axis by itself, where millions of pixels
        would have to be looked at. None if these are not pixels, or windows that see none of them."""
        has_frames = numbers.dim() == 5
        pixels = self.pixels.unsqueeze(1) if has_frames else self.pixels
        axes = range(2, numbers.dim())
        if numbers.shape != pixels.shape or not torch.equal(numbers, pixels) or not set(axes[-2:]) <= set(windows):
            return None
        frame = torch.zeros(1, dtype=torch.float64)
        lines, area = [] if has_frames else [(frame,) * 4], 1
        for axis in axes:
            size = numbers.shape[axis]
            count, window = windows.get(axis, (size, Window(1, 1, 0, 1)))
            cells = window.cells(count)
            is_real = (cells >= 0) & (cells < size)
            is_like_the_last = axis not in windows or (window.step == 1) == (windows[axes[-1]][1].step == 1)
            if not is_real.any(-1).all() or not is_like_the_last:
                return None
            start, stop = _ends(size, count)
            cell = window.centre(torch.arange(count)).double()
            mean = torch.where(is_real, cells, 0).sum(-1) / is_real.sum(-1).double()
            lines.append((start.double(), stop.double() - 1, cell if window.step == 1 else mean, cell))
            area *= min(window.size, window.step)
        shape = (len(numbers), *(len(line[0]) for line in lines))
        regions = torch.empty(*shape, len(_EMPTY), dtype=torch.float64)
        regions[..., [_FIRST_IMAGE, _LAST_IMAGE]] = torch.arange(len(numbers), dtype=torch.float64).view(-1, 1, 1, 1, 1)
        columns = ((_EARLIEST, _LATEST, _T, _CELL_T), (_TOP, _BOTTOM, _Y, _CELL_Y), (_LEFT, _RIGHT, _X, _CELL_X))
        for axis, (line, names) in enumerate(zip(lines, columns, strict=True)):
            for column, values in zip(names, line, strict=True):
                regions[..., column] = _rounded(values).view([-1 if axis == other else 1 for other in range(3)])
        regions[..., _PIXELS] = area
        regions[..., _GRID] = int(numbers.flatten()[0])
        found = self._number(regions)
        return found.unsqueeze(1) if has_frames else found

    def _seen(self, numbers: Tensor, count: int, window: Window, means: list[int], grid: int) -> Tensor:
        """The last axis in windows. Each lies at the centre of the cells it sees, those on the image alone; as a cell
        of a new grid it lies where it would without borders; and it covers its share of the whole axis, since
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
        seen = torch.where(is_real, self._of(taken, [*means, _PIXELS]), 0.0).sum(-2) / num_real.clamp(min=1)
        regions = seen.new_empty(*seen.shape[:-1], len(_EMPTY))
        regions[..., _LOWEST] = self._of(shares, _LOWEST).amin(-2)
        regions[..., _HIGHEST] = self._of(shares, _HIGHEST).amax(-2)
        regions[..., _CELL] = _rounded(self._extended(numbers, window.centre(torch.arange(count)), seen[..., :-1]))
        # What looks at every cell blurs the map and moves nothing, at its borders neither.
        regions[..., _MEANS] = regions[..., _CELL] if window.step == 1 else _rounded(seen[..., :-1])
        regions[..., _PIXELS] = seen[..., -1] * min(window.size, window.step)
        regions[..., _GRID] = grid
        unseen = torch.where((taken == PADDING).any(-1), PADDING, NOWHERE)
        return torch.where((num_real.squeeze(-1) > 0) & (shares > PADDING).any(-1), self._number(regions), unseen)

    def _extended(self, numbers: Tensor, at: Tensor, otherwise: Tensor) -> Tensor:
        """Where cells of the last axis lie that need not be whole or on the image: [..., 3]; evenly spaced as those
        that are. Where these are not (a map that was rolled), `otherwise`."""
        length = numbers.shape[-1]
        cells = self._of(numbers, _CELL)
        is_real = (numbers > PADDING).unsqueeze(-1)
        index = torch.arange(length, dtype=torch.float64).unsqueeze(-1)
        low = torch.where(is_real, index, length - 1.0).amin(-2, keepdim=True)
        high = torch.where(is_real, index, 0.0).amax(-2, keepdim=True)
        start, stop = (cells.gather(-2, end.long().expand(*end.shape[:-1], len(_CELL))) for end in (low, high))
        slope = (stop - start) / (high - low).clamp(min=1)
        is_even = ((cells - start - slope * (index - low)).abs() < 1e-3) | ~is_real
        extended = start + slope * (at.double().unsqueeze(-1) - low)
        return torch.where(is_even.all(-2, keepdim=True).all(-1, keepdim=True), extended, otherwise)

    def smaller(self, one: Tensor, other: Tensor) -> Tensor:
        """Of two regions the smaller one; nowhere and padding count as larger than anything."""
        if torch.equal(one, other):
            return one
        one_size, other_size = (self._of(numbers, [_PIXELS]).squeeze(-1) for numbers in (one, other))
        is_larger = (one_size == 0) | (one_size > other_size)
        # Padding stays padding beside what is nowhere.
        return torch.where((is_larger & (other_size > 0)) | (one == NOWHERE), other, one)

    def image_of(self, numbers: Tensor) -> Tensor:
        """Which image each region lies in; −1 where it lies in none, or in several."""
        first, last = self._of(numbers, [_FIRST_IMAGE, _LAST_IMAGE]).unbind(-1)
        return torch.where(first == last, first, -1.0).long()

    def centres(self, numbers: Tensor) -> Tensor:
        """(y, x) of the centre of mass of each region, in pixels: [..., 2]; NaN where it is not in one image."""
        return self._in_one_image(numbers, _MEANS)[..., 1:]

    def cells(self, numbers: Tensor) -> Tensor:
        """The same of each region as a cell of its grid, where windows at the borders are not cut: evenly spaced."""
        return self._in_one_image(numbers, _CELL)[..., 1:]

    def times(self, numbers: Tensor) -> Tensor:
        """The mean frame of each region, [...]: 0 in a picture; NaN where it is not in one image."""
        return self._in_one_image(numbers, [_CELL_T])[..., 0]

    def grids(self, numbers: Tensor) -> Tensor:
        """The grids these regions were pooled from, nowhere for those that are not windows; not that of a summary of
        the image."""
        placed = numbers[(numbers > PADDING) & ~self.covers_image(numbers)]
        grids: Tensor = self._of(placed, [_GRID]).unique()
        return grids

    def mean_size(self, numbers: Tensor) -> float:
        """How many pixels the different regions have on average, summaries of the image left aside; NaN if none."""
        placed = numbers[(numbers > PADDING) & ~self.covers_image(numbers)].unique()
        return float(self._of(placed, [_PIXELS]).mean())

    def _in_one_image(self, numbers: Tensor, columns: list[int]) -> Tensor:
        return torch.where((self.image_of(numbers) >= 0).unsqueeze(-1), self._of(numbers, columns), math.nan)

    def covers_image(self, numbers: Tensor) -> Tensor:
        """Whether a region reaches from edge to edge both ways: it says nothing about where something is."""
        top, bottom, left, right = self._of(numbers, [_TOP, _BOTTOM, _LEFT, _RIGHT]).unbind(-1)
        height, width = self.image_size
        return (bottom - top >= height - 1) & (right - left >= width - 1)


def _without_runs(numbers: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Numbers once where they are repeated one after the other along these axes, as where maps are put beside each
    other; and how often each was there, which expands to their shape."""
    times = torch.ones([1] * numbers.dim(), dtype=torch.float64)
    for axis in axes:
        if (size := numbers.shape[axis]) < 2:
            continue
        others = [other for other in range(numbers.dim()) if other != axis]
        changes = (numbers.narrow(axis, 1, size - 1) != numbers.narrow(axis, 0, size - 1)).any(dim=others)
        first = torch.cat([torch.zeros(1, dtype=torch.long), changes.nonzero().flatten() + 1])
        if len(first) < size:
            lengths = torch.cat([first, torch.tensor([size])]).diff().double()
            numbers = numbers.index_select(axis, first)
            times = times * lengths.view([-1 if other == axis else 1 for other in range(numbers.dim())])
    return numbers, times


def _contents(regions: Tensor) -> list[bytes]:
    """Of each region, equal where they are."""
    rows = regions.contiguous().numpy()
    contents: list[bytes] = rows.view(f"V{rows.shape[1] * rows.itemsize}").ravel().tolist()
    return contents


def _pieces(numbers: Tensor, axis: int, size: int) -> Tensor:
    """An axis cut into pieces of equal length (±1): [..., size, length, ...]; nowhere fills up the shorter ones."""
    old = numbers.shape[axis]
    start, stop = _ends(old, size)
    steps = torch.arange(int((stop - start).max()))
    inside = start[:, None] + steps
    padded = torch.cat([numbers, torch.full_like(numbers.narrow(axis, 0, 1), NOWHERE)], dim=axis)
    taken = padded.index_select(axis, torch.where(inside < stop[:, None], inside, old).flatten())
    pieces: Tensor = taken.unflatten(axis, (size, len(steps)))
    return pieces


def _ends(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Where each of so many pieces of an axis begins and ends."""
    start = torch.arange(size) * length // size
    return start, torch.maximum((torch.arange(1, size + 1) * length + size - 1) // size, start + 1)


def _rounded(places: Tensor) -> Tensor:
    """Sums in another order differ in their last bits, but equal places must be equal numbers."""
    return (places * _STEPS_PER_PIXEL).round() / _STEPS_PER_PIXEL


def constant_along(numbers: Tensor, axis: int) -> Tensor | None:
    """The numbers without this axis (kept with size 1), if they do not change along it."""
    first = numbers.narrow(axis, 0, 1)
    if numbers.stride(axis) == 0:
        return first
    once = without_repetitions(numbers)
    return first if bool((once == once.narrow(axis, 0, 1)).all()) else None


def without_repetitions(numbers: Tensor) -> Tensor:
    """A tensor without the axes along which memory repeats it, as places are along channels: kept with size 1."""
    for axis, (size, stride) in enumerate(zip(numbers.shape, numbers.stride(), strict=True)):
        if size and stride == 0:
            numbers = numbers.narrow(axis, 0, 1)
    return numbers


def reshaped(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers in another shape. Those that are repeated along whole axes, as places are along channels, stay so:
    otherwise each channel of each token would be in memory."""
    old, new = list(numbers.shape), list(shape)
    kept: list[int] = []
    at = 0
    for sizes in _groups(old, new):
        if sizes is None:
            return numbers.reshape(shape)
        count, wanted = sizes
        axes = range(at, at + count)
        repeats = all(numbers.stride(axis) == 0 or numbers.shape[axis] == 1 for axis in axes) and math.prod(wanted) > 0
        if repeats:
            for axis in axes:
                numbers = numbers.narrow(axis, 0, 1)
        kept += [1] * len(wanted) if repeats else wanted
        at += count
    return numbers.reshape(kept).expand(shape)


def _groups(old: list[int], new: list[int]) -> Iterator[tuple[int, list[int]] | None]:
    """How one shape becomes another: so many axes, then the sizes they become; None if that is unclear."""
    i = j = 0
    while i < len(old) or j < len(new):
        if i == len(old) or j == len(new):  # axes of size 1 at the end
            yield len(old) - i, new[j:]
            return
        first_old, first_new = i, j
        have, want = old[i], new[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want and i < len(old):
                have *= old[i]
                i += 1
            elif j < len(new):
                want *= new[j]
                j += 1
            else:
                yield None
                return
        yield i - first_old, new[first_new:j]


def compact(numbers: Tensor) -> Tensor:
    """The same numbers, once where they are repeated along the last axis, as along channels."""
    if numbers.dim() < 2 or numbers.stride(-1) == 0 or numbers.shape[-1] == 1 or not numbers.numel():
        return numbers
    first = constant_along(numbers, -1)
    return numbers if first is None else first.clone().expand(numbers.shape)
