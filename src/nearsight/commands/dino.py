"""`nearsight train` of the recipes that pretrain by DINO, in one process or several (torchrun)."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nearsight.commands.options import Common, parse, stoppable
from nearsight.commands.progress import EpochProgress
from nearsight.train import Stop
from nearsight.train.dino import DinoConfig, DinoListener, DinoRow, pretrain
from nearsight.train.dino.recipes import PRETRAININGS
from nearsight.train.processes import TIMEOUT, Processes, together


class DinoProgress(EpochProgress, DinoListener):
    """Shows one run; use it as a context manager. A silent one is for all processes but the first."""

    def started(self, config: DinoConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._begin(config.protocol.epochs, epochs_done, steps_per_epoch)

    def epoch(self, config: DinoConfig, row: DinoRow) -> None:
        status = f"loss {row.loss:.3f}, {row.information:.2f} nats, {row.prototypes_used:.0f} prototypes in use"
        self._end_epoch(row.epoch, status, row.seconds)

    def collapsed(self, row: DinoRow) -> None:
        self._say(f"warning: in epoch {row.epoch} the teacher gave all images the same output; the run has collapsed")


@dataclass(frozen=True, kw_only=True)
class DinoOptions(Common, DinoConfig):
    """A pretraining run, and where and how it is done."""

    checkpoint_every: int = 1
    """Epochs between checkpoints; a kill costs those since the last one, SIGINT and SIGTERM cost none."""
    timeout: float = TIMEOUT
    """Seconds that one of several processes (torchrun) waits for the others before they count as lost."""
    out: Path | None = None
    """Run folder; runs/… by default."""

    @property
    def config(self) -> DinoConfig:
        return DinoConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(DinoConfig)})


def main(name: str, arguments: Sequence[str]) -> int:
    recipe = PRETRAININGS[name]
    start = recipe()
    defaults = DinoOptions(**{field.name: getattr(start, field.name) for field in dataclasses.fields(DinoConfig)})
    options = parse(
        DinoOptions,
        arguments,
        prog=f"nearsight train {name}",
        default=defaults,
        description=(recipe.__doc__ or "").strip(),
    )
    out = options.out or Path("runs") / f"{name}-{options.config.identity}"
    return stoppable(lambda stop: _pretrain(options, out, stop))


def _pretrain(options: DinoOptions, out: Path, stop: Stop) -> int:
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
