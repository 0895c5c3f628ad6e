"""Models as users name them, for every command that takes some: runs, and anything `load_source` knows; and what
`nearsight measure` measures: such models, each with its images, opened and tried before any is measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_data_config
from torch import nn

from nearsight.commands.options import Request
from nearsight.commands.pictures import Images, Pictures, PreparedImages, RunImages, find_pictures
from nearsight.data import DATASETS, measuring_subset
from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError, check_number
from nearsight.lens.stream import Precision
from nearsight.models import load_model, load_source
from nearsight.models.sources import SourcedModel, has_published_weights, try_forward
from nearsight.models.zoo import IMAGES, MODELS
from nearsight.randomness import seeded
from nearsight.train import RunConfig, RunFolder, load_data
from nearsight.train.heads import MEASURING_BATCH

DEFAULT_NUM_IMAGES = 256


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to measure, and the images to measure it on."""

    text: str
    """What the user wrote."""
    label: str
    """Its name for people; no two subjects share one."""
    model: nn.Module
    images: Images
    image_size: tuple[int, int]
    """Rows and columns of those images."""
    batch_size: int | None = None
    """Where it does not depend on memory."""
    run: RunFolder | None = None
    """The run it was trained in."""
    precision: Precision = "float32"
    """Of the sums; a run's table is made in float64, as in S1."""
    epoch: int = 0
    """After which it was saved."""
    config: Mapping[str, Any] | None = None
    """What the page says about how it was made and looked at; that of a run is the run's own."""
    notes: tuple[str, ...] = ()


def open_subjects(request: Request, device: torch.device, *, all_decoded: bool = True) -> list[Subject]:
    """Every model that was named, with its images. Whatever can be wrong with them is found here.

    Unless they are `all_decoded`: then an image that cannot be read is found when it is looked at.
    """
    check_named(request.models, pretrained=request.pretrained, checkpoint=request.checkpoint)
    num_images = request.num_images or DEFAULT_NUM_IMAGES

    @cache
    def pictures(images: str | None) -> Pictures:
        return find_pictures(images, num_images, request.data_dir, all_decoded=all_decoded)

    subjects = [
        _open_run(text, request, None if request.images is None else pictures(request.images), device)
        if Path(text).is_dir()
        else _open_model(text, request, pictures(request.images or (IMAGES if text in MODELS else None)), device)
        for text in request.models
    ]
    labels = distinct_labels([subject.label for subject in subjects], request.models)
    return [replace(subject, label=label) for subject, label in zip(subjects, labels, strict=True)]


def _open_run(text: str, request: Request, pictures: Pictures | None, device: torch.device) -> Subject:
    folder, model = open_run(text, checkpoint=request.checkpoint, image_size=request.image_size)
    config = folder.read_config()
    image_size = run_image_size(config)
    images: Images
    if pictures is None:
        dataset = load_data(config.data, request.data_dir)
        images = RunImages(dataset, request.num_images or config.num_measured, device)
    else:
        # The model's own config is its architecture's; what the run was trained on is the data set's.
        spec = DATASETS[config.data.name]
        trained_on = {"input_size": (3, *image_size), "mean": spec.mean, "std": spec.std}
        prepared_by = f"as its data set, {config.data.name}, says"
        images = PreparedImages(pictures, resolve_data_config(trained_on, model=model), prepared_by)
    return Subject(
        text=text,
        label=folder.path.resolve().name,
        model=model,
        images=images,
        image_size=image_size,
        batch_size=MEASURING_BATCH if pictures is None else None,
        run=folder,
        precision="float64",
        epoch=folder.read_result()["best_epoch"],
    )


def _open_model(text: str, request: Request, pictures: Pictures, device: torch.device) -> Subject:
    sourced = open_source(
        text,
        only_one=len(request.models) == 1,
        pretrained=request.pretrained,
        checkpoint=request.checkpoint,
        seed=request.seed,
        device=device,
        image_size=request.image_size,
    )
    images = PreparedImages(pictures, sourced.data_config, sourced.prepared_by)
    config = {
        "model": text,
        "label": sourced.label,
        "seed": request.seed,
        "images": {"from": pictures.name, "num": len(pictures)},
        "preparation": {**sourced.data_config, "from": sourced.prepared_by},
    }
    return Subject(
        text=text,
        label=sourced.label,
        model=sourced.model,
        images=images,
        image_size=sourced.image_size,
        config=config,
        notes=sourced.notes,
    )


def check_named(texts: Sequence[str], *, pretrained: bool, checkpoint: Path | None) -> None:
    """Of several models, those that leave the choice follow --pretrained; one at least must."""
    for text in texts:
        if texts.count(text) > 1:
            raise InputError(f"{text} is named twice; name each model once")
    if checkpoint is not None and len(texts) > 1:
        raise InputError("--checkpoint is for one model, but several are named; take that one on its own")
    if pretrained and all(Path(text).is_dir() for text in texts):
        raise InputError("--pretrained is for models of timm and torchvision; a run has its own weights")


def open_run(text: str, *, checkpoint: Path | None, image_size: int | None = None) -> tuple[RunFolder, nn.Module]:
    """A complete run and its model."""
    folder = RunFolder(Path(text))
    if _is_of_transformers(folder.path):
        raise InputError(f"{text} is not a run but a model of transformers; write hf:{text}")
    folder.read_config()
    for option, value in (("--checkpoint", checkpoint), ("--image-size", image_size)):
        if value is not None:
            raise InputError(f"{option} does not go with {text}: a run has its own weights and image size")
    folder.check_weights()
    model = load_model(folder.model)
    folder.read_provenance()  # without it a run is not complete
    return folder, model


def run_image_size(config: RunConfig) -> tuple[int, int]:
    """Rows and columns of the images a run was trained on."""
    side = config.data.image_size or dataset_spec(config.data.name).image_size
    return side, side


def open_source(
    text: str,
    *,
    only_one: bool,
    pretrained: bool,
    checkpoint: Path | None,
    seed: int,
    device: torch.device,
    image_size: int | None = None,
) -> SourcedModel:
    """A model that is not a run, tried on an image."""
    if ":" not in text and ("/" in text or text.startswith(".")):
        raise InputError(f"{text} is not a folder, so there is no run there; models of the hub are written hf:org/name")
    check_number("--seed", seed)
    with seeded(seed):
        sourced = load_source(
            text,
            # In a comparison it is for the models that leave the choice; for a single one without, it is refused.
            pretrained=pretrained and (only_one or has_published_weights(text)),
            checkpoint=checkpoint,
            image_size=image_size,
        )
    try_forward(sourced, device)
    return sourced


def distinct_labels(labels: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Names for people; what the user wrote where two would share one, as runs of one name in different folders."""
    return [text if labels.count(label) > 1 else label for label, text in zip(labels, texts, strict=True)]


def _is_of_transformers(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):  # whatever is wrong with it, reading it as a run says so
        return False


def part_of(subject: Subject, span: range) -> Subject:
    """A subject with some of its images."""
    images: Images = subject.images
    if isinstance(images, PreparedImages):
        images = replace(images, pictures=images.pictures.chosen(span))
    else:
        chosen = measuring_subset(len(images.dataset.test), images.num_images)[span.start : span.stop]
        dataset = replace(images.dataset, test=images.dataset.test.select(chosen))
        images = RunImages(dataset, len(span), images.device)
    return replace(subject, images=images)


def images_record(images: Images) -> dict[str, Any]:
    """Which images, and how they are prepared; not where they are."""
    if isinstance(images, PreparedImages):
        return {"pictures": images.pictures.digest(), "preparation": dict(images.data_config)}
    return {"data": images.dataset.fingerprint, "num": len(images)}
