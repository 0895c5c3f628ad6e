"""Work for which nobody waits, beside the work that others wait for.

Gradients of a block's weights are wanted at the end of the backward, not before the next block. With few cells their
products are small and leave most of a GPU idle, so they run on a stream of their own.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Beside:
    """A second stream of a CUDA device; elsewhere, work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[object] = []

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, once it is done: `join` before it is used."""
        if self._stream is None:
            return work()
        # What it works on must keep its memory until it is done, and is not known to the allocator to be in use.
        self._held.append(work)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Let the current stream wait for all work that was begun."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._held.clear()
