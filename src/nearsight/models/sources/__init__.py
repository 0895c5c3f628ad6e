"""Where models come from: timm, transformers, torchvision, and the user's own code, each named in one word.

vit_base_patch16_224.augreg_in21k    a name timm knows, with or without a tag; this package's models, too
hf-hub:org/name                      a repository on the hub that timm wrote
hf:org/name, hf:FOLDER               Hugging Face transformers
torchvision:vit_b_16                 torchvision
package.module:function              a function that returns a torch.nn.Module
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearsight.errors import InputError
from nearsight.models.checkpoints import load_checkpoint
from nearsight.models.sources.base import ImageSizeError, SourcedModel, check_preparation, try_forward
from nearsight.models.sources.factories import load_from_factory
from nearsight.models.sources.hugging_face import load_hugging_face
from nearsight.models.sources.timm_models import PREFIXES, load_timm
from nearsight.models.sources.torchvision_models import load_torchvision

__all__ = ["ImageSizeError", "SourcedModel", "has_published_weights", "load_source", "try_forward"]

_HUGGING_FACE, _TORCHVISION = "hf:", "torchvision:"


def _is_factory(text: str) -> bool:
    return ":" in text and not text.startswith((_HUGGING_FACE, _TORCHVISION, *PREFIXES))


def has_published_weights(text: str) -> bool:
    """Whether a source leaves the choice between random weights and published ones, which --pretrained makes."""
    return not text.startswith(_HUGGING_FACE) and not _is_factory(text)


def load_source(
    text: str, *, pretrained: bool = False, checkpoint: Path | None = None, image_size: int | None = None
) -> SourcedModel:
    """The model that `text` names, in eval mode, and how its images are prepared.

    Args:
        text: one of the forms above.
        pretrained: with the published weights; else they are random, drawn from torch's global generator. Models of
            transformers and of the user's own code bring their weights along.
        checkpoint: a file of weights to load instead.
        image_size: side of the square images in pixels; needed where the model does not say what it takes.
    """
    if pretrained and checkpoint is not None:
        raise InputError("--pretrained and --checkpoint are two sources of weights; choose one")
    if pretrained and not has_published_weights(text):
        raise InputError(f"{text} brings its own weights, so that --pretrained has nothing to choose; leave it out")
    if image_size is not None and image_size < 1:
        raise InputError(f"--image-size is {image_size}, but must be at least 1")
    config: Mapping[str, Any]
    if text.startswith(_HUGGING_FACE):
        if checkpoint is not None:
            raise InputError(
                f"{text} brings its own weights; for others save them in a folder and name it as hf:FOLDER"
            )
        model, config, notes = load_hugging_face(text.removeprefix(_HUGGING_FACE), image_size=image_size)
        folder = Path(text.removeprefix(_HUGGING_FACE))
        check_preparation(text, config, size_is_asked_for=image_size is not None)
        label = f"{_HUGGING_FACE}{folder.resolve().name}" if folder.is_dir() else text
        return SourcedModel(label=label, model=model.eval(), data_config=config, notes=notes)
    if text.startswith(_TORCHVISION):
        name = text.removeprefix(_TORCHVISION)
        model, config = load_torchvision(name, pretrained=pretrained, image_size=image_size)
    elif _is_factory(text):
        model, config = load_from_factory(text, image_size=image_size)
    else:
        model, config = load_timm(text, pretrained=pretrained, image_size=image_size)
    check_preparation(text, config, size_is_asked_for=image_size is not None)
    sourced = SourcedModel(label=text, model=model.eval(), data_config=config)
    if checkpoint is not None:
        note = load_checkpoint(model, checkpoint)
        return replace(sourced, label=f"{text} ({checkpoint.name})", notes=(note,))
    if has_published_weights(text):
        return replace(sourced, label=f"{text} ({'pretrained' if pretrained else 'random weights'})")
    return sourced
