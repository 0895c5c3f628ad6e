"""Which runs train together: those of equal shapes, and as many of them as memory takes."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from nearsight.data.loading import dataset_spec
from nearsight.train.config import RunConfig

MOST_CELLS = 24
"""More in one stack are not faster: the device is busy long before."""
SHARE_OF_FREE_MEMORY = 0.5
"""The data set may take the other half, where it lives on the device."""
_NUM_COPIES = 8
"""Of the weights: themselves, their gradients, two moments, the best ones, and three while the optimiser works."""
_CGROUP = Path("/sys/fs/cgroup")


def plan_stacks(configs: Sequence[RunConfig], device: torch.device) -> list[list[int]]:
    """The positions of the runs of each stack. Stacks of one shape are of equal size, give or take one."""
    alike: dict[object, list[int]] = {}
    for position, config in enumerate(configs):
        alike.setdefault(config.stack_key, []).append(position)
    available = SHARE_OF_FREE_MEMORY * free_bytes(device) if configs else 0.0
    stacks = []
    for members in alike.values():
        most = max(1, min(MOST_CELLS, int(available // cell_bytes(configs[members[0]]))))
        num_stacks = math.ceil(len(members) / most)
        size, larger = divmod(len(members), num_stacks)
        begin = 0
        for number in range(num_stacks):
            end = begin + size + (number < larger)
            stacks.append(members[begin:end])
            begin = end
    return stacks


def cell_bytes(config: RunConfig) -> int:
    """About the memory one run takes in a stack, on the safe side: weights, optimiser, activations, images.

    What a block keeps of a token for its backward is some copies of it, its queries, keys and values (8 widths), and
    the MLP's hidden units before and after its activation; of a head, the weights of its attention where it is not
    fused. All in float32: reduced precision keeps copies in both.
    """
    model, spec = config.model, dataset_spec(config.data.name)
    side = config.data.image_size or spec.image_size
    with torch.device("meta"):
        parameters = model.build((side, side), spec.num_classes or 1000).parameters()
        num_weights = sum(parameter.numel() for parameter in parameters)
    tokens = (side // model.patch_size) ** 2 + 1
    per_block = tokens * (8 * model.width + 3 * model.mlp_width) + model.num_heads * tokens**2
    num_pixel_values = 8 * 3 * side**2  # as drawn, moved, mixed and normalised, and indices of those that move
    per_image = model.depth * per_block + num_pixel_values
    return 4 * (_NUM_COPIES * num_weights + config.protocol.batch_size * per_image)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(min(_free_in_machine(), _free_in_container()))


def _free_in_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):  # neither Linux nor POSIX
        return 2**33


def _free_in_container() -> float:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return math.inf if limit == "max" else int(limit) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return math.inf


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was all that was missing. On a CPU torch has no error of its own for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
