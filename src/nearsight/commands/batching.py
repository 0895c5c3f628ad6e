"""How many images go through a model at once: as many as its memory takes, found by trying one and two."""

from collections.abc import Callable
from typing import TypeVar

import torch

from nearsight.errors import InputError

T = TypeVar("T")

MOST = 512
SHARE_OF_FREE_MEMORY = 0.8
"""The rest is for what the allocator cannot use, and for others on the same device."""
PIXELS_ON_A_CPU = 32 * 224 * 224
"""More at once is not faster there, and its memory is the computer's own."""
MOST_ON_A_CPU = 256


def find_batch_size(run: Callable[[int], object], image_size: tuple[int, int], device: torch.device) -> int:
    """The batch size for images of this size. `run` measures so many images; on a GPU it is called with 1 and 2."""
    if device.type != "cuda":
        rows, columns = image_size
        return max(1, min(MOST_ON_A_CPU, PIXELS_ON_A_CPU // (rows * columns)))
    try:
        one, two = (_peak_bytes(run, num_images, device) for num_images in (1, 2))
    except torch.OutOfMemoryError:
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return batch_size_for(one, two, free + torch.cuda.memory_reserved(device))


def batch_size_for(one: int, two: int, available: int) -> int:
    """From the peak memory of one and of two images: their difference is an image, what is left is the model."""
    image = max(two - one, 1)
    model = max(one - image, 0)
    return max(1, min(MOST, int(SHARE_OF_FREE_MEMORY * available - model) // image))


def _peak_bytes(run: Callable[[int], object], num_images: int, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    run(num_images)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def within_memory(run: Callable[[int], T], batch_size: int, *, may_shrink: bool) -> T:
    """What `run` gives; where a batch does not fit into memory, it starts again with half of it."""
    while True:
        try:
            return run(batch_size)
        except torch.OutOfMemoryError as error:
            if not may_shrink:
                raise InputError(
                    f"a batch of {batch_size} images does not fit into memory; use a smaller --batch-size, or auto"
                ) from error
            if batch_size == 1:
                raise InputError(
                    "one image does not fit into memory; use --device cpu or a smaller --image-size"
                ) from error
        torch.cuda.empty_cache()  # after the handler: the error keeps the failed batch alive
        batch_size //= 2
