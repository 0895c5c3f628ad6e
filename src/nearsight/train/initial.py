"""The model that a run begins with: fresh weights of its seed, or published ones, those of a file, or of another run
(`RunConfig.weights`).

Models from elsewhere were trained on images that were normalised in their own way. Of a run and of a model with
published weights that is known, of a file its user may say so, and the patch embedding takes it over:
w · (s·x + t) + b = (w·s) · x + (b + Σ w·t), so that a model first computes of a picture what it always did.
"""

from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import Tensor, nn

from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.models import load_source
from nearsight.models.checkpoints import load_weights, read_weights
from nearsight.randomness import seeded
from nearsight.train.config import RunConfig
from nearsight.train.dino.config import DinoConfig
from nearsight.train.folder import RunFolder

PRETRAINED = "pretrained"
"""Those that timm has for the model's own name."""


class _Seen(NamedTuple):
    """How images are normalised."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def untrained_model(config: RunConfig | DinoConfig, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """A run's model before its first step, made on the CPU so that it is the same everywhere."""
    with seeded(config.seed):
        model = config.model.build(image_size, num_classes)
    if isinstance(config, RunConfig) and config.weights is not None:
        seen = _load(model, config.weights, config)
        spec = dataset_spec(config.data.name)
        if seen is not None and seen != (now := _Seen(spec.mean, spec.std)):
            _take_over(model, seen, now)
    return model


def _load(model: nn.Module, source: str, config: RunConfig) -> _Seen | None:
    """Load weights as far as they are those of the model; how their images were normalised, if that is known.

    All in front of the classifier must be there; a classifier for other classes keeps its fresh weights, as do parts of
    LocAt that the source has not. timm resamples positions for another grid.
    """
    path = Path(source)
    if path.is_dir():
        folder = RunFolder(path)
        folder.check_weights()
        load_weights(model, read_weights(folder.model), folder.model)
        spec = dataset_spec(folder.read_config().data.name)
        return _Seen(spec.mean, spec.std)
    if path.is_file():
        load_weights(model, read_weights(path), path)
        return _as_published(config.model.name) if config.weights_normalized == "model" else None
    published = load_source(config.model.name if source == PRETRAINED else source, pretrained=True)
    load_weights(model, published.model.state_dict(), source)
    return _Seen(tuple(published.data_config["mean"]), tuple(published.data_config["std"]))


def _as_published(name: str) -> _Seen:
    said = None if ":" in name else timm.get_pretrained_cfg(name)
    if said is None:
        raise InputError(f"timm does not say how images of {name} are normalised; leave out --init-normalized model")
    return _Seen(tuple(said.mean), tuple(said.std))


@torch.no_grad()
def _take_over(model: nn.Module, seen: _Seen, now: _Seen) -> None:
    """Make a model that knows images as they were `seen` compute the same of them as they are `now`."""
    embedding = getattr(getattr(model, "patch_embed", None), "proj", None)
    if not isinstance(embedding, nn.Conv2d) or embedding.bias is None or any(embedding.padding):
        return  # what is padded with zeros would change at the border
    scale_C, shift_C = _affine(seen, now)
    embedding.bias += (embedding.weight.sum((2, 3)).double() @ shift_C).float()
    embedding.weight *= scale_C.float().view(1, -1, 1, 1)


def _affine(seen: _Seen, now: _Seen) -> tuple[Tensor, Tensor]:
    """x as it was seen = scale · x as it is now + shift, per channel, float64."""
    (mean_C, std_C), (own_mean_C, own_std_C) = (
        (torch.tensor(each, dtype=torch.float64) for each in one) for one in (now, seen)
    )
    return std_C / own_std_C, (mean_C - own_mean_C) / own_std_C
