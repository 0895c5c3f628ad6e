"""What can train as one stack, and in several processes."""

from collections.abc import Sequence

from nearsight.augment import ResizedCrop, TileShuffle
from nearsight.data import Dataset
from nearsight.errors import InputError
from nearsight.train.config import RunConfig
from nearsight.train.processes import Processes


def check_alike(configs: Sequence[RunConfig], dataset: Dataset) -> None:
    """Cells of a stack share shapes; what may differ is in the optimiser, the augmentations and the seed."""
    for config in configs:
        if config.stack_key != configs[0].stack_key:
            raise InputError(
                "cells of one stack differ in model shape, data, precision, batch size, betas, whether paths are "
                "dropped, teacher, or the order, policy or size of augmentations"
            )
        if dataset.name != config.data.name:
            raise InputError(f"the run is for {config.data.name}, but the data are {dataset.name}")


def check_sizes(configs: Sequence[RunConfig], image_size: tuple[int, int]) -> None:
    """Whether augmentations that have a size go with the images, and with what the model takes."""
    side, shown = min(image_size), "×".join(map(str, image_size))
    for config in configs:
        fixed = config.model.is_transformer or config.model.shuffled_tiles > 1  # convolutions take any size
        for augmentation in config.protocol.augment:
            match augmentation:
                case TileShuffle(tile=tile) if tile > side:
                    raise InputError(
                        f"tileshuffle.tile is {tile}, but images of {shown} pixels have no such tile; choose at most "
                        f"{side}"
                    )
                case ResizedCrop(size=size) if size and fixed and image_size != (size, size):
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
