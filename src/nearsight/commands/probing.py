"""What the commands that probe frozen models share: their options, and what they leave behind."""

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import tyro

from nearsight.commands.batching import find_batch_size
from nearsight.commands.frozen import open_frozen
from nearsight.commands.options import Common
from nearsight.commands.subjects import short_name
from nearsight.errors import InputError, check_at_least, check_number
from nearsight.files import check_output_folder, output_folder, write_json
from nearsight.kinds import check_kind
from nearsight.probe import FeatureReader, FeatureSpec, reading, weights_hash
from nearsight.probe.frozen import FrozenModel
from nearsight.train.integrity import provenance


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(Common):
    """The options of every probe."""

    models: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]", help_behavior_hint="")
    ]
    """A run folder (init:FOLDER: before training), a timm name, hf:org/name or hf:FOLDER, torchvision:NAME,
    package.module:function."""
    pretrained: bool = False
    """Load the published weights of models of timm and torchvision; they are random otherwise."""
    checkpoint: Path | None = None
    """File with your own weights of the model: safetensors, or a state dict that torch.save wrote."""
    image_size: int | None = None
    """Side of the images that the model takes, where it does not say so or can take others; a run has its own."""
    block: int = -1
    """Block whose features are read, from 0 or from the end; of hierarchical timm models the stage."""
    batch_size: int | None = None
    """Images per forward; as many as memory takes by default."""
    num_train: int | None = None
    """Training images at most."""
    num_test: int | None = None
    """Test images at most."""
    seed: int = 0
    """Of random weights, splits, orders and samples."""
    out: Path | None = None
    """Where to write; runs/PROBE-DATA-MODEL by default."""

    def check(self, probe: str) -> None:
        """What can be seen to be wrong at once."""
        if not self.models:
            raise InputError(f"no model is named; write nearsight probe {probe} MODEL, and see --help")
        for name in ("image_size", "batch_size", "num_train", "num_test"):
            check_at_least(f"--{name.replace('_', '-')}", 1 if (value := getattr(self, name)) is None else value, 1)
        check_number("--seed", self.seed)

    @property
    def opened_for(self) -> dict[str, int | None]:
        """Of `open_frozen`'s arguments, those about the size of images."""
        return {"image_size": self.image_size}

    def opened(self, probe: str, data: str) -> tuple[list[FrozenModel], Path]:
        """(the models, where results go); what is wrong with either is found here."""
        names = "-and-".join(map(short_name, self.models))
        out = self.out or Path("runs") / f"{probe}-{data}-{names}"[:120]
        check_output_folder(out)
        check_kind(out, None)
        frozen = open_frozen(
            self.models,
            pretrained=self.pretrained,
            checkpoint=self.checkpoint,
            seed=self.seed,
            device=self.torch_device,
            **self.opened_for,
        )
        return frozen, out

    def reading(self, frozen: FrozenModel, spec: FeatureSpec) -> AbstractContextManager[FeatureReader]:
        return reading(frozen.model, spec, image_size=frozen.preparation.size, device=self.torch_device)

    def images_at_once(self, reader: FeatureReader, frozen: FrozenModel) -> int:
        def run(num_images: int) -> object:
            return reader(torch.zeros(num_images, 3, *frozen.preparation.size))

        return self.batch_size or find_batch_size(run, frozen.preparation.size, self.torch_device)


def describe(frozen: FrozenModel, reader: FeatureReader) -> dict[str, Any]:
    """Whose features these are, and which."""
    return {
        "model": frozen.label,
        "weights": weights_hash(frozen.model),
        "image_size": list(frozen.preparation.size),
        "block": reader.block_name,
        "place": reader.spec.place,
        "tokens": reader.spec.tokens,
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a probe found, of one model or several."""

    probe: str
    """Its name as a command."""
    title: str
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    models: Sequence[Mapping[str, Any]]
    """In full, one object for each."""
    numbers: pd.DataFrame
    """One row for each model, unrounded."""
    shown: pd.DataFrame
    """The same for people."""
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "probe": self.probe,
            "data": dict(self.data),
            "settings": dict(self.settings),
            "models": [dict(model) for model in self.models],
            "notes": list(self.notes),
        }

    def write(self, out: Path, arguments: Sequence[str], device: torch.device, began: float, seed: int) -> list[Path]:
        """result.json, table.csv, table.md and, when all that is there, provenance.json."""
        from nearsight.report.study.table import Table  # here, because it takes half a second

        output_folder(out)
        table = Table(name="table", title=self.title, numbers=self.numbers, shown=self.shown, notes=self.notes)
        result, certificate = out / "result.json", out / "provenance.json"
        write_json(result, self.as_json(), allow_nan=False)
        tables = table.write(out)
        command = shlex.join(["nearsight", "probe", self.probe, *arguments])
        seconds = round(time.perf_counter() - began, 3)
        write_json(certificate, {**provenance(device), "seed": seed, "command": command, "seconds": seconds})
        return [result, *tables, certificate]

    def as_text(self, out: Path) -> str:
        notes = [f"Note: {note}" for note in self.notes]
        return "\n".join([self.title, self.shown.to_string(index=False), *notes, f"Tables: {out}"])
