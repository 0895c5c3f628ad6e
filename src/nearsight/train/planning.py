"""Which runs can train as one stack, and how many of them memory takes."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from nearsight.augment import ResizedCrop, TileShuffle
from nearsight.data import Dataset
from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.train.config import RunConfig
from nearsight.train.processes import Processes

MOST_CELLS = 24
"""More in one stack are not faster: the device is busy long before."""
_MOST_ON_CPU = 8
"""24 compact ViTs train at about half the rate of 8 there (two cores: 57 to 73 images/s, and 114)."""
SHARE_OF_FREE_MEMORY = 0.5
"""The data set may take the other half, where it lives on the device."""
_NUM_COPIES = 8
"""Of the weights: themselves, their gradients, two moments, the best ones, and three while the optimiser works."""
_CGROUP = Path("/sys/fs/cgroup")


def num_slots(config: RunConfig, device: torch.device, most: int = MOST_CELLS) -> int:
    """How many runs of this kind train at once: what memory takes, and no more than pay, or than `most`."""
    pays = _MOST_ON_CPU if device.type == "cpu" else MOST_CELLS
    available = SHARE_OF_FREE_MEMORY * free_bytes(device)
    return max(1, min(most, pays, int(available // cell_bytes(config))))


def cell_bytes(config: RunConfig) -> int:
    """About the memory one run takes in a stack, on the safe side: weights, optimiser, activations, images.

    All in float32: reduced precision keeps copies in both.
    """
    spec = dataset_spec(config.data.name)
    side = config.data.image_size or spec.image_size
    with torch.device("meta"):
        model = config.model.build((side, side), spec.num_classes or 1000)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    kept = _kept_by_blocks(config.model, side) if config.model.kind == "compact" else _kept_values(model, side)
    num_pixel_values = 8 * 3 * side**2  # as drawn, moved, mixed and normalised, and indices of those that move
    protocol = config.protocol
    num_copies = _NUM_COPIES + (protocol.ema > 0) + (protocol.accumulate > 1)  # and the gradients of the parts so far
    at_once = -(-protocol.batch_size // protocol.accumulate)
    return 4 * (num_copies * num_weights + at_once * kept + protocol.batch_size * num_pixel_values)


def _kept_by_blocks(model: ModelConfig, side: int) -> int:
    """Values that a ViT keeps of an image for its backward.

    Of a token, a block keeps some copies of it, its queries, keys and values (8 widths in all), and the MLP's hidden
    units before and after its activation; of a head, the weights of its attention where it is not fused.
    """
    tokens = (side // model.patch_size) ** 2 + 1
    inner = model.width if model.head_size is None else model.num_heads * model.head_size
    per_block = tokens * (4 * model.width + 4 * inner + 3 * model.mlp_width) + model.num_heads * tokens**2
    return model.depth * per_block


def _kept_values(model: nn.Module, side: int) -> int:
    """Values that a model without memory keeps of an image for its backward, by what its operations say they keep."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes() // tensor.element_size()
        return tensor

    num_images = 2  # of one alone, a batch norm may have nothing to take the mean of
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(torch.empty(num_images, 3, side, side, device="meta"))
    assert output.requires_grad  # and so alive until here: a storage that is gone may share its number with another
    return sum(kept.values()) // num_images


def free_bytes(device: torch.device) -> int:
    """Unused memory of the device."""
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


def check_stackable(configs: Sequence[RunConfig], dataset: Dataset) -> None:
    """Cells of a stack share shapes; what may differ is in the optimiser, the augmentations and the seed."""
    for config in configs:
        if config.stack_key != configs[0].stack_key:
            raise InputError(
                "cells of one stack differ in model shape, data, precision, batch size or its parts, betas, whether "
                "paths or numbers are dropped, parameters learn at rates of their own or are averaged, teacher, or the "
                "order, policy or size of augmentations"
            )
        if dataset.name != config.data.name:
            raise InputError(f"the run is for {config.data.name}, but the data are {dataset.name}")


def check_sizes(configs: Sequence[RunConfig], image_size: tuple[int, int]) -> None:
    """Whether augmentations that have a size go with the images, and with what the model takes."""
    side, shown = min(image_size), "×".join(map(str, image_size))
    for config in configs:
        fixed = config.model.kind != "resnet" or config.model.shuffled_tiles > 1  # convolutions take any size
        for augmentation in config.protocol.augment:
            match augmentation:
                case TileShuffle(tile=tile) if tile > side:
                    raise InputError(
                        f"tileshuffle.tile is {tile}, but images of {shown} pixels have no such tile; choose at most "
                        f"{side}"
                    )
                case ResizedCrop(size=size) if size and (fixed or config.data.stream) and image_size != (size, size):
                    raise InputError(
                        f"resizedcrop.size is {size}, but the model takes images of {shown} pixels; leave it at 0, "
                        "which keeps their size, or choose another --data.image-size"
                    )


def check_shareable(config: RunConfig, processes: Processes, *, has_statistics: bool, num_validation: int) -> None:
    """Whether several processes can train this; that they can share a batch, `Share` knows."""
    if has_statistics:
        raise InputError(
            f"{config.model.name} has batch norms, whose means are those of a whole batch, but {processes.num} "
            "processes would each take their own; train it in one"
        )
    if num_validation < processes.num:
        raise InputError(
            f"{processes.num} processes cannot share {num_validation} validation images; start fewer, or choose a "
            "larger --data.validation-fraction"
        )
