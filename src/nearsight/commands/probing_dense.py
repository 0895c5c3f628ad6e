"""What the probes of patches share: some of the images of a data set with masks, and retrieval among them."""

from dataclasses import dataclass, fields, replace
from math import isnan
from typing import Any

from nearsight.commands.probing import ProbeRequest, describe
from nearsight.commands.progress import MeasuringProgress
from nearsight.data.segmentation import MaskedImages, SegmentationSet
from nearsight.errors import check_at_least, check_positive
from nearsight.probe import FeatureSpec, Retriever, Score, build_memory, miou_score, retrieve
from nearsight.probe.features import Place
from nearsight.probe.frozen import FrozenModel, at_size
from nearsight.probe.retrieve import DEFAULT_K, DEFAULT_SIZE, DEFAULT_TEMPERATURE, IndexKind, RetrievalResult


@dataclass(frozen=True, kw_only=True)
class RetrieveSettings:
    """What affects the numbers of a retrieval."""

    block: int = -1
    """Block whose patches are read, or the stage of a hierarchical model."""
    place: Place = "block"
    """Features as the block returns them, after the final norm (norm), or refined (prr)."""
    k: int = DEFAULT_K
    """Neighbours of each patch."""
    temperature: float = DEFAULT_TEMPERATURE
    """T of their weights, softmax(similarity / T)."""
    memory_size: int = DEFAULT_SIZE
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


def first_images(dataset: SegmentationSet, num_train: int | None, num_test: int | None) -> SegmentationSet:
    """The data set with so many of its images at most, the first ones."""

    def some(images: MaskedImages, num: int | None) -> MaskedImages:
        return images if num is None else replace(images, pairs=images.pairs[:num])

    return replace(dataset, train=some(dataset.train, num_train), test=some(dataset.test, num_test))


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
) -> Retrieved:
    """Segment the test images of a data set by the patches of its training images. `size_option`: what asked for the
    size of images, for complaints."""
    if settings.image_size is not None:
        device = request.torch_device
        frozen = at_size(frozen, settings.image_size, settings.spec, option=size_option, device=device)
    with request.reading(frozen, settings.spec) as reader:
        common: dict[str, Any] = {
            "batch_size": request.images_at_once(reader, frozen),
            "device": request.torch_device,
        }
        with MeasuringProgress(f"{frozen.label}, memory", len(dataset.train)) as progress:
            memory = build_memory(
                reader,
                dataset,
                frozen.preparation,
                size=settings.memory_size,
                seed=settings.seed,
                watch=progress.counted,
                **common,
            )
        retriever = Retriever(memory, k=settings.k, temperature=settings.temperature, index=settings.index)
        with MeasuringProgress(f"{frozen.label}, retrieval", len(dataset.test)) as progress:
            result = retrieve(reader, retriever, dataset, frozen.preparation, watch=progress.counted, **common)
        return Retrieved(result=result, score=miou_score(result.counts_N3c), described=describe(frozen, reader))
