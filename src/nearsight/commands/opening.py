"""Models as users name them, for every command that takes some: runs, and anything `load_source` knows."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError, check_number
from nearsight.models import load_model, load_source
from nearsight.models.sources import SourcedModel, has_published_weights, try_forward
from nearsight.train import RunConfig, RunFolder


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
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
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
