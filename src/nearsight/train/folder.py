"""A run on disk. Every file is replaced whole, so a folder always holds a state that was true at some moment.

config.json              what was asked for; written first, never changed
checkpoint.safetensors   where training is: weights, optimiser, best weights, history
history.csv              a row per epoch (derived from the checkpoint)
events.jsonl             what happened when, for people
model.safetensors        the best weights, when training is over
heads.csv                the heads of that model
result.json              test accuracy and the like
provenance.json          code, libraries, machine, time; written last: a folder that has it is complete
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from nearsight.configuration import decode
from nearsight.errors import InputError
from nearsight.files import check_output_folder, output_folder, write_json, write_text
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train.config import SCHEMA, RunConfig

HEADS_COLUMNS = ("epoch", "layer", "layer_name", "head", "mad", "mad_std", "entropy", "entropy_std", "num_images")


@dataclass(frozen=True, kw_only=True)
class HistoryRow:
    """One line of history.csv. Epochs count from 1; accuracies are fractions."""

    epoch: int
    train_loss: float
    val_loss: float
    val_acc: float
    lr: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is, apart from its tensors."""

    history: tuple[HistoryRow, ...] = ()

    @property
    def epochs_done(self) -> int:
        return len(self.history)

    @property
    def best(self) -> HistoryRow | None:
        """The first epoch with the highest validation accuracy."""
        return max(self.history, key=lambda row: row.val_acc, default=None)

    def is_over(self, max_epochs: int, patience: int) -> bool:
        """All epochs are done, or `patience` of them have passed without a better validation accuracy."""
        if self.best is None:
            return False
        return self.epochs_done >= max_epochs or self.epochs_done - self.best.epoch >= patience


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def heads(self) -> Path:
        return self.path / "heads.csv"

    @property
    def is_complete(self) -> bool:
        return (self.path / "provenance.json").is_file()

    def check(self, config: RunConfig) -> None:
        """Refuse a folder that is another run's, or that no run can be written to; nothing is changed."""
        check_output_folder(self.path)
        if (self.path / "config.json").exists():
            held = self.read_config()
            if held.identity != config.identity:
                raise InputError(
                    f"{self.path} holds another run ({held.identity}, not {config.identity}): choose another --out, "
                    "or repeat the settings in its config.json to continue it"
                )
        elif any(self.path.glob("*.safetensors")):
            raise InputError(f"{self.path} holds weights but no config.json; choose another --out")

    def claim(self, config: RunConfig) -> None:
        """Make the folder this run's, or find that it already is."""
        self.check(config)
        output_folder(self.path)
        for remains in self.path.glob(".*.tmp*"):  # of a write that was killed
            remains.unlink(missing_ok=True)
        if not (self.path / "config.json").exists():
            write_json(self.path / "config.json", config.to_json())

    def read_config(self) -> RunConfig:
        path = self.path / "config.json"
        return RunConfig.from_json(self._read_json(path), str(path))

    def read_result(self) -> dict[str, Any]:
        return self._read_json(self.path / "result.json")

    def read_provenance(self) -> dict[str, Any]:
        return self._read_json(self.path / "provenance.json")

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(f"{self.path} is not a complete run folder: {path.name} is missing") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"{path} is damaged: it does not hold an object")
        return value

    def write_checkpoint(self, progress: Progress, tensors: dict[str, Tensor], config: RunConfig) -> None:
        history = [asdict(row) for row in progress.history]
        save_tensors(self.checkpoint, tensors, {"schema": SCHEMA, "identity": config.identity, "history": history})
        self.write_history(progress.history)

    def read_checkpoint(self, config: RunConfig) -> tuple[Progress, dict[str, Tensor]] | None:
        """Where the run is, or None if it has not finished an epoch."""
        if not self.checkpoint.exists():
            return None
        tensors, stored = load_tensors(self.checkpoint)
        if stored.get("schema", 0) > SCHEMA:
            raise InputError(
                f"{self.checkpoint} has schema {stored['schema']}, but this nearsight reads up to {SCHEMA}"
            )
        if stored.get("identity") != config.identity:
            raise InputError(f"{self.checkpoint} belongs to run {stored.get('identity')}, not {config.identity}")
        rows = tuple(decode(HistoryRow, row, f"{self.checkpoint} history") for row in stored["history"])
        return Progress(history=rows), tensors

    def write_history(self, rows: Sequence[HistoryRow]) -> None:
        columns = [field.name for field in fields(HistoryRow)]
        write_text(
            self.path / "history.csv", pd.DataFrame([asdict(row) for row in rows], columns=columns).to_csv(index=False)
        )

    def log(self, event: str, **details: Any) -> None:
        """Append to events.jsonl. A line that a crash cut short is closed first, so that every line stays readable."""
        path = self.path / "events.jsonl"
        with path.open("a+b") as file:
            if file.tell() > 0:
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            file.write(json.dumps({"time": stamp, "event": event, **details}).encode() + b"\n")


def write_heads(path: Path, frame: pd.DataFrame, epoch: int) -> None:
    """heads.csv of a model after so many epochs, from a frame as `HeadTable.to_frame` gives it."""
    write_text(path, frame.assign(epoch=epoch)[list(HEADS_COLUMNS)].to_csv(index=False))
