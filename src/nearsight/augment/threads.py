"""How many CPU threads small batches are worth."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_WORTH_THREADS = 2**23
"""Pixels and channels of a batch from which on more than one thread pays (2,700 images of 32×32, 56 of 224×224)."""


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for torch, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(images: Tensor) -> AbstractContextManager[None]:
    """One thread while a small batch is augmented on a CPU, and as many as before afterwards.

    An augmentation is hundreds of operations of some microseconds each. Shared out among threads they are no faster on
    an idle machine, and on a busy one every operation waits until its last thread gets a core: 50 times slower,
    measured on 2 cores.
    """
    is_small = images.device.type == "cpu" and images.numel() < _WORTH_THREADS
    return one_thread() if is_small and torch.get_num_threads() > 1 else nullcontext()
