"""Any run made small enough for a laptop's processor: it tests the path from recipe to report, and is no result."""

import dataclasses

from nearsight.train import DataConfig, RunConfig

MOST_SEEDS = 2
_HEAD_WIDTH = 4
_PATCH_SIZE = 8


def shrink(config: RunConfig) -> RunConfig:
    """The same run on a few images of the embedded set, with a narrow model, for two epochs.

    Depth and heads stay, so that tables and figures keep their form.
    """
    model, protocol = config.model, config.protocol
    width = _HEAD_WIDTH * model.num_heads
    return RunConfig(
        model=dataclasses.replace(model, patch_size=_PATCH_SIZE, width=width, mlp_width=2 * width),
        data=DataConfig(name="shapes", num_train=120, num_test=40, split_seed=config.data.split_seed),
        protocol=dataclasses.replace(protocol, batch_size=32, max_epochs=2, warmup_epochs=1, patience=2),
        seed=config.seed,
        precision="fp32",
        num_measured=20,
        measure_every=min(config.measure_every, 1),
        num_measured_during=10,
    )
