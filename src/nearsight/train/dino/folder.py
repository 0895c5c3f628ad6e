"""A pretraining run on disk: a run folder with the files every run has, and a history of its own.

config.json              what was asked for
checkpoint.safetensors   where training is: student, teacher, optimiser, centre, history
history.csv              a row per epoch (derived from the checkpoint)
events.jsonl             what happened when, for people
model.safetensors        the teacher's backbone, without a classifier, when training is over
result.json              the last epoch
checksums.json           what all these files were when the run was finished, so that damage is noticed
provenance.json          code, libraries, machine, time; written last: a folder that has it is complete
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd
from torch import Tensor

from nearsight.configuration import decode
from nearsight.data import Dataset
from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train.config import SCHEMA
from nearsight.train.dino.config import DinoConfig
from nearsight.train.folder import RunFolder
from nearsight.train.integrity import CONFIG, check_owner, check_still_there, claim


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
        """Put down where the run is, in one file. What people read is made from it."""
        stored = {"schema": SCHEMA, "identity": config.identity, "history": [asdict(row) for row in rows]}
        check_still_there(self.path)
        self.write_history(rows)  # first: after the last checkpoint nobody would write it again
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
        columns = [field.name for field in fields(DinoRow)]
        frame = pd.DataFrame([asdict(row) for row in rows], columns=columns)
        write_text(self.path / "history.csv", frame.to_csv(index=False))
