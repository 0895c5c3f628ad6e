"""What `nearsight probe segment` does when its options are known: the heads, trained, tested and shown."""

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.progress import TaskID

from nearsight.commands.options import folders_of
from nearsight.commands.progress import SECONDS_BETWEEN_LINES, BarOrLines
from nearsight.data.segmentation import SegmentationSet
from nearsight.files import output_folder, write_text
from nearsight.probe.frozen import FrozenModel, size_step
from nearsight.probe.segmentation.config import SegmentConfig, default_settings
from nearsight.probe.segmentation.head import LossRow, Prediction
from nearsight.probe.segmentation.probing import SegmentListener, probe_segmentation
from nearsight.probe.segmentation.result import SegmentFolder, probe_record
from nearsight.train import Stop

_MOST_CLASSES_SHOWN = 30


class SegmentProgress(BarOrLines, SegmentListener):
    """Shows one probe; use it as a context manager."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._tasks: dict[str, TaskID] = {}
        self._said = time.perf_counter()
        self._iterations = 0

    def started(self, steps_done: int, config: SegmentConfig) -> None:
        self._iterations = config.iterations
        if steps_done:
            self._say(f"continuing after iteration {steps_done}")

    def step(self, steps_done: int, last: LossRow | None) -> None:
        self._show("training", steps_done, self._iterations, "" if last is None else f"loss {last.loss:.3f}")

    def tested(self, num_done: int, num_images: int) -> None:
        self._show("testing", num_done, num_images, "")

    def _show(self, what: str, done: int, total: int, status: str) -> None:
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(f"{self._label}, {what}", total=total, status="")
            self._bar.update(self._tasks[what], completed=done, status=status)
        elif done == total or time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.perf_counter()
            self._say(f"{what} {done}/{total}{', ' if status else ''}{status}")


def _config(options: Any, frozen: FrozenModel, dataset: SegmentationSet) -> SegmentConfig:
    settings = default_settings(dataset.name, image_size=max(frozen.preparation.size), step=size_step(frozen.model))
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(SegmentConfig)}
    return SegmentConfig(**{**settings, **{name: value for name, value in given.items() if value is not None}})


def probe_models(options: Any, dataset: SegmentationSet, out: Path, stop: Stop) -> int:
    """Probe every model of the request and print what was found: the exit code."""
    device = options.torch_device
    frozen = options.frozen(options.seed, image_size=options.image_size)
    configs = [_config(options, one, dataset) for one in frozen]
    paths, folders = folders_of(options.models, out), []
    for one, config, path in zip(frozen, configs, paths, strict=True):
        SegmentFolder(path).check(probe_record(one, dataset, config))  # of all, before the first is trained
    for one, config, path in zip(frozen, configs, paths, strict=True):
        with SegmentProgress(one.label) as progress:
            folder = probe_segmentation(
                one,
                dataset,
                config,
                path,
                device=device,
                listener=progress,
                stop=stop,
                checkpoint_every=options.checkpoint_every,
                keep=True,
                cache=options.cache_dir,
                show=functools.partial(draw_predictions, dataset, one.label, path / "figures"),
            )
        folders.append(folder)
    if len(folders) > 1:
        write_text(out / "table.csv", pd.DataFrame([folder.read_result() for folder in folders]).to_csv(index=False))
    if options.json:
        models = [{"folder": str(folder.path), **folder.read_result()} for folder in folders]
        print(json.dumps({"probe": "segment", "models": models, "folder": str(out)}))
    else:
        print("\n".join(line for folder in folders for line in _as_text(folder)))
    return 0


def draw_predictions(dataset: SegmentationSet, label: str, folder: Path, predictions: Sequence[Prediction]) -> None:
    """Images, truth and predictions side by side, as folder/predictions.png and .svg."""
    # Here, because whatever draws figures takes half a second to load: help and mistakes do without.
    from nearsight.report.figures.pictures import segmentation_pictures
    from nearsight.report.figures.style import save_figure

    pictures = [
        (one.image_CHW.permute(1, 2, 0).numpy(), one.truth_HW.numpy(), one.prediction_HW.cpu().numpy())
        for one in predictions
    ]
    figure = segmentation_pictures(
        pictures, dataset.class_names, ignore_index=dataset.ignore_index, label=f"{label} on {dataset.name}, frozen"
    )
    save_figure(figure, output_folder(folder), "predictions")


def _as_text(folder: SegmentFolder) -> list[str]:
    result, classes = folder.read_result(), folder.read_per_class()
    lines = [
        f"{result['model']} on {result['data']}: mIoU {result['miou']:.2%}, pixel accuracy "
        f"{result['pixel_accuracy']:.2%} (one class everywhere: mIoU {result['miou_of_one_class']:.2%})"
    ]
    if len(classes) <= _MOST_CLASSES_SHOWN:
        width = max(map(len, classes["name"]))
        lines += [
            f"  {name:<{width}}  " + ("not there" if pd.isna(iou) else f"{iou:6.2%}")
            for name, iou in zip(classes["name"], classes["iou"], strict=True)
        ]
    if result["classes_tested_but_not_trained"]:
        lines.append(f"Tested, but never seen in training: {', '.join(result['classes_tested_but_not_trained'])}")
    return [*lines, f"Tables and pictures: {folder.path}"]
