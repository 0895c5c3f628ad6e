"""Progress of pretraining on standard error: a bar on a terminal, plain lines elsewhere."""

from nearsight.commands.progress import EpochProgress
from nearsight.train.dino import DinoConfig, DinoListener, DinoRow


class DinoProgress(EpochProgress, DinoListener):
    """Shows one run; use it as a context manager. A silent one is for all processes but the first."""

    def started(self, config: DinoConfig, epochs_done: int, steps_per_epoch: int) -> None:
        self._begin(config.protocol.epochs, epochs_done, steps_per_epoch)

    def epoch(self, config: DinoConfig, row: DinoRow) -> None:
        status = f"loss {row.loss:.3f}, {row.information:.2f} nats, {row.prototypes_used:.0f} prototypes in use"
        self._end_epoch(row.epoch, status, row.seconds)

    def collapsed(self, row: DinoRow) -> None:
        self._say(f"warning: in epoch {row.epoch} the teacher said the same of all images; the run has collapsed")
