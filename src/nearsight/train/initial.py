"""The model that a run begins with: fresh weights of its seed, or published ones, those of a file, or of another run
(`RunConfig.weights`)."""

from pathlib import Path

import torch
from torch import nn

from nearsight.models import load_source
from nearsight.models.checkpoints import load_weights, read_weights
from nearsight.train.config import RunConfig
from nearsight.train.dino.config import DinoConfig
from nearsight.train.folder import RunFolder

PRETRAINED = "pretrained"
"""Those that timm has for the model's own name."""


def untrained_model(config: RunConfig | DinoConfig, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """A run's model before its first step, made on the CPU so that it is the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = config.model.build(image_size, num_classes)
    if isinstance(config, RunConfig) and config.weights is not None:
        _load(model, config.weights, config.model.name)
    return model


def _load(model: nn.Module, source: str, name: str) -> None:
    """Load weights as far as they are those of the model.

    All in front of the classifier must be there; a classifier for other classes keeps its fresh weights, as do parts of
    LocAt that the source has not. timm resamples positions for another grid.
    """
    path = Path(source)
    if path.is_dir():
        RunFolder(path).check_weights()
        path = RunFolder(path).model
    if path.is_file() or Path(source).is_dir():
        load_weights(model, read_weights(path), path)
        return
    published = load_source(name if source == PRETRAINED else source, pretrained=True).model
    load_weights(model, published.state_dict(), source)
