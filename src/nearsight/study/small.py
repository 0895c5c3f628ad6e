"""Any run made small enough for a laptop's processor: it tests the path from recipe to report, and is no result."""

import dataclasses

from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig

MOST_SEEDS = 2
_HEAD_WIDTH = 4
_PATCH_SIZE = 8
_CHANNELS = 8
_NUM_TRAIN = 120


def shrink(config: RunConfig) -> RunConfig:
    """The same run on a few images of the embedded set, with a narrow model, for two epochs.

    Depth and heads stay, so that tables and figures keep their form.
    """
    protocol = config.protocol
    return RunConfig(
        model=_narrow(config.model),
        data=DataConfig(
            name="shapes", num_train=_num_train(config.data), num_test=40, split_seed=config.data.split_seed
        ),
        protocol=dataclasses.replace(protocol, batch_size=32, max_epochs=2, warmup_epochs=1, patience=2),
        seed=config.seed,
        precision="fp32",
        num_measured=20,
        measure_every=min(config.measure_every, 1),
        num_measured_during=10,
    )


def _num_train(data: DataConfig) -> int:
    """Fewer where the run has fewer than its data set, so that the two stay apart."""
    return _NUM_TRAIN if data.num_train is None else _NUM_TRAIN // 2


def _narrow(model: ModelConfig) -> ModelConfig:
    if not model.is_transformer:
        return dataclasses.replace(model, channels=_CHANNELS)
    width = _HEAD_WIDTH * model.num_heads
    return dataclasses.replace(model, patch_size=_PATCH_SIZE, width=width, mlp_width=2 * width)
