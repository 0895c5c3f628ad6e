"""Models whose features are probed: runs, runs before training, and anything `load_source` knows.

Each comes with how its images are prepared.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from nearsight.commands.opening import check_named, distinct_labels, open_run, open_source, run_image_size
from nearsight.data import DATASETS
from nearsight.errors import InputError
from nearsight.models.sources import ImageSizeError
from nearsight.probe.frozen import FrozenModel, Preparation
from nearsight.train import RunFolder

UNTRAINED = "init:"
"""Before the folder of a run: its model with the weights that its seed started from."""


def run_path(text: str) -> Path | None:
    """The folder of the run that a model is of, trained or not."""
    path = Path(text.removeprefix(UNTRAINED))
    if text.startswith(UNTRAINED) and not path.is_dir():
        raise InputError(f"{path} is not a folder, so there is no run there whose first weights could be probed")
    return path if path.is_dir() else None


def open_frozen(
    texts: Sequence[str],
    *,
    pretrained: bool,
    checkpoint: Path | None,
    seed: int,
    device: torch.device,
    image_size: int | None = None,
    size_to_try: int | None = None,
) -> list[FrozenModel]:
    """Every model that was named. Whatever can be wrong with them is found here.

    Args:
        image_size: side of the square images that the models are opened for, if not what they say; a run has its own.
        size_to_try: the same, only for models that do not say what they take, or fail on it.
    """
    check_named(texts, pretrained=pretrained, checkpoint=checkpoint)
    opened = []
    for text in texts:
        if run_path(text) is not None:
            opened.append(_open_run(text, checkpoint, image_size))
            continue
        open_at = partial(
            open_source,
            text,
            only_one=len(texts) == 1,
            pretrained=pretrained,
            checkpoint=checkpoint,
            seed=seed,
            device=device,
        )
        try:
            sourced = open_at(image_size=image_size)
        except ImageSizeError:
            if size_to_try is None:
                raise
            sourced = open_at(image_size=size_to_try)
        mean, std = (tuple(sourced.data_config[name]) for name in ("mean", "std"))
        preparation = Preparation(size=sourced.image_size, mean=mean, std=std)
        opened.append(FrozenModel(label=sourced.label, model=sourced.model, preparation=preparation))
    labels = distinct_labels([one.label for one in opened], texts)
    return [replace(one, label=label) for one, label in zip(opened, labels, strict=True)]


def _open_run(text: str, checkpoint: Path | None, image_size: int | None) -> FrozenModel:
    if text.startswith(UNTRAINED):
        folder, model = _open_untrained(text, checkpoint, image_size)
    else:
        folder, model = open_run(text, checkpoint=checkpoint, image_size=image_size)
    config = folder.read_config()
    # The model's own config is its architecture's; what the run was trained on is the data set's.
    spec = DATASETS[config.data.name]
    preparation = Preparation(size=run_image_size(config), mean=spec.mean, std=spec.std)
    untrained = "untrained " if text.startswith(UNTRAINED) else ""
    return FrozenModel(label=f"{untrained}{folder.path.resolve().name}", model=model, preparation=preparation)


def _open_untrained(text: str, checkpoint: Path | None, image_size: int | None) -> tuple[RunFolder, nn.Module]:
    if checkpoint is not None:
        raise InputError(f"--checkpoint does not go with {text}, whose weights are fresh")
    if image_size is not None:
        raise InputError(f"--image-size does not go with {text}: a run has its own image size")
    folder = RunFolder(Path(text.removeprefix(UNTRAINED)))
    config = folder.read_config()
    # The classifier is not read, but drawn with the others: DINO has none.
    num_classes = 0 if folder.is_pretraining else DATASETS[config.data.name].num_classes or 1000
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        model = config.model.build(run_image_size(config), num_classes)
    return folder, model.eval()
