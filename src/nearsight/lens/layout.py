"""How the axes of a model's attention tensors are made of images, windows, heads and tokens.

Models put them in any order and merge them as they like: [B, H, N, d], [B·W, H, N, d] (Swin), [B, H, W, N, d] (Hiera),
[B·H, N, d]. What belongs to what follows from the places of queries and keys for two images.

Shape suffixes: L the model's leading axes, B images, W windows, H heads, N queries, M keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOVING = (
    "its tokens lie elsewhere in one image than in another; if it orders or drops them at random, switch "
    "that off, or give it their order with call=…"
)


class LayoutError(Exception):
    """The axes cannot be identified; the message says why."""


class ImagesUnclearError(LayoutError):
    """It is unclear which image is which: the model may put all of a batch into one sequence."""


@dataclass(frozen=True)
class Layout:
    """From a model's leading axes to [B, W, H]."""

    splits: tuple[tuple[int, tuple[int, ...]], ...]
    """Axes that hold several things, in the order to split them, with the sizes of those; −1 stands for the images."""
    images: int
    """Where the images are after splitting."""
    windows: tuple[int, ...]
    """The axes that are windows after splitting."""
    heads: tuple[int, ...]
    """The axes that are heads after splitting."""
    alone: bool = False
    """Whether there is one image alone, which has no axis of its own until one is put before the others."""

    def arrange(self, tensor: Tensor) -> Tensor:
        """[L..., x, y] → [B, W, H, x, y]; a view where memory allows it."""
        if self.alone:
            tensor = tensor.unsqueeze(0)
        if not self.splits and (self.images, self.windows, self.heads) == (0, (), (1,)):
            return tensor.unsqueeze(1)  # a plain ViT; this runs for every layer and batch
        for axis, sizes in self.splits:
            tensor = tensor.unflatten(axis, sizes)
        tensor = tensor.permute(self.images, *self.windows, *self.heads, -2, -1)
        lead = 1 + len(self.windows)
        num_windows, num_heads = tensor.shape[1:lead].numel(), tensor.shape[lead:-2].numel()
        return tensor.reshape(tensor.shape[0], num_windows, num_heads, *tensor.shape[-2:])

    def num_heads(self, shape: Sequence[int]) -> int:
        """Of a tensor of this shape, [L..., x, y]."""
        return int(self.arrange(torch.empty(tuple(shape), device="meta")).shape[2])

    def restore(self, tensor_BWHxy: Tensor, shape: Sequence[int]) -> Tensor:
        """[B, W, H, x, y] → [L..., x, y], where the model's leading axes have this shape: what `arrange` came from."""
        split = torch.empty(*[1] * self.alone, *shape, 1, 1, device="meta")
        for axis, sizes in self.splits:
            split = split.unflatten(axis, sizes)
        order = (self.images, *self.windows, *self.heads)
        tensor = tensor_BWHxy.reshape(*(split.shape[axis] for axis in order), *tensor_BWHxy.shape[-2:])
        tensor = tensor.permute(*(order.index(axis) for axis in range(len(order))), -2, -1)
        for axis, sizes in reversed(self.splits):
            tensor = tensor.flatten(axis, axis + len(sizes) - 1)
        return tensor.squeeze(0) if self.alone else tensor


def find_layout(images_L: Tensor, places: Sequence[Tensor], *, alone: bool = False) -> Layout:
    """From what lies where for two images.

    Args:
        images_L: which of the two images each row of tokens belongs to.
        places: of queries and of keys, [L..., N] and [L..., M]: numbers that are equal where the place on the image is.
        alone: whether it is one image instead.
    """
    if alone:
        twice = [torch.stack([numbers, numbers]) for numbers in places]
        pair_L = torch.stack([torch.zeros_like(images_L), torch.ones_like(images_L)])
        return replace(find_layout(pair_L, twice), alone=True)
    axis, outer, inner = _find_images(images_L)
    splits: list[tuple[int, tuple[int, ...]]] = []
    images = axis
    if outer * inner > 1:
        splits.append((axis, (outer, -1, inner)))
        places = [numbers.unflatten(axis, (outer, 2, inner)) for numbers in places]
        images += 1
    rows = []
    for numbers in places:
        first, second = numbers.unbind(images)
        if not torch.equal(first, second):
            raise LayoutError(MOVING)
        rows.append(first)
    kinds: list[str] = []
    while (axis := len(kinds)) < rows[0].dim() - 1:
        kind, split = _classify(rows, axis)
        if split is None:
            kinds.append(kind)
            continue
        rows = [numbers.unflatten(axis, split) for numbers in rows]
        splits.append((axis if axis < images else axis + 1, split))
        images += axis < images
    others = [axis for axis in range(len(kinds) + 1) if axis != images]
    windows = tuple(axis for axis, kind in zip(others, kinds, strict=True) if kind == "window")
    heads = tuple(axis for axis, kind in zip(others, kinds, strict=True) if kind == "head")
    return Layout(tuple(splits), images, windows, heads)


def _find_images(images_L: Tensor) -> tuple[int, int, int]:
    """(axis, outer, inner): along that axis the index is made of (outer, image, inner)."""
    for axis in range(images_L.dim()):
        size = images_L.shape[axis]
        for outer in range(1, size // 2 + 1):
            if size % (2 * outer) == 0:
                inner = size // 2 // outer
                expected = torch.arange(size) // inner % 2
                expected = expected.view([-1 if other == axis else 1 for other in range(images_L.dim())])
                if torch.equal(images_L, expected.expand_as(images_L)):
                    return axis, outer, inner
    raise ImagesUnclearError("it is unclear which image its rows belong to; give it one image per call, with call=…")


def _classify(rows: Sequence[Tensor], axis: int) -> tuple[str, tuple[int, int] | None]:
    """Whether an axis is windows (places change along it) or heads; or how to split one that is both."""
    size = rows[0].shape[axis]
    slices = torch.cat([numbers.movedim(axis, 0).flatten(1) for numbers in rows], dim=1)
    seen: dict[bytes, int] = {}
    which = torch.tensor([seen.setdefault(row.tobytes(), len(seen)) for row in slices.contiguous().numpy()])
    num_windows = len(seen)
    if num_windows == 1:
        return "head", None
    if num_windows == size:
        return "window", None
    num_heads, rest = divmod(size, num_windows)
    if not rest:
        by_window = which.view(num_windows, num_heads)
        if torch.equal(by_window, by_window[:, :1].expand_as(by_window)):
            return "both", (num_windows, num_heads)
        by_head = which.view(num_heads, num_windows)
        if torch.equal(by_head, by_head[:1].expand_as(by_head)):
            return "both", (num_heads, num_windows)
    raise LayoutError("its windows repeat in no regular order")
