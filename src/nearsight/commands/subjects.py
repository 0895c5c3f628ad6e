"""What `nearsight measure` measures: models, each with its images, opened and tried before any is measured."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import tyro
from timm.data import resolve_data_config
from torch import nn

from nearsight.commands.options import Common
from nearsight.commands.pictures import Images, Pictures, PreparedImages, RunImages, find_pictures
from nearsight.data import DATASETS
from nearsight.errors import InputError
from nearsight.lens.measuring import Precision
from nearsight.models import load_model, load_source
from nearsight.models.sources import has_published_weights, try_forward
from nearsight.train import RunFolder, load_data
from nearsight.train.heads import MEASURING_BATCH

DEFAULT_NUM_IMAGES = 256


@dataclass(frozen=True, kw_only=True)
class Request(Common):
    """The options that say which models are measured on which images."""

    models: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]", help_behavior_hint="")
    ]
    """A timm name, hf:org/name or hf:FOLDER (transformers), torchvision:NAME, package.module:function, a run folder."""
    images: str | None = None
    """A folder of images, or a data set (see nearsight data list), then its test images; else the embedded set."""
    num_images: int | None = None
    """Images at most; for a run as many as its config says, else 256."""
    pretrained: bool = False
    """Load the published weights of models of timm and torchvision; they are random otherwise."""
    checkpoint: Path | None = None
    """File with your own weights of the model: safetensors, or a state dict that torch.save wrote."""
    image_size: int | None = None
    """Side of the images in pixels, if not the model's own."""
    seed: int = 0
    """Seed of random weights."""


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


def open_subjects(request: Request, device: torch.device) -> list[Subject]:
    """Every model that was named, with its images. Whatever can be wrong with them is found here."""
    _check_weights(request)
    runs = [text for text in request.models if Path(text).is_dir()]
    pictures: Pictures | None = None
    if request.images is not None or len(runs) < len(request.models):
        pictures = find_pictures(request.images, request.num_images or DEFAULT_NUM_IMAGES, request.data_dir)
    subjects = [
        _open_run(text, request, pictures, device) if text in runs else _open_model(text, request, pictures, device)
        for text in request.models
    ]
    labels = [subject.label for subject in subjects]
    # Runs of one name in different folders, say.
    return [
        replace(subject, label=subject.text) if labels.count(subject.label) > 1 else subject for subject in subjects
    ]


def short_name(text: str) -> str:
    """A model's name as part of a file name."""
    text = text.removesuffix("/")
    for prefix in ("", "hf:"):
        if text.startswith(prefix) and Path(text.removeprefix(prefix)).is_dir():
            text = prefix + Path(text.removeprefix(prefix)).resolve().name
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:80] or "model"


def _check_weights(request: Request) -> None:
    """Of several models, those that leave the choice follow --pretrained; one at least must."""
    texts = request.models
    for text in texts:
        if texts.count(text) > 1:
            raise InputError(f"{text} is named twice; name each model once")
    if request.checkpoint is not None and len(texts) > 1:
        raise InputError("--checkpoint is for one model, but several are named; measure that one on its own")
    if request.pretrained and all(Path(text).is_dir() for text in texts):
        raise InputError("--pretrained is for models of timm and torchvision; a run has its own weights")


def _open_run(text: str, request: Request, pictures: Pictures | None, device: torch.device) -> Subject:
    folder = RunFolder(Path(text))
    if _is_of_transformers(folder.path):
        raise InputError(f"{text} is not a run but a model of transformers; write hf:{text}")
    config = folder.read_config()
    for option, value in (("--checkpoint", request.checkpoint), ("--image-size", request.image_size)):
        if value is not None:
            raise InputError(f"{option} does not go with {text}: a run has its own weights and image size")
    model = load_model(folder.model)
    folder.read_provenance()  # without it a run is not complete
    image_size = cast("Any", model.patch_embed).img_size
    images: Images
    if request.images is None:
        dataset = load_data(config.data, request.data_dir)
        images = RunImages(dataset, request.num_images or config.num_measured, device)
    else:
        assert pictures is not None
        # The model's own config is its architecture's; what the run was trained on is the data set's.
        spec = DATASETS[config.data.name]
        trained_on = {"input_size": (3, *image_size), "mean": spec.mean, "std": spec.std}
        images = PreparedImages(pictures, resolve_data_config(trained_on, model=model))
    return Subject(
        text=text,
        label=folder.path.resolve().name,
        model=model,
        images=images,
        image_size=image_size,
        batch_size=MEASURING_BATCH if request.images is None else None,
        run=folder,
        precision="float64",
        epoch=folder.read_result()["best_epoch"],
    )


def _is_of_transformers(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # whatever is wrong with it, reading it as a run says so
        return False


def _open_model(text: str, request: Request, pictures: Pictures | None, device: torch.device) -> Subject:
    assert pictures is not None
    if ":" not in text and ("/" in text or text.startswith(".")):
        raise InputError(
            f"{text} is not a folder, so there is no run to measure there; models of the hub are written hf:org/name"
        )
    only_one = len(request.models) == 1
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(request.seed)
        sourced = load_source(
            text,
            # In a comparison it is for the models that leave the choice; for a single one without, it is refused.
            pretrained=request.pretrained and (only_one or has_published_weights(text)),
            checkpoint=request.checkpoint,
            image_size=request.image_size,
        )
    try_forward(sourced, device)
    images = PreparedImages(pictures, sourced.data_config)
    config = {
        "model": text,
        "label": sourced.label,
        "seed": request.seed,
        "images": {"from": pictures.name, "num": len(pictures)},
        "preparation": dict(sourced.data_config),
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
