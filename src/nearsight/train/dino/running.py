"""Pretraining runs from start to finish. Killed at any moment, a run continues from its last checkpoint and gives the
numbers it would have given.

Its folder is a run folder with the files every run has, and a history of its own:

config.json              what was asked for
checkpoint.safetensors   where training is: student, teacher, optimiser, centre, history
history.csv              a row per epoch (derived from the checkpoint)
events.jsonl             what happened when, for people
model.safetensors        the teacher's backbone, without a classifier, when training is over
result.json              the last epoch
checksums.json           what all these files were when the run was finished, so that damage is noticed
provenance.json          code, libraries, machine, time; written last: a folder that has it is complete
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from nearsight.configuration import decode
from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError, check_at_least
from nearsight.files import write_json
from nearsight.models import save_model
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train.config import SCHEMA
from nearsight.train.dino.config import DinoConfig
from nearsight.train.dino.training import DinoTraining
from nearsight.train.folder import RunFolder, write_rows
from nearsight.train.integrity import CONFIG, check_finished, check_owner, check_still_there, claim, provenance
from nearsight.train.processes import Processes
from nearsight.train.stopping import Stop, StoppedError, TrainingError, divergence, way_out_of_divergence

COLLAPSED_BELOW = 0.01
"""Mutual information of the teacher's output and the image, in nats, below which the teacher gives all images the same
output: one prototype, or all prototypes equally."""


@dataclass(frozen=True, kw_only=True)
class DinoRow:
    """One line of history.csv; epochs count from 1, entropies are in nats."""

    epoch: int
    loss: float
    lr: float
    weight_decay: float
    momentum: float
    teacher_entropy: float
    prototypes_used: float
    information: float
    centre_norm: float
    seconds: float


class DinoFolder:
    """The files of one pretraining run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunFolder(path)
        """The same folder, for what all runs have in common."""

    def check(self, config: DinoConfig) -> None:
        """Refuse a folder that is another run's, or that no run can be written to; nothing is changed."""
        check_owner(self.path, config.identity, self._held)

    def claim(self, config: DinoConfig, dataset: Dataset | None = None) -> None:
        """Make the folder this run's, on these images if they are known, or find that it already is."""
        self.check(config)
        claim(self.path, config.to_json(), dataset)

    def _held(self) -> str | None:
        found = self.run.held()
        if self.run.is_pretraining and found != self.read_config().identity:
            raise InputError(
                f"{self.path} was begun by another version of nearsight, or its {CONFIG} was changed since; "
                "choose another --out"
            )
        return found

    def read_config(self) -> DinoConfig:
        settings, path = self.run.read_settings(), self.path / CONFIG
        parts = {"schema": int, "config": dict, "dino": dict}
        if not all(isinstance(settings.get(name), kind) for name, kind in parts.items()):
            raise InputError(f"{path} is not the config of a DINO run")
        return DinoConfig.from_json(settings, str(path))

    def write_checkpoint(self, rows: Sequence[DinoRow], state: dict[str, Tensor], config: DinoConfig) -> None:
        """Write the state of the run to one file. The files for people are made from it."""
        stored = {"schema": SCHEMA, "identity": config.identity, "history": [asdict(row) for row in rows]}
        check_still_there(self.path)
        self.write_history(rows)  # first: after the last checkpoint it is not written again
        save_tensors(self.run.checkpoint, state, stored)

    def read_checkpoint(self, config: DinoConfig) -> tuple[tuple[DinoRow, ...], dict[str, Tensor]] | None:
        """Where the run is, or None if it has not finished an epoch."""
        if not self.run.checkpoint.exists():
            return None
        tensors, stored = load_tensors(self.run.checkpoint)
        if stored.get("identity") != config.identity:
            raise InputError(f"{self.run.checkpoint} belongs to run {stored.get('identity')}, not {config.identity}")
        where = f"{self.run.checkpoint} history"
        return tuple(decode(DinoRow, row, where) for row in stored["history"]), tensors

    def write_history(self, rows: Sequence[DinoRow]) -> None:
        write_rows(self.path / "history.csv", DinoRow, rows)


class DinoListener:
    """Its methods are called while a run trains; by default they do nothing."""

    def started(self, config: DinoConfig, epochs_done: int, steps_per_epoch: int) -> None: ...

    def step(self, step: int) -> None: ...

    def epoch(self, config: DinoConfig, row: DinoRow) -> None: ...

    def collapsed(self, row: DinoRow) -> None:
        """The teacher gives all images the same output."""


def pretrain(
    config: DinoConfig,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    listener: DinoListener | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
) -> DinoFolder:
    """Pretrain in the folder `path`, or finish what is missing there.

    Of several processes (torchrun) each calls this; the first one reads and writes the folder.

    Args:
        stop: checked after every step. If a stop is requested, the last whole epoch is put on disk and `StoppedError`
            raised.
        checkpoint_every: epochs between checkpoints. A kill costs the epochs since the last one.
    """
    check_at_least("checkpoint_every", checkpoint_every, 1)
    folder = DinoFolder(path)

    def load() -> Dataset:
        return load_dataset(**asdict(config.data), data_dir=data_dir)

    def is_complete() -> bool:
        folder.check(config)
        if folder.run.is_complete:
            check_finished(path, config.data.name, load)
        return folder.run.is_complete

    if not Processes.joined().from_first(is_complete):
        run = _Run(config, folder, load(), torch.device(device), listener or DinoListener(), stop or Stop())
        run.train(checkpoint_every)
    return folder


class _Run:
    """One run and where it is."""

    def __init__(
        self,
        config: DinoConfig,
        folder: DinoFolder,
        dataset: Dataset,
        device: torch.device,
        listener: DinoListener,
        stop: Stop,
    ) -> None:
        self._config, self._folder, self._dataset, self._device = config, folder, dataset, device
        self._listener, self._stop, self._processes = listener, stop, Processes.joined()
        self._training = DinoTraining(config, dataset, device, self._processes)
        self._rows: tuple[DinoRow, ...] = ()
        self._unsaved: dict[str, Tensor] | None = None
        """The state after the last whole epoch, if it is not on disk: training itself goes on."""

    def train(self, checkpoint_every: int) -> None:
        self._resume()
        self._listener.started(self._config, len(self._rows), self._training.steps_per_epoch)
        self._log("started", epochs_done=len(self._rows), device=str(self._device))
        # Until everything is saved: a request that comes meanwhile must not cut that short.
        with self._stop.listening():
            try:
                while len(self._rows) < self._config.protocol.epochs:
                    self._run_epoch()
                    if len(self._rows) % checkpoint_every == 0 or len(self._rows) == self._config.protocol.epochs:
                        self._save()
            except Exception as error:
                self._save()
                if isinstance(error, StoppedError):
                    self._log("stopped", by=error.by, epochs_done=len(self._rows))
                    # The end of one process may be taken for a failure, and end the first while it writes.
                    self._processes.heard(None)
                raise
        if self._processes.is_first:
            self._finish()

    def _resume(self) -> None:
        """Go where the checkpoint says the run was, which only the first process has to see."""

        def claimed() -> tuple[tuple[DinoRow, ...], dict[str, Tensor]] | None:
            self._folder.claim(self._config, self._dataset)
            return self._folder.read_checkpoint(self._config)

        stored = self._processes.from_first(claimed)
        if stored is None:
            return
        self._rows, state = stored
        try:
            self._training.load_state(state)
        except (KeyError, RuntimeError) as error:
            raise InputError(f"{self._folder.run.checkpoint} does not fit the run's model: {error}") from error

    def _run_epoch(self) -> None:
        self._check_stop()
        began = time.perf_counter()
        result = self._training.run_epoch(len(self._rows), self._on_step)
        row = DinoRow(epoch=len(self._rows) + 1, **asdict(result), seconds=time.perf_counter() - began)
        if not math.isfinite(row.loss):
            self._log("diverged", epoch=row.epoch, loss=str(row.loss))
            happened = divergence(self._folder.path, row.loss, row.epoch)
            raise TrainingError(f"{happened}. {way_out_of_divergence(self._config.precision)}")
        self._rows, self._unsaved = (*self._rows, row), self._training.state()
        self._log("epoch", epoch=row.epoch, loss=row.loss)
        self._listener.epoch(self._config, row)
        if row.information < COLLAPSED_BELOW:
            self._log("collapsed", epoch=row.epoch, information=row.information, prototypes_used=row.prototypes_used)
            self._listener.collapsed(row)

    def _on_step(self, step: int) -> None:
        self._listener.step(step)
        self._check_stop()

    def _check_stop(self) -> None:
        if (by := self._processes.heard(self._stop.by)) is not None:
            raise StoppedError(by, [len(self._rows)])

    def _save(self) -> None:
        if self._unsaved is not None and self._processes.is_first:
            self._folder.write_checkpoint(self._rows, self._unsaved, self._config)
        self._unsaved = None

    def _log(self, event: str, **details: object) -> None:
        if self._processes.is_first:
            self._folder.run.log(event, **details)

    def _finish(self) -> None:
        """Write all that a complete folder has beside its history; cut short anywhere, all of this is done again."""
        config, folder, last = self._config, self._folder, self._rows[-1]
        folder.write_history(self._rows)  # again, in case it was damaged
        weights = self._training.network("teacher").backbone.state_dict()
        save_model(folder.run.model, weights, config.model, self._dataset.image_size, num_classes=0)
        numbers = asdict(last)
        del numbers["epoch"], numbers["seconds"]
        result = {"identity": config.identity, "epochs": last.epoch, "best_epoch": last.epoch, **numbers}
        write_json(folder.path / "result.json", result)
        self._log("finished", loss=last.loss)
        seconds = sum(row.seconds for row in self._rows)
        num_images = last.epoch * self._training.steps_per_epoch * config.protocol.batch_size
        folder.run.finish(
            {
                **provenance(self._device),
                "processes": self._processes.num,
                "seed": config.seed,
                "identity": config.identity,
                "data_fingerprint": self._dataset.fingerprint,
                "wall_seconds": seconds,
                "images_per_second": num_images / seconds,
            }
        )
