"""Models whose features are probed: runs, and anything `load_source` knows, each with how its images are prepared."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nearsight.commands.opening import check_named, distinct_labels, open_run, open_source, run_image_size
from nearsight.data import DATASETS
from nearsight.probe.frozen import FrozenModel
from nearsight.probe.preparation import Preparation


def open_frozen(
    texts: Sequence[str], *, pretrained: bool, checkpoint: Path | None, seed: int, device: torch.device
) -> list[FrozenModel]:
    """Every model that was named. Whatever can be wrong with them is found here."""
    check_named(texts, pretrained=pretrained, checkpoint=checkpoint)
    opened = []
    for text in texts:
        if Path(text).is_dir():
            opened.append(_open_run(text, checkpoint))
            continue
        only_one = len(texts) == 1
        sourced = open_source(
            text, only_one=only_one, pretrained=pretrained, checkpoint=checkpoint, seed=seed, device=device
        )
        mean, std = (tuple(sourced.data_config[name]) for name in ("mean", "std"))
        preparation = Preparation(size=sourced.image_size, mean=mean, std=std)
        opened.append(FrozenModel(label=sourced.label, model=sourced.model, preparation=preparation))
    labels = distinct_labels([one.label for one in opened], texts)
    return [replace(one, label=label) for one, label in zip(opened, labels, strict=True)]


def _open_run(text: str, checkpoint: Path | None) -> FrozenModel:
    folder, model = open_run(text, checkpoint=checkpoint)
    config = folder.read_config()
    # The model's own config is its architecture's; what the run was trained on is the data set's.
    spec = DATASETS[config.data.name]
    preparation = Preparation(size=run_image_size(config), mean=spec.mean, std=spec.std)
    return FrozenModel(label=folder.path.resolve().name, model=model, preparation=preparation)
