"""`nearsight probe retrieve MODEL … --data NAME`: segmentation by the nearest training patches, without training."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd

from nearsight.commands.options import parse
from nearsight.commands.probing import Outcome, ProbeRequest
from nearsight.commands.probing_dense import RetrieveSettings, first_images, retrieved
from nearsight.data.segmentation import load_segmentation
from nearsight.files import write_text


@dataclass(frozen=True, kw_only=True)
class RetrieveOptions(ProbeRequest, RetrieveSettings):
    """Segment test images by retrieval (Hummingbird): the k nearest patches of training images say what a patch shows.

    Images are squeezed to the size the model takes, or to --image-size; predictions are judged at the size of the
    masks. Writes result.json, table.csv, table.md, per_class.csv and provenance.json.
    """

    data: str = "voc-small"
    """A data set with masks: ade20k, pascal-context, coco-stuff, voc2012, camvid, voc-small."""
    image_size: int | None = None
    """Side of the square that images are squeezed to; by default what the model takes. The larger, the more patches."""

    def __post_init__(self) -> None:
        """The settings check themselves when they are made of these options."""

    @property
    def opened_for(self) -> dict[str, int | None]:
        """A model is opened at its own size, where it has one, and takes the other as it then can."""
        return {"size_to_try": self.image_size}

    @property
    def settings(self) -> RetrieveSettings:
        return RetrieveSettings(**{field.name: getattr(self, field.name) for field in fields(RetrieveSettings)})


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(RetrieveOptions, arguments, prog="nearsight probe retrieve")
    options.check("retrieve")
    from nearsight.report.tables import percent  # here, because it takes half a second

    settings = options.settings
    dataset = first_images(load_segmentation(options.data, options.data_dir), options.num_train, options.num_test)
    dataset.train.check_labelled("training")
    dataset.test.check_labelled("test")
    frozen, out = options.opened("retrieve", dataset.name)
    found = [retrieved(options, one, dataset, settings) for one in frozen]
    models = [{**one.described, **one.numbers(dataset)} for one in found]
    keys = ("model", "mean_iou", "mean_iou_low", "mean_iou_high", "pixel_accuracy", "memory_patches", "memory_bytes")
    shown = [
        {
            "model": model["model"],
            "mIoU": percent(model["mean_iou"]),
            "pixel accuracy": percent(model["pixel_accuracy"]),
            "memory": f"{model['memory_patches']:,} patches, {model['memory_bytes'] / 2**20:,.0f} MiB",
        }
        for model in models
    ]
    outcome = Outcome(
        probe="retrieve",
        title=f"Retrieval on {dataset.name}: mIoU over the data set and pixel accuracy in per cent",
        data={"name": dataset.name, "num_classes": dataset.num_classes, "num_test": models[0]["num_images"]},
        settings=asdict(settings),
        models=models,
        numbers=pd.DataFrame([{key: model[key] for key in keys} for model in models]),
        shown=pd.DataFrame(shown),
        notes=tuple(
            f"{model['model']}: no patch of the memory shows {', '.join(model['unseen'])}, so that no prediction can"
            for model in models
            if model["unseen"]
        ),
    )
    outcome.write(out, arguments, options.torch_device, began, options.seed)
    write_text(out / "per_class.csv", _per_class(models).to_csv(index=False))
    print(json.dumps({**outcome.as_json(), "folder": str(out)}) if options.json else outcome.as_text(out))
    return 0


def _per_class(models: Sequence[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"model": model["model"], "class": name, "iou": iou}
            for model in models
            for name, iou in model["per_class_iou"].items()
        ]
    )
