"""`nearsight probe {knn,linear,accuracy,segment,retrieve,all} MODEL …`: what the features of frozen models are worth.

Also what all of these share: their options, how models are opened, and what is left behind.
"""

from __future__ import annotations

import importlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nearsight.commands.options import Common, dispatch, listed, short_name
from nearsight.data import DATASETS
from nearsight.errors import InputError, check_at_least, check_number
from nearsight.files import check_kind, check_output_folder, output_folder, write_json, write_text
from nearsight.lazy import pd, torch
from nearsight.probe import FeatureSpec

if TYPE_CHECKING:
    from torch import nn

if TYPE_CHECKING:
    from nearsight.probe import FeatureReader
    from nearsight.probe.frozen import FrozenModel
    from nearsight.train import RunFolder

PROBES = {
    "knn": "classes by the votes of the nearest training images",
    "linear": "a linear classifier on frozen features",
    "accuracy": "top-1 and top-5 of a model's own classifier",
    "segment": "a segmentation head on frozen features",
    "retrieve": "segmentation by the nearest training patches, without training",
    "all": "all of these, of models or of the runs of a study, in one table",
}
"""Name → what it is. Each is a module `nearsight.commands.probe_…`, imported only when it is called."""
UNTRAINED = "init:"
"""Before the folder of a run: its model with the weights that its seed started from."""
_MAINS = {"knn": ("probe_classes", "knn"), "linear": ("probe_classes", "linear")}
"""Those that are not the `main` of a module of their own."""


def main(arguments: Sequence[str]) -> int:
    usage = f"usage: nearsight probe {{{','.join(PROBES)}}} RUN_OR_MODEL [...] [OPTIONS]\n\n{listed(PROBES)}"
    return dispatch("probe", arguments, {name: partial(_probe, name) for name in PROBES}, usage, kind="probe")


def _probe(name: str, arguments: list[str]) -> int:
    module, function = _MAINS.get(name, (f"probe_{name}", "main"))
    return int(getattr(importlib.import_module(f"nearsight.commands.{module}"), function)(arguments))


@dataclass(frozen=True, kw_only=True)
class ModelsRequest(Common):
    """The options of every probe: which models, on how many images, and where their features are kept."""

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
    num_train: int | None = None
    """Training images at most; of a data set with masks the first ones."""
    num_test: int | None = None
    """Test images at most, likewise."""
    cache_dir: Path | None = None
    """Folder that keeps features of whole images for the next time; by default in the user's cache folder, but there
    not more than 1 GiB of the maps of each part of a data set with masks. Random crops are not kept."""

    def check(self, probe: str) -> None:
        """Refuse what is wrong at a first look."""
        if not self.models:
            raise InputError(
                f"no model is named; write nearsight probe {probe} MODEL, and see nearsight probe {probe} --help"
            )
        for name in ("image_size", "num_train", "num_test"):
            check_at_least(f"--{name.replace('_', '-')}", 1 if (value := getattr(self, name)) is None else value, 1)

    def frozen(self, seed: int, **sizes: int | None) -> list[FrozenModel]:
        """The models, opened; what is wrong with them is found here. `sizes`: see `open_frozen`."""
        return open_frozen(
            self.models,
            pretrained=self.pretrained,
            checkpoint=self.checkpoint,
            seed=seed,
            device=self.torch_device,
            **sizes,
        )

    def default_folder(self, probe: str, data: str) -> Path:
        return Path("runs") / f"{probe}-{data}-{'-and-'.join(map(short_name, self.models))}"[:120]


@dataclass(frozen=True, kw_only=True)
class TestedRequest(ModelsRequest):
    """The options of every probe but segment, whose own settings are more."""

    batch_size: int | None = None
    """Images per forward; as many as memory takes by default."""
    seed: int = 0
    """Of random weights, splits, orders and samples."""
    out: Path | None = None
    """Where to write; runs/PROBE-DATA-MODEL by default."""

    def check(self, probe: str) -> None:
        """Refuse what is wrong at a first look."""
        super().check(probe)
        check_at_least("--batch-size", 1 if self.batch_size is None else self.batch_size, 1)
        check_number("--seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(TestedRequest):
    """Also that of probes of features."""

    block: int = -1
    """Block whose features are read, from 0 or from the end; of hierarchical timm models the stage."""

    @property
    def opened_for(self) -> dict[str, int | None]:
        """Of `open_frozen`'s arguments, those about the size of images."""
        return {"image_size": self.image_size}

    def opened(self, probe: str, data: str) -> tuple[list[FrozenModel], Path]:
        """(the models, where results go); what is wrong with either is found here."""
        out = self.out or self.default_folder(probe, data)
        check_output_folder(out)
        check_kind(out, None)
        return self.frozen(self.seed, **self.opened_for), out

    def reading(self, frozen: FrozenModel, spec: FeatureSpec) -> AbstractContextManager[FeatureReader]:
        from nearsight.probe import reading

        return reading(frozen.model, spec, image_size=frozen.preparation.size, device=self.torch_device)

    def images_at_once(self, reader: FeatureReader, frozen: FrozenModel) -> int:
        from nearsight.commands.pictures import find_batch_size

        def run(num_images: int) -> object:
            return reader(torch.zeros(num_images, 3, *frozen.preparation.size))

        return self.batch_size or find_batch_size(run, frozen.preparation.size, self.torch_device)


def describe(frozen: FrozenModel, reader: FeatureReader) -> dict[str, Any]:
    """Whose features these are, and which."""
    from nearsight.probe import weights_hash

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
    further: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """More tables, by the names of their files."""

    def report(self, request: TestedRequest, out: Path, arguments: Sequence[str], began: float) -> None:
        """Write all that was found, and print it."""
        self._write(out, arguments, request.torch_device, began, request.seed)
        print(json.dumps({**self._as_json(), "folder": str(out)}) if request.json else self._as_text(out))

    def _as_json(self) -> dict[str, Any]:
        return {
            "probe": self.probe,
            "data": dict(self.data),
            "settings": dict(self.settings),
            "models": [dict(model) for model in self.models],
            "notes": list(self.notes),
        }

    def _write(self, out: Path, arguments: Sequence[str], device: torch.device, began: float, seed: int) -> None:
        """result.json, table.csv, table.md, further tables and, when all that is there, provenance.json."""
        from nearsight.report.tables import Table  # here, because it takes half a second
        from nearsight.train.integrity import provenance

        output_folder(out)
        table = Table(name="table", title=self.title, numbers=self.numbers, shown=self.shown, notes=self.notes)
        write_json(out / "result.json", self._as_json(), allow_nan=False)
        table.write(out)
        for name, frame in self.further.items():
            write_text(out / f"{name}.csv", frame.to_csv(index=False))
        command = shlex.join(["nearsight", "probe", self.probe, *arguments])
        certificate = {**provenance(device), "seed": seed, "command": command}
        write_json(out / "provenance.json", {**certificate, "seconds": round(time.perf_counter() - began, 3)})

    def _as_text(self, out: Path) -> str:
        notes = [f"Note: {note}" for note in self.notes]
        return "\n".join([self.title, self.shown.to_string(index=False), *notes, f"Tables: {out}"])


def run_path(text: str) -> Path | None:
    """The folder of the run that a model is of, trained or not."""
    path = Path(text.removeprefix(UNTRAINED))
    if text.startswith(UNTRAINED) and not path.is_dir():
        raise InputError(f"{path} is not a folder, so there is no run there whose first weights could be probed")
    return path if path.is_dir() else None


def open_frozen(
    texts: Sequence[str],
    *,
    pretrained: bool,
    checkpoint: Path | None,
    seed: int,
    device: torch.device,
    image_size: int | None = None,
    size_to_try: int | None = None,
) -> list[FrozenModel]:
    """Every model that was named. Whatever can be wrong with them is found here.

    Args:
        image_size: side of the square images that the models are opened for, if not what they say; a run has its own.
        size_to_try: the same, only for models that do not say what they take, or fail on it.
    """
    from nearsight.commands.subjects import check_named, distinct_labels, open_source
    from nearsight.models.sources import ImageSizeError
    from nearsight.probe.frozen import FrozenModel, Preparation

    check_named(texts, pretrained=pretrained, checkpoint=checkpoint)
    opened = []
    for text in texts:
        if run_path(text) is not None:
            opened.append(_open_run(text, checkpoint, image_size))
            continue
        open_at = partial(
            open_source,
            text,
            only_one=len(texts) == 1,
            pretrained=pretrained,
            checkpoint=checkpoint,
            seed=seed,
            device=device,
        )
        try:
            sourced = open_at(image_size=image_size)
        except ImageSizeError:
            if size_to_try is None:
                raise
            sourced = open_at(image_size=size_to_try)
        mean, std = (tuple(sourced.data_config[name]) for name in ("mean", "std"))
        preparation = Preparation(size=sourced.image_size, mean=mean, std=std)
        opened.append(FrozenModel(label=sourced.label, model=sourced.model, preparation=preparation))
    labels = distinct_labels([one.label for one in opened], texts)
    return [replace(one, label=label) for one, label in zip(opened, labels, strict=True)]


def _open_run(text: str, checkpoint: Path | None, image_size: int | None) -> FrozenModel:
    from nearsight.commands.subjects import open_run, run_image_size
    from nearsight.probe.frozen import FrozenModel, Preparation

    if text.startswith(UNTRAINED):
        folder, model = _open_untrained(text, checkpoint, image_size)
    else:
        folder, model = open_run(text, checkpoint=checkpoint, image_size=image_size)
    config = folder.read_config()
    # The model's own config is its architecture's; what the run was trained on is the data set's.
    spec = DATASETS[config.data.name]
    preparation = Preparation(size=run_image_size(config), mean=spec.mean, std=spec.std)
    untrained = "untrained " if text.startswith(UNTRAINED) else ""
    return FrozenModel(label=f"{untrained}{folder.path.resolve().name}", model=model, preparation=preparation)


def _open_untrained(text: str, checkpoint: Path | None, image_size: int | None) -> tuple[RunFolder, nn.Module]:
    from nearsight.commands.subjects import run_image_size
    from nearsight.train import RunFolder
    from nearsight.train.initial import untrained_model

    if checkpoint is not None:
        raise InputError(f"--checkpoint does not go with {text}, whose weights are fresh")
    if image_size is not None:
        raise InputError(f"--image-size does not go with {text}: a run has its own image size")
    folder = RunFolder(Path(text.removeprefix(UNTRAINED)))
    config = folder.read_config()
    # The classifier is not read, but drawn with the others: DINO has none.
    num_classes = 0 if folder.is_pretraining else DATASETS[config.data.name].num_classes or 1000
    return folder, untrained_model(config, run_image_size(config), num_classes).eval()
