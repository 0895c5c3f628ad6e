"""What `nearsight train` does for the recipes that pretrain by DINO, in one process or several (torchrun)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nearsight.commands.progress import EpochProgress
from nearsight.train import Stop
from nearsight.train.dino import DinoConfig, DinoListener, DinoRow, pretrain
from nearsight.train.processes import Processes, together

if TYPE_CHECKING:
    from nearsight.commands.train import DinoOptions


class DinoProgress(EpochProgress, DinoListener):
    """Shows one run; use it as a context manager. A silent one is for all processes but the first."""

    def started(self, config: DinoConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._begin(config.protocol.epochs, epochs_done, steps_per_epoch)

    def epoch(self, config: DinoConfig, row: DinoRow) -> None:
        status = f"loss {row.loss:.3f}, {row.information:.2f} nats, {row.prototypes_used:.0f} prototypes in use"
        self._end_epoch(row.epoch, status, row.seconds)

    def collapsed(self, row: DinoRow) -> None:
        self._say(f"warning: in epoch {row.epoch} the teacher gave all images the same output; the run has collapsed")


def pretrain_shown(options: DinoOptions, out: Path, stop: Stop) -> int:
    """Train by the options and print what came of it: the exit code."""
    with together(options.torch_device, timeout=options.timeout) as device:
        is_first = Processes.joined().is_first
        with DinoProgress(out.name, silent=not is_first) as progress:
            folder = pretrain(
                options.config,
                out,
                device=device,
                data_dir=options.data_dir,
                listener=progress,
                stop=stop,
                checkpoint_every=options.checkpoint_every,
            )
    if not is_first:
        return 0
    folder.run.check_there()
    result = folder.run.read_result()
    if options.json:
        print(json.dumps({"folder": str(folder.path), **result}))
    else:
        print(
            f"{folder.path}: loss {result['loss']:.3f} after {result['epochs']} epochs, "
            f"{result['prototypes_used']:.0f} prototypes in use; "
            f"nearsight probe knn {folder.path} says what it is worth"
        )
    return 0
