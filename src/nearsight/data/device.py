"""Images where the model is: whole on the device when they fit, otherwise copied batch by batch while it computes.

Both ways give the same bytes. While the device works on a batch, the host gathers the next one into pinned memory and
a side stream copies it.

Shape suffixes: N images of the set, K cells, B samples of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.data.dataset import ImageSet
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_SHARE_OF_FREE_MEMORY = 0.5
_NUM_BUFFERS = 2


def fits(num_bytes: int, device: torch.device, max_bytes: int | None = None) -> bool:
    """Whether images of this size may stay on the device. Activations need room, so half of what is free is left."""
    if max_bytes is not None:
        return num_bytes <= max_bytes
    if device.type != "cuda":
        return True  # the images are in main memory already
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes <= free * _SHARE_OF_FREE_MEMORY


@dataclass(frozen=True)
class _Buffer:
    """Pinned memory for one batch."""

    images: Tensor
    """[B, C, H, W] or more"""
    labels: Tensor
    """[B] or more"""
    copied: torch.cuda.Event
    """When the last copy out of it is done, and it may be written to."""


@dataclass(frozen=True)
class _Staged:
    """A batch on its way to the device."""

    images: Tensor
    """[..., C, H, W]"""
    labels: Tensor
    """[...]"""
    copied: torch.cuda.Event
    """When it has arrived."""


class DeviceImages:
    """An image set as a training loop needs it: for positions it gives uint8 images and labels on the device."""

    def __init__(self, image_set: ImageSet, device: torch.device | str, *, max_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        self.host_labels_N = image_set.labels_N
        self.labels_N = image_set.labels_N.to(self.device)
        self.resident = fits(image_set.images_NCHW.nbytes, self.device, max_bytes)
        self.images_NCHW = image_set.images_NCHW.to(self.device) if self.resident else image_set.images_NCHW

    def __len__(self) -> int:
        return len(self.labels_N)

    def gather(self, index: Tensor) -> Tensor:
        """Images [..., C, H, W] at positions [...], such as [K, B]. A set that does not fit is better `stream`ed."""
        flat = index.to(self.images_NCHW.device).flatten()
        return self.images_NCHW.index_select(0, flat).to(self.device).view(*index.shape, *self.images_NCHW.shape[1:])

    def labels(self, index: Tensor) -> Tensor:
        """Labels [...] at positions [...]."""
        return self.labels_N[index.to(self.device)]

    def positions(self, index: Tensor) -> Tensor:
        """Positions where `stream` wants them: moved once here, not batch by batch, each with a wait for the device."""
        return index.to(self.images_NCHW.device)

    def stream(self, index_batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch of positions, in order."""
        if self.resident or self.device.type != "cuda":
            for index in index_batches:
                yield self.gather(index), self.labels(index)
        else:
            yield from self._stream_pinned(index_batches)

    def _stream_pinned(self, index_batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """One batch ahead, in two pinned buffers, on a stream of its own.

        No thread is needed for that: the device works asynchronously, so the host gathers the next batch meanwhile.
        (A thread was tried on an H200: handing batches over halved the rate.)
        """
        side = torch.cuda.Stream(self.device)
        buffers: deque[_Buffer] = deque()
        ahead: _Staged | None = None
        for index in index_batches:
            staged = self._stage(index.cpu(), buffers, side)
            if ahead is not None:
                yield self._receive(ahead)
            ahead = staged
        if ahead is not None:
            yield self._receive(ahead)

    def _stage(self, index: Tensor, buffers: deque[_Buffer], side: torch.cuda.Stream) -> _Staged:
        """Gather a batch into pinned memory and start its copy to the device."""
        buffer = buffers.popleft() if len(buffers) == _NUM_BUFFERS else None
        if buffer is None or len(buffer.labels) < index.numel():
            buffer = _Buffer(
                self.images_NCHW.new_empty(index.numel(), *self.images_NCHW.shape[1:], pin_memory=True),
                self.host_labels_N.new_empty(index.numel(), pin_memory=True),
                torch.cuda.Event(),
            )
        buffer.copied.synchronize()
        images, labels = buffer.images[: index.numel()], buffer.labels[: index.numel()]
        torch.index_select(self.images_NCHW, 0, index.flatten(), out=images)
        torch.index_select(self.host_labels_N, 0, index.flatten(), out=labels)
        copied = torch.cuda.Event()  # a new one: the receiver may still have to wait for the buffer's last
        with torch.cuda.stream(side):
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in (images, labels))
            copied.record(side)
        buffers.append(_Buffer(buffer.images, buffer.labels, copied))
        return _Staged(images.view(*index.shape, *images.shape[1:]), labels.view(index.shape), copied)

    def _receive(self, staged: _Staged) -> tuple[Tensor, Tensor]:
        """Make the caller's stream wait for the copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(staged.copied)
        for tensor in (staged.images, staged.labels):
            # It was allocated on the side stream: its memory must not be handed out again while the caller uses it.
            tensor.record_stream(current)
        return staged.images, staged.labels
