"""Distillation: a trained model's predictions in the place of labels (S2 trains Jumbo so; Fuller et al. 2026).

Shape suffixes: K cells, B samples, C channels or classes, H rows, W columns.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nearsight.augment import grey_levels
from nearsight.data import Dataset
from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.models import load_model, load_source
from nearsight.train.folder import RunFolder


@dataclass(frozen=True)
class Teacher:
    """A model that does not learn. It sees what its pupils see, prepared as it was when it learned itself."""

    model: nn.Module
    scale_C: Tensor
    """From images as the data set normalises them to images as the teacher's did: x · scale + shift."""
    shift_C: Tensor

    @classmethod
    def load(cls, name: str, dataset: Dataset, device: torch.device) -> "Teacher":
        """The best weights of a run folder, or a model of `load_source` with its published weights."""
        if Path(name).is_dir():
            folder = RunFolder(Path(name))
            if folder.is_pretraining:
                raise InputError(
                    f"teacher {name} was pretrained without labels and has no classes; take a labelled run"
                )
            folder.check_weights()
            spec = dataset_spec(folder.read_config().data.name)
            model, mean, std = load_model(folder.model), spec.mean, spec.std
        else:
            sourced = load_source(name, pretrained=True)
            model, mean, std = sourced.model, sourced.data_config["mean"], sourced.data_config["std"]
        own_mean_C, own_std_C = grey_levels(mean, device), grey_levels(std, device)
        mean_C, std_C = grey_levels(dataset.mean, device), grey_levels(dataset.std, device)
        teacher = cls(
            model.to(device).eval().requires_grad_(False), std_C / own_std_C, (mean_C - own_mean_C) / own_std_C
        )
        teacher._check(name, dataset, device)
        return teacher

    def _check(self, name: str, dataset: Dataset, device: torch.device) -> None:
        if getattr(self.model, "num_classes", None) == 0:  # its features would pass for classes
            raise InputError(f"teacher {name} has no classifier; take a model that was trained on {dataset.name}")
        try:
            answer = self(torch.zeros(1, 1, 3, *dataset.image_size, device=device))
        except (AssertionError, RuntimeError) as error:
            raise InputError(f"teacher {name} does not take images of {dataset.image_size} pixels: {error}") from error
        if answer.shape[-1] != dataset.num_classes:
            raise InputError(
                f"teacher {name} knows {answer.shape[-1]} classes, but {dataset.name} has {dataset.num_classes}"
            )

    @torch.no_grad()
    def __call__(self, images_KBCHW: Tensor, *, reduced: bool = False) -> Tensor:
        """What it takes normalised images for: class distributions [K, B, C]."""
        images = images_KBCHW.flatten(0, 1) * self.scale_C[:, None, None] + self.shift_C[:, None, None]
        with torch.autocast(images.device.type, torch.bfloat16, enabled=reduced):
            logits: Tensor = self.model(images)
        by_cell: Tensor = logits.float().softmax(-1).unflatten(0, images_KBCHW.shape[:2])
        return by_cell
