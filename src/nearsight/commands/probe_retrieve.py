"""`nearsight probe retrieve MODEL … --data NAME`: segmentation by the nearest training patches, without training."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

import pandas as pd

from nearsight.commands.options import parse
from nearsight.commands.probing import Outcome, ProbeRequest, describe
from nearsight.commands.progress import MeasuringProgress
from nearsight.data.segmentation import SegmentationSet, load_segmentation
from nearsight.errors import check_at_least
from nearsight.files import write_text
from nearsight.probe import FeatureSpec, Retriever, build_memory, retrieve
from nearsight.probe.frozen import FrozenModel
from nearsight.probe.intermediates import Place
from nearsight.probe.memory import DEFAULT_SIZE
from nearsight.probe.retrieve import DEFAULT_K, DEFAULT_TEMPERATURE, IndexKind
from nearsight.report.study.table import percent


@dataclass(frozen=True, kw_only=True)
class RetrieveOptions(ProbeRequest):
    """Segment test images by retrieval (Hummingbird): the k nearest patches of training images say what a patch shows.

    Images are squeezed to the size the model takes; predictions are judged at the size of the masks. Writes
    result.json, table.csv, table.md, per_class.csv and provenance.json.
    """

    data: str = "voc-small"
    """A data set with masks: ade20k, pascal-context, coco-stuff, voc2012, camvid, voc-small."""
    place: Place = "block"
    """Features as the block returns them, after the final norm (norm), or refined (prr)."""
    k: int = DEFAULT_K
    """Neighbours of each patch."""
    temperature: float = DEFAULT_TEMPERATURE
    """T of their weights, softmax(similarity / T)."""
    memory_size: int = DEFAULT_SIZE
    """Patches in the memory at most; of more, a random choice, as many of each image."""
    index: IndexKind = "exact"
    """exact, or faiss (flat, on the CPU)."""


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(RetrieveOptions, arguments, prog="nearsight probe retrieve")
    options.check("retrieve")
    check_at_least("--k", options.k, 1)
    check_at_least("--memory-size", options.memory_size, 1)
    dataset = load_segmentation(options.data, options.data_dir)
    frozen, out = options.opened("retrieve", dataset.name)
    models = [_probe(options, one, dataset) for one in frozen]
    keys = ("model", "mean_iou", "pixel_accuracy", "memory_patches", "memory_bytes")
    shown = [
        {
            "model": model["model"],
            "mIoU": percent(model["mean_iou"]),
            "pixel accuracy": percent(model["pixel_accuracy"]),
            "memory": f"{model['memory_patches']:,} patches, {model['memory_bytes'] / 2**20:,.0f} MiB",
        }
        for model in models
    ]
    settings = {name: getattr(options, name) for name in ("k", "temperature", "memory_size", "index", "place")}
    outcome = Outcome(
        probe="retrieve",
        title=f"Retrieval on {dataset.name}: mIoU over the data set and pixel accuracy in per cent",
        data={"name": dataset.name, "num_classes": dataset.num_classes, "num_test": models[0]["num_images"]},
        settings=settings,
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


def _probe(options: RetrieveOptions, frozen: FrozenModel, dataset: SegmentationSet) -> dict[str, Any]:
    spec = FeatureSpec(block=options.block, place=options.place, tokens="patches")
    num_train = min(options.num_train or len(dataset.train), len(dataset.train))
    num_test = min(options.num_test or len(dataset.test), len(dataset.test))
    with options.reading(frozen, spec) as reader:
        batch_size = options.images_at_once(reader, frozen)
        common: dict[str, Any] = {"batch_size": batch_size, "device": options.torch_device}
        with MeasuringProgress(f"{frozen.label}, memory", num_train) as progress:
            memory = build_memory(
                reader,
                dataset,
                frozen.preparation,
                size=options.memory_size,
                num_images=num_train,
                seed=options.seed,
                watch=progress.counted,
                **common,
            )
        retriever = Retriever(memory, k=options.k, temperature=options.temperature, index=options.index)
        with MeasuringProgress(f"{frozen.label}, retrieval", num_test) as progress:
            found = retrieve(
                reader, retriever, dataset, frozen.preparation, num_images=num_test, watch=progress.counted, **common
            )
        described = describe(frozen, reader)
    names = dataset.class_names
    return {
        **described,
        **asdict(found),
        "per_class_iou": {
            name: None if isnan(value) else value for name, value in zip(names, found.per_class_iou, strict=True)
        },
        "unseen": [names[number] for number in found.unseen],
    }
