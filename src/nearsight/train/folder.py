"""A run on disk. Every file is replaced whole, so a folder always holds a state that was true at some moment.

config.json              what was asked for; written first, never changed
checkpoint.safetensors   where training is: weights, optimiser, best weights, history, heads so far
history.csv              a row per epoch (derived from the checkpoint)
events.jsonl             what happened when, for people
model.safetensors        the best weights, when training is over
heads.csv                the heads of that model, and those during training if they were measured (from the checkpoint)
heads.npz                the heads of that model image by image, to compare it with others; nothing depends on it
layers.csv               what the tokens of that model's layers are like
result.json              test accuracy and the like
checksums.json           what all these files were when the run was finished, so that damage is noticed
provenance.json          code, libraries, machine, time; written last: a folder that has it is complete
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nearsight.configuration import decode
from nearsight.data import Dataset
from nearsight.errors import InputError
from nearsight.files import append_line, check_file, read_object, write_text
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train.config import SCHEMA, RunConfig
from nearsight.train.integrity import (
    CHECKSUMS,
    CONFIG,
    PROVENANCE,
    TAKEN_FROM,
    certify,
    changing,
    check_owner,
    check_still_there,
    check_sums,
    check_there,
    claim,
    way_out,
)

HEADS_COLUMNS = ("epoch", "layer", "layer_name", "head", "mad", "mad_std", "entropy", "entropy_std", "num_images")
LAYERS_COLUMNS = ("layer", "layer_name", "locality_score", "patch_cls_similarity", "num_images")
_NUMBERS = tuple(name for name in HEADS_COLUMNS if name != "layer_name")
_HEADS_PREFIX = "heads/"
_LASTING = (CONFIG, "history.csv", "heads.csv", "layers.csv", "model.safetensors", "result.json")
"""Files that stay as they are when a run is complete, and are what it gave."""


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
    heads: pd.DataFrame | None = field(default=None, compare=False)
    """The rows of heads.csv that were measured during training, by epoch; None: not one was."""

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
        self.checkpoint, self.model = path / "checkpoint.safetensors", path / "model.safetensors"
        self.heads, self.layers, self.events = path / "heads.csv", path / "layers.csv", path / "events.jsonl"
        self.heads_per_image = path / "heads.npz"

    @property
    def is_complete(self) -> bool:
        return (self.path / PROVENANCE).is_file()

    def check(self, config: RunConfig) -> None:
        """Refuse a folder that is another run's, or that no run can be written to; nothing is changed."""
        check_owner(self.path, config.identity, self.held)

    def claim(self, config: RunConfig, dataset: Dataset | None = None) -> None:
        """Make the folder this run's, on these images if they are known, or find that it already is."""
        self.check(config)
        claim(self.path, config.to_json(), dataset)
        if not self.is_complete:  # sums of an end that is now made again
            (self.path / CHECKSUMS).unlink(missing_ok=True)

    def held(self) -> str | None:
        """The identity of the run that is here, labelled or not."""
        if not self.is_pretraining:
            return self.read_config().identity
        # What `read_config` takes of it may be all that another run is.
        identity = self.read_settings().get("identity")
        return identity if isinstance(identity, str) else None

    @property
    def is_pretraining(self) -> bool:
        """Whether the run that is here learned without labels (DINO)."""
        return "dino" in self.read_settings()

    def read_config(self) -> RunConfig:
        """What was asked for; of pretraining, what it has in common with every run."""
        path = self.path / CONFIG
        return RunConfig.from_json(self._read(CONFIG), str(path))

    def read_settings(self) -> dict[str, Any]:
        """config.json as it was written, for people: pretraining has more in it than `read_config` takes."""
        return self._read(CONFIG)

    def read_result(self) -> dict[str, Any]:
        """What a complete run gave; refused if any of its files is not what was written."""
        check_sums(self.path)
        return self._read("result.json")

    def check_there(self, *names: str) -> None:
        """Refuse a complete run that has lost a file it was finished with: one of these names, or any."""
        check_there(self.path, *names)

    def check_weights(self) -> None:
        """Refuse a run that never had weights here; damaged ones are found when they are read."""
        if self.is_complete and not self.model.exists() and (study := self.read_provenance().get(TAKEN_FROM)):
            raise InputError(
                f"{self.path} has no weights: the run was taken from the tables of study {study!r}, which have none; "
                "move it away, and the study's command without --reuse trains it"
            )

    def read_provenance(self) -> dict[str, Any]:
        return self._read(PROVENANCE)

    def _read(self, name: str) -> dict[str, Any]:
        path, advice = self.path / name, ""
        if path.exists():  # a folder that never was a run needs none
            elsewhere = f"; move {self.path} away, or train the run in another folder"
            advice = elsewhere if name == CONFIG else way_out(self.path)
        return read_object(path, missing=f"{self.path} is not a complete run folder", way_out=advice)

    def finish(self, provenance: Mapping[str, Any]) -> None:
        """After everything else: with this, the folder is complete."""
        certify(self.path, _LASTING, provenance)

    def write_checkpoint(self, progress: Progress, tensors: dict[str, Tensor], config: RunConfig) -> None:
        """Write the state of the run to one file. The files for people are made from it."""
        stored: dict[str, Any] = {"schema": SCHEMA, "identity": config.identity}
        stored["history"] = [asdict(row) for row in progress.history]
        if progress.heads is not None:
            stored["layer_names"] = _layer_names(progress.heads)
            tensors = tensors | _as_tensors(progress.heads)
        check_still_there(self.path)
        self.write_history(progress.history)  # first: after the last checkpoint it is not written again
        save_tensors(self.checkpoint, tensors, stored)

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
        heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HEADS_PREFIX)}
        frame = _as_frame(heads, stored["layer_names"]) if heads else None
        return Progress(history=rows, heads=frame), tensors

    def write_history(self, rows: Sequence[HistoryRow]) -> None:
        write_rows(self.path / "history.csv", HistoryRow, rows)

    def write_heads_so_far(self, rows: pd.DataFrame) -> None:
        """heads.csv of a run that is not over."""
        write_text(self.heads, rows.to_csv(index=False), lasting=False)  # the checkpoint has them

    def read_heads(self) -> pd.DataFrame | None:
        """The rows of heads.csv as they are written, digit for digit; None where there are none that can be read."""
        try:
            check_file(self.heads)
            return pd.read_csv(self.heads, dtype=str, keep_default_na=False)[list(HEADS_COLUMNS)].astype({"epoch": int})
        except (OSError, KeyError, ValueError, OverflowError):  # pandas' own errors are ValueErrors
            return None

    def log(self, event: str, **details: Any) -> None:
        """Append to events.jsonl."""
        stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
        append_line(self.events, json.dumps({"time": stamp, "event": event, **details}))


def write_rows(path: Path, kind: type[Any], rows: Sequence[Any]) -> None:
    """A table of dataclasses of this kind, a column per field."""
    frame = pd.DataFrame([asdict(row) for row in rows], columns=[field.name for field in fields(kind)])
    write_text(path, frame.to_csv(index=False))


def write_heads(path: Path, frame: pd.DataFrame, epoch: int, *, others: pd.DataFrame | None = None) -> None:
    """heads.csv of a model after so many epochs, from a frame as `HeadTable.to_frame` gives it.

    `others` are rows of the file that were measured at other epochs; those of this epoch are replaced.
    """
    frame = frame.assign(epoch=epoch)[list(HEADS_COLUMNS)]
    if others is not None:
        kept = others.loc[others["epoch"] != epoch, list(HEADS_COLUMNS)]
        frame = pd.concat([kept, frame]).sort_values("epoch", kind="stable")
    with changing(path):
        write_text(path, frame.to_csv(index=False))


def _layer_names(heads: pd.DataFrame) -> list[str]:
    return list(heads.drop_duplicates("layer").sort_values("layer")["layer_name"])


def _as_tensors(heads: pd.DataFrame) -> dict[str, Tensor]:
    """Numbers as they are, so that no digit is lost, and small: there may be a measurement after every epoch."""
    return {f"{_HEADS_PREFIX}{name}": torch.tensor(heads[name].to_numpy()) for name in _NUMBERS}


def _as_frame(tensors: Mapping[str, Tensor], layer_names: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame({name: tensors[f"{_HEADS_PREFIX}{name}"].numpy() for name in _NUMBERS})
    return frame.assign(layer_name=[layer_names[layer] for layer in frame["layer"]])[list(HEADS_COLUMNS)]


class FolderElsewhere(RunFolder):
    """A folder that another process reads and writes; it may even lie on another machine. Here nothing is done."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_finished = False
        """Whether the other process has said that it is complete."""

    @property
    def is_complete(self) -> bool:
        return self.is_finished

    def claim(self, config: RunConfig, dataset: Dataset | None = None) -> None: ...

    def write_checkpoint(self, progress: Progress, tensors: dict[str, Tensor], config: RunConfig) -> None: ...

    def write_heads_so_far(self, rows: pd.DataFrame) -> None: ...

    def log(self, event: str, **details: Any) -> None: ...
