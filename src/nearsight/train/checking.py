"""What can train as one stack, and in several processes."""

from collections.abc import Sequence

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
                "dropped, or teacher"
            )
        if dataset.name != config.data.name:
            raise InputError(f"the run is for {config.data.name}, but the data are {dataset.name}")


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
