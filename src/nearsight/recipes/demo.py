"""The demo: does CutMix make attention local, on a laptop, in three minutes?"""

import dataclasses

from nearsight.augment import CutMix
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig, baseline


def demo_runs(*, seed: int = 0, epochs: int = 10, num_train: int = 5000) -> dict[str, RunConfig]:
    """A small compact ViT on the embedded set, without and with CutMix, and nothing else changed.

    Run     nearsight demo
    """
    start = dataclasses.replace(
        baseline(), max_epochs=epochs, warmup_epochs=min(2, epochs), patience=epochs, batch_size=64, lr=2e-3
    )
    without = RunConfig(
        model=ModelConfig(depth=4, width=64, num_heads=4, mlp_width=128),
        data=DataConfig(name="shapes", num_train=num_train, num_test=1000),
        protocol=start,
        seed=seed,
        num_measured=1000,
    )
    with_cutmix = dataclasses.replace(without, protocol=start.with_(CutMix(p=0.5)))
    return {"without CutMix": without, "with CutMix": with_cutmix}
