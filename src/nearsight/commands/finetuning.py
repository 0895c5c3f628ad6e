"""How `nearsight finetune` trains a model further, and holds it against what it was."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from nearsight.augment import HorizontalFlip, RandomCrop, ResizedCrop
from nearsight.commands.finetune import LOCAT, FinetuneOptions
from nearsight.commands.measured import Measured, explore, write_all
from nearsight.commands.pictures import RunImages
from nearsight.commands.progress import TrainingProgress
from nearsight.commands.subjects import Subject
from nearsight.data import Dataset, measuring_subset
from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.lens import HeadTable, measure
from nearsight.lens.running import running, without_gradients
from nearsight.locat.inducers import Gated, inducer_of
from nearsight.models import ModelConfig, load_model
from nearsight.models.factory import COMPACT_MODELS, check_model_name
from nearsight.models.zoo import MODELS
from nearsight.probe.readouts import Neighbours
from nearsight.probe.settings import ABLATION_K
from nearsight.report.page.document import PAGE, Section
from nearsight.report.page.tables import table_html
from nearsight.report.tables import Row, Table, rounded
from nearsight.train import DataConfig, Protocol, RunConfig, RunFolder, Stop, load_data, train_run
from nearsight.train.heads import MEASURING_BATCH
from nearsight.train.initial import PRETRAINED, untrained_model

_SMALL = 96
"""Images of a smaller side are cropped with a margin, larger ones by random sizes."""
BEFORE, AFTER = "before", "after"


def config_of(options: FinetuneOptions) -> RunConfig:
    """What is trained, and what it begins with."""
    assert options.data is not None
    side = options.image_size
    if Path(options.model).is_dir():
        held = RunFolder(Path(options.model)).read_config()
        model, weights = held.model, options.model
        side = side or held.data.image_size or dataset_spec(held.data.name).image_size
    else:
        name, _, tag = options.model.partition(".")
        check_model_name(options.model)
        model = ModelConfig(name=name, settings=() if name in COMPACT_MODELS else options.settings)
        weights = PRETRAINED if not tag else options.model
        if options.model not in MODELS and options.checkpoint is None and options.settings:
            raise InputError("--settings change the model, so that published weights may not fit; give --checkpoint")
        side = side or int(timm.get_pretrained_cfg(name).input_size[-1])
    if options.checkpoint is not None:
        weights = str(options.checkpoint)
    gaug = options.add in ("gaug", "locat")
    # What the model has already stays.
    if gaug and not model.gaug:
        model = replace(model, gaug=True, locat_gentle=options.start == "gentle")
    if options.add not in LOCAT:
        model = replace(model, locality=(*model.locality, _with_start(options.add, options.start)))
    crop = RandomCrop() if side < _SMALL else ResizedCrop(min_area=0.35)
    return RunConfig(
        model=replace(model, prr=model.prr or options.add in ("prr", "locat")),
        data=DataConfig(name=options.data, image_size=side, num_train=options.num_train, validation_fraction=0.1),
        protocol=Protocol(
            lr=options.lr,
            max_epochs=options.epochs,
            warmup_epochs=min(1, options.epochs - 1),
            patience=options.epochs,
            batch_size=options.batch_size,
            augment=(crop, HorizontalFlip()),
        ),
        seed=options.seed,
        weights=weights,
        precision=options.precision,
        num_measured=options.num_images,
    )


def _with_start(text: str, start: str) -> str:
    """The inducer with its gate where it has one that nobody has set: 0, or open."""
    config = inducer_of(text)
    if isinstance(config, Gated) and config.gate == 0 and start == "abrupt" and "gate=" not in text:
        config = replace(config, gate=1.0)
    return config.text


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The model before, or after."""

    measured: Measured
    knn: float
    """Accuracy of the nearest neighbours among the test images."""
    test_acc: float | None
    """Of its own classifier; None before, when that is fresh."""

    @property
    def min_mad(self) -> float:
        return float(self.measured.heads.measured()["mad"].min())


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """A model before and after it was trained further."""

    options: FinetuneOptions
    config: RunConfig
    out: Path
    sides: tuple[_Side, _Side]

    @classmethod
    def of(cls, options: FinetuneOptions, config: RunConfig, out: Path, stop: Stop) -> "Finetuning":
        device = options.torch_device
        with TrainingProgress("run") as progress:
            folder = train_run(
                config, out / "run", device=device, data_dir=options.data_dir, listener=progress, stop=stop
            )
        dataset = load_data(config.data, options.data_dir)
        before = untrained_model(config, dataset.image_size, dataset.num_classes).eval()
        acc = folder.read_result()["test_acc"]
        sides = (
            _side(BEFORE, before, None, dataset, options, out, device),
            _side(AFTER, load_model(folder.model), acc, dataset, options, out, device),
        )
        return cls(options=options, config=config, out=out, sides=sides)

    def table(self) -> Table:
        rows = [
            Row(model=side.measured.subject.label)
            .both("test_acc", side.test_acc, "accuracy, %", rounded(_percent(side.test_acc), 1))
            .both("knn", side.knn, f"k-NN (k = {ABLATION_K}), %", rounded(_percent(side.knn), 1))
            .both("min_mad", side.min_mad, "most local head: MAD", rounded(side.min_mad))
            for side in self.sides
        ]
        notes = (
            f"On {len(self.sides[0].measured.subject.images)} test images of {self.config.data.name}. k-NN: by the "
            "features that the classifier takes, each image by the others. The classifier before training is fresh.",
        )
        return Table.of("finetuned", "Before and after", rows, notes=notes)

    def write(self, command: str) -> list[Path]:
        measured, table = [side.measured for side in self.sides], self.table()
        section = Section(name="finetuned", heading=table.title, body=table_html(table))
        files = write_all(self.out, measured, command, [section], explore(measured))
        write_json(self.out / "finetune.json", self.as_json(()))
        return [*files, self.out / "finetune.json"]

    def as_json(self, files: Iterable[Path]) -> dict[str, Any]:
        return {
            "model": self.options.model,
            "added": self.options.add,
            "run": str(self.out / "run"),
            **{
                side.measured.subject.label: {"test_acc": side.test_acc, "knn": side.knn, "min_mad": side.min_mad}
                for side in self.sides
            },
            "files": [str(path) for path in files],
        }

    def as_text(self) -> list[str]:
        table = self.table()
        return [
            table.shown.to_string(index=False),
            *table.notes,
            "",
            f"Run: {self.out / 'run'}",
            f"Page: {self.out / PAGE}",
        ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _side(
    label: str,
    model: nn.Module,
    test_acc: float | None,
    dataset: Dataset,
    options: FinetuneOptions,
    out: Path,
    device: torch.device,
) -> _Side:
    images = RunImages(dataset, options.num_images, device)
    batches = list(images.batches(MEASURING_BATCH))
    table: HeadTable = measure(model, batches, device=device)
    config = {"model": options.model, "added": options.add, "label": label}
    subject = Subject(text=label, label=label, model=model, images=images, image_size=dataset.image_size, config=config)
    measured = Measured.of(subject, table, range(len(table.layer_names)), out / label, device)
    labels_N = dataset.test.labels_N[measuring_subset(len(dataset.test), options.num_images)]
    return _Side(measured=measured, knn=_neighbours(model, batches, labels_N, device), test_acc=test_acc)


def _neighbours(
    model: nn.Module, batches: Sequence[torch.Tensor], labels_N: torch.Tensor, device: torch.device
) -> float:
    read = Neighbours()
    with running(model, device) as run, without_gradients():
        read.prepare(run.model, run.brought(batches[0][:2]))
        kept_ND = torch.cat([read.kept(read(run.brought(batch)), labels_N) for batch in batches])
        return float(read.values(kept_ND, [labels_N], run.device).mean())
