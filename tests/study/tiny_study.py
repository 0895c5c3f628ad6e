"""A study of seconds, for tests; as a program it runs that study in the folder given to it."""

import dataclasses
import sys
import time
from pathlib import Path

from nearsight.augment import CutMix
from nearsight.models import ModelConfig
from nearsight.study import OFF, Study, StudyListener, run_study
from nearsight.train import DataConfig, RunConfig, RunFolder, baseline

FACTORS = {"cutmix": (OFF, CutMix(p=0.5)), "smoothing": (0.0, 0.1)}


def tiny_base(epochs: int = 2) -> RunConfig:
    protocol = dataclasses.replace(
        baseline(), max_epochs=epochs, patience=epochs, warmup_epochs=1, batch_size=32, lr=2e-3
    )
    return RunConfig(
        model=ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=120, num_test=20),
        protocol=protocol,
        num_measured=20,
        measure_every=1,
        num_measured_during=10,
    )


def tiny_study(*, seeds: int = 2, epochs: int = 2) -> Study:
    return Study(tiny_base(epochs), factors=FACTORS, seeds=seeds, name="tiny", ends=("Baseline", "Modern"))


def unmeasured(*, seeds: int, epochs: int) -> Study:
    """The same, quicker: heads are measured at the end alone."""
    return dataclasses.replace(
        tiny_study(seeds=seeds), base=dataclasses.replace(tiny_base(epochs), measure_every=0), name="unmeasured"
    )


class Saying(StudyListener):
    """Says what is done."""

    def finished(self, config: RunConfig, folder: RunFolder) -> None:
        print(config.identity)


if __name__ == "__main__":
    place, num_seeds, num_epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print("ready", flush=True)
    while not place.exists():  # so that several begin together
        time.sleep(0.01)
    run_study(unmeasured(seeds=num_seeds, epochs=num_epochs), place, listener=Saying(), cells_per_stack=2)
