"""`nearsight probe retrieve MODEL … --data NAME`: segmentation by the nearest training patches, without training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import isnan
from typing import TYPE_CHECKING, Any, Literal

from nearsight.commands.masked import OwnMasks
from nearsight.commands.options import parse
from nearsight.commands.probe import Outcome, ProbeRequest, describe
from nearsight.data.segmentation import MaskedImages, SegmentationSet
from nearsight.errors import InputError, check_at_least, check_positive
from nearsight.lazy import pd
from nearsight.probe import FeatureSpec
from nearsight.probe.settings import MEMORY_SIZE, RETRIEVE_K, RETRIEVE_TEMPERATURE, IndexKind, Place

if TYPE_CHECKING:
    from torch import Tensor

    from nearsight.probe import FeatureReader, Score
    from nearsight.probe.frozen import FrozenModel
    from nearsight.probe.retrieve import RetrievalResult


@dataclass(frozen=True, kw_only=True)
class RetrieveSettings:
    """What affects the numbers of a retrieval."""

    block: int = -1
    """Block whose patches are read, or the stage of a hierarchical model."""
    place: Place = "block"
    """Features as the block returns them, after the final norm (norm), or refined (prr)."""
    k: int = RETRIEVE_K
    """Neighbours of each patch."""
    temperature: float = RETRIEVE_TEMPERATURE
    """T of their weights, softmax(similarity / T)."""
    memory_size: int = MEMORY_SIZE
    """Patches in the memory at most; of more, a random choice, as many of each image."""
    image_size: int | None = None
    """Side of the square that images are squeezed to; by default what the model takes. The larger, the more patches."""
    index: IndexKind = "exact"
    """exact, or faiss (flat, on the CPU)."""
    seed: int = 0
    """Of that choice."""

    def __post_init__(self) -> None:
        check_at_least("--k", self.k, 1)
        check_positive("--temperature", self.temperature)
        check_at_least("--memory-size", self.memory_size, 1)
        check_at_least("--image-size", 1 if self.image_size is None else self.image_size, 1)

    @property
    def spec(self) -> FeatureSpec:
        return FeatureSpec(block=self.block, place=self.place, tokens="patches")


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """What retrieval found, and with which features."""

    result: RetrievalResult
    score: Score
    """Its mIoU."""
    described: dict[str, Any]

    def numbers(self, dataset: SegmentationSet) -> dict[str, Any]:
        """All of them, for a file."""
        names, result = dataset.class_names, self.result
        simple = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "counts_N3c"}
        return {
            **simple,
            "mean_iou_low": self.score.low,
            "mean_iou_high": self.score.high,
            "per_class_iou": {
                name: None if isnan(value) else value for name, value in zip(names, result.per_class_iou, strict=True)
            },
            "unseen": [names[number] for number in result.unseen],
        }


def retrieved(
    request: ProbeRequest,
    frozen: FrozenModel,
    dataset: SegmentationSet,
    settings: RetrieveSettings,
    *,
    size_option: str = "--image-size",
    augmentation_epochs: int | None = None,
) -> Retrieved:
    """Segment the test images of a data set by the patches of its training images.

    Args:
        size_option: what asked for the size of images, for complaints.
        augmentation_epochs: how often the training images go into the memory, by the protocol of Hummingbird; None for
            the usual one.
    """
    from nearsight.commands.progress import MeasuringProgress
    from nearsight.probe import Retriever, build_memory, miou_score, retrieve
    from nearsight.probe.cache import keeps_maps, whole_maps
    from nearsight.probe.frozen import at_size

    if settings.image_size is not None:
        device = request.torch_device
        frozen = at_size(frozen, settings.image_size, settings.spec, option=size_option, device=device)
    with request.reading(frozen, settings.spec) as reader:
        common: dict[str, Any] = {
            "batch_size": request.images_at_once(reader, frozen),
            "device": request.torch_device,
        }
        if augmentation_epochs is not None:
            return _by_hummingbird(frozen, dataset, settings, reader, augmentation_epochs, common)

        def kept(part: str, images: MaskedImages) -> Tensor | None:
            if not keeps_maps(reader, frozen.preparation.size, len(images), request.cache_dir):
                return None
            try:
                with MeasuringProgress(f"{frozen.label}, {part} features", len(images)) as progress:
                    return whole_maps(
                        reader,
                        images,
                        frozen.preparation,
                        model=frozen.identity,
                        data=dataset.fingerprint,
                        part=part,
                        folder=request.cache_dir,
                        watch=progress.counted,
                        **common,
                    )
            except InputError:
                if request.cache_dir is not None:
                    raise
                return None  # nobody asked for them to be kept: a full disk, say, stops nothing

        maps = {"train": kept("train", dataset.train), "test": kept("test", dataset.test)}
        with MeasuringProgress(f"{frozen.label}, memory", len(dataset.train)) as progress:
            memory = build_memory(
                reader,
                dataset,
                frozen.preparation,
                size=settings.memory_size,
                seed=settings.seed,
                watch=progress.counted,
                kept_NChw=maps["train"],
                **common,
            )
        retriever = Retriever(memory, k=settings.k, temperature=settings.temperature, index=settings.index)
        with MeasuringProgress(f"{frozen.label}, retrieval", len(dataset.test)) as progress:
            result = retrieve(
                reader,
                retriever,
                dataset,
                frozen.preparation,
                watch=progress.counted,
                kept_NChw=maps["test"],
                **common,
            )
        return Retrieved(result=result, score=miou_score(result.counts_N3c), described=describe(frozen, reader))


def _by_hummingbird(
    frozen: FrozenModel,
    dataset: SegmentationSet,
    settings: RetrieveSettings,
    reader: FeatureReader,
    num_epochs: int,
    common: dict[str, Any],
) -> Retrieved:
    from nearsight.commands.progress import MeasuringProgress
    from nearsight.probe import Retriever, hummingbird, miou_score

    with MeasuringProgress(f"{frozen.label}, memory", len(dataset.train) * num_epochs) as progress:
        memory = hummingbird.build_memory(
            reader,
            dataset,
            frozen.preparation,
            num_epochs=num_epochs,
            size=settings.memory_size,
            seed=settings.seed,
            watch=progress.counted,
            **common,
        )
    retriever = Retriever(memory, k=settings.k, temperature=settings.temperature, index=settings.index)
    with MeasuringProgress(f"{frozen.label}, retrieval", len(dataset.test)) as progress:
        result = hummingbird.retrieve(reader, retriever, dataset, frozen.preparation, watch=progress.counted, **common)
    score = miou_score(result.counts_N3c, count_absent=True)
    return Retrieved(result=result, score=score, described=describe(frozen, reader))


@dataclass(frozen=True, kw_only=True)
class RetrieveOptions(OwnMasks, ProbeRequest, RetrieveSettings):
    """Segment test images by retrieval (Hummingbird): the k nearest patches of training images say what a patch shows.

    Images are squeezed to the size the model takes, or to --image-size; predictions are judged at the size of the
    masks. Writes result.json, table.csv, table.md, per_class.csv and provenance.json.
    """

    data: str = "voc-small"
    """A data set with masks: ade20k, pascal-context, coco-stuff, voc2012, camvid, voc-small; or a folder of your own
    with images, masks and classes.json in it."""
    image_size: int | None = None
    """Side of the square that images are squeezed to; by default what the model takes. The larger, the more patches."""
    place: Place | None = None  # type: ignore[assignment]  # settled in `settings`, by the protocol
    """Features as the block returns them, after the final norm (norm), or refined (prr); by default block, and norm of
    --protocol hummingbird."""
    protocol: Literal["nearsight", "hummingbird"] = "nearsight"
    """hummingbird: as open-hummingbird-eval does it, with an augmented memory, masks of the images' size, ignored
    pixels in the first class, matched classes, and absent ones counted with 0."""
    augmentation_epochs: int = 1
    """Of --protocol hummingbird: how often the training images go into the memory, augmented anew each time."""

    def __post_init__(self) -> None:
        """The settings check themselves when they are made of these options."""

    @property
    def opened_for(self) -> dict[str, int | None]:
        """A model is opened at its own size, where it has one, and takes the other as it then can."""
        return {"size_to_try": self.image_size}

    @property
    def settings(self) -> RetrieveSettings:
        given = {field.name: getattr(self, field.name) for field in fields(RetrieveSettings)}
        usual: Place = "norm" if self.protocol == "hummingbird" else "block"
        return RetrieveSettings(**{**given, "place": self.place or usual})

    def check(self, probe: str) -> None:
        super().check(probe)
        check_at_least("--augmentation-epochs", self.augmentation_epochs, 1)
        if self.protocol == "nearsight" and self.augmentation_epochs != 1:
            raise InputError("--augmentation-epochs is for --protocol hummingbird; the usual memory is not augmented")


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(RetrieveOptions, arguments, prog="nearsight probe retrieve")
    options.check("retrieve")
    from nearsight.report.tables import percent  # here, because it takes half a second

    settings = options.settings
    dataset = options.load_masked(options.data, options.data_dir, options.num_train, options.num_test)
    frozen, out = options.opened("retrieve", dataset.name)
    augmented = options.augmentation_epochs if options.protocol == "hummingbird" else None
    found = [retrieved(options, one, dataset, settings, augmentation_epochs=augmented) for one in frozen]
    models = [{**one.described, **one.numbers(dataset)} for one in found]
    of_protocol = "" if options.protocol == "nearsight" else f" by the protocol {options.protocol}"
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
        title=f"Retrieval on {dataset.name}{of_protocol}: mIoU over the data set and pixel accuracy in per cent",
        data={"name": dataset.name, "num_classes": dataset.num_classes, "num_test": models[0]["num_images"]},
        settings={
            "protocol": options.protocol,
            **asdict(settings),
            **({} if augmented is None else {"augmentation_epochs": augmented}),
        },
        models=models,
        numbers=pd.DataFrame([{key: model[key] for key in keys} for model in models]),
        shown=pd.DataFrame(shown),
        notes=tuple(
            f"{model['model']}: no patch of the memory shows {', '.join(model['unseen'])}, so that no prediction can"
            for model in models
            if model["unseen"]
        ),
        further={"per_class": _per_class(models)},
    )
    outcome.report(options, out, arguments, began)
    return 0


def _per_class(models: Sequence[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"model": model["model"], "class": name, "iou": iou}
            for model in models
            for name, iou in model["per_class_iou"].items()
        ]
    )
