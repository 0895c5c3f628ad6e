"""`nearsight probe accuracy MODEL …`: top-1 and top-5 of a model's own classifier, as papers evaluate it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearsight.commands.options import parse, short_name
from nearsight.commands.probe import Outcome, TestedRequest, run_path
from nearsight.errors import InputError
from nearsight.files import check_kind, check_output_folder
from nearsight.lazy import pd, torch

if TYPE_CHECKING:
    from torch import nn

    from nearsight.commands.pictures import Pictures, PreparedImages


@dataclass(frozen=True, kw_only=True)
class AccuracyOptions(TestedRequest):
    """How often a model's own classifier is right on test images: top-1 and top-5, with intervals.

    Pictures are prepared as the model says: the shorter side resized to its image size over crop_pct (224 / 0.875 =
    256), the middle cut out. A folder may have some of ImageNet's classes, named by their WordNet ids: a model of all
    of them then chooses among those. Writes result.json, table.csv, table.md and provenance.json.
    """

    data: str | None = None
    """A data set (see nearsight data list), whose test images are taken, by default that of the runs; or a folder with
    a folder per class, of which all are."""
    crop_pct: float | None = None
    """Share of the resized picture's side that is cut out of its middle; by default as the model, or the run, says."""

    def check(self, probe: str) -> None:
        super().check(probe)
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise InputError(f"--crop-pct is {self.crop_pct}, but must be greater than 0 and at most 1")
        for option, value in (("--num-train", self.num_train), ("--cache-dir", self.cache_dir)):
            if value is not None:
                raise InputError(f"{option} does not go with probe accuracy, which needs test images alone")

    def data_name(self) -> str:
        """Of the data set."""
        from nearsight.train import RunFolder

        if self.data is not None:
            return self.data
        names = {RunFolder(path).read_config().data.name for text in self.models if (path := run_path(text))}
        if len(names) != 1:
            raise InputError("say with --data on which images: imagenet, say, or a folder with a folder per class")
        return names.pop()


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(AccuracyOptions, arguments, prog="nearsight probe accuracy")
    options.check("accuracy")
    from nearsight.commands.pictures import pictures_to_classify
    from nearsight.probe import accuracy_score
    from nearsight.report.tables import percent

    name = options.data_name()
    out = options.out or options.default_folder("accuracy", short_name(name))
    check_output_folder(out)
    check_kind(out, None)
    pictures, labels_N, classes = pictures_to_classify(name, options.data_dir, options.num_test)
    models, rows, shown = [], [], []
    for label, model, images in _opened(options, pictures):
        with _on(model, options.torch_device):
            found = _found(options, label, model, images, labels_N, classes)
        scores = {what: accuracy_score(right_N) for what, right_N in vars(found).items()}
        models.append(
            {
                "model": label,
                "preparation": images.preparation,
                **{what: score.value for what, score in scores.items()},
                "interval": {what: [score.low, score.high] for what, score in scores.items()},
            }
        )
        rows.append({"model": label, **{what: score.value for what, score in scores.items()}})
        shown.append({"model": label, **{what: percent(score.value) for what, score in scores.items()}})
    outcome = Outcome(
        probe="accuracy",
        title=f"Accuracy of the models' own classifiers on {name} in per cent",
        data={"name": name, "num_test": len(pictures), "num_classes": len(classes)},
        settings={"crop_pct": options.crop_pct},
        models=models,
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).rename(columns={"top1": "top-1", "top5": "top-5", "of_all": "top-1 of all classes"}),
        notes=tuple(f"{model['model']}: {model['preparation']}" for model in models),
    )
    outcome.report(options, out, arguments, began)
    return 0


@contextmanager
def _on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on the device for a while."""
    model.to(device).eval()
    try:
        yield
    finally:
        model.to("cpu")


def _opened(options: AccuracyOptions, pictures: Pictures) -> Iterator[tuple[str, nn.Module, PreparedImages]]:
    """(label, model, images as it takes them) of each; what is wrong with any is found before the first is run."""
    from nearsight.commands.pictures import PreparedImages
    from nearsight.commands.subjects import check_named, distinct_labels, open_run, open_source, run_image_size
    from nearsight.data import DATASETS
    from nearsight.models.sourced import preparation

    check_named(options.models, pretrained=options.pretrained, checkpoint=options.checkpoint)
    opened: list[tuple[str, nn.Module, dict[str, Any], str]] = []
    for text in options.models:
        if run_path(text) is not None:
            folder, model = open_run(text, checkpoint=options.checkpoint, image_size=options.image_size)
            config = folder.read_config()
            spec = DATASETS[config.data.name]
            # The model's own config is its architecture's; what the run was tested on is the data set's.
            own = preparation(run_image_size(config), mean=spec.mean, std=spec.std)
            own["crop_pct"] = config.data.crop_pct
            opened.append((folder.path.resolve().name, model, own, "as the run was tested"))
        else:
            sourced = open_source(
                text,
                only_one=len(options.models) == 1,
                pretrained=options.pretrained,
                checkpoint=options.checkpoint,
                seed=options.seed,
                device=options.torch_device,
                image_size=options.image_size,
            )
            opened.append((sourced.label, sourced.model, dict(sourced.data_config), sourced.prepared_by))
    labels = distinct_labels([label for label, *_ in opened], options.models)
    for label, (_, model, config_of_timm, prepared_by) in zip(labels, opened, strict=True):
        if options.crop_pct is not None:
            config_of_timm["crop_pct"], prepared_by = options.crop_pct, "--crop-pct"
        yield label, model, PreparedImages(pictures, config_of_timm, prepared_by)


def _found(
    options: AccuracyOptions,
    label: str,
    model: nn.Module,
    images: PreparedImages,
    labels_N: torch.Tensor,
    classes: Sequence[str],
) -> Any:
    from nearsight.commands.pictures import find_batch_size
    from nearsight.commands.progress import MeasuringProgress
    from nearsight.probe.accuracy import answers, places_of

    device = options.torch_device
    rows, columns = images.data_config["input_size"][1:]
    with torch.no_grad():
        outputs = model(torch.zeros(1, 3, rows, columns, device=device))
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
            raise InputError(f"{label} gives no logits for an image, so that it has no classifier of its own")
        batch_size = options.batch_size or find_batch_size(
            lambda num: model(torch.zeros(num, 3, rows, columns, device=device)), (rows, columns), device
        )
    with MeasuringProgress(f"{label}, test images", len(images)) as progress:
        batches = progress.counted(images.batches(batch_size))
        return answers(model, batches, labels_N, places_of(classes, outputs.shape[1]), device)
