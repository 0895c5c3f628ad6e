"""Models that timm builds: its registered names, this package's own among them, and its repositories on the hub."""

import difflib
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_data_config
from torch import nn

from nearsight.errors import InputError
from nearsight.files import read_object
from nearsight.models.factory import check_model_name, create_model
from nearsight.models.sources.base import check_layers, check_weights, downloading, one_line

_LOCAL = "local-dir:"
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")
_OF_MODELS = (AssertionError, KeyError, RuntimeError, TypeError, ValueError)
_OF_FILES = (Exception,)
"""What building a model raises: of settings that do not fit, and of files, which may be damaged in any way."""
PREFIXES = ("hf-hub:", "hf_hub:", _LOCAL)


def load_timm(name: str, *, pretrained: bool, image_size: int | None) -> tuple[nn.Module, dict[str, Any]]:
    if pretrained and not name.startswith(PREFIXES):
        _check_published(name)
    if name.startswith(_LOCAL):
        _check_size(name, Path(name.removeprefix(_LOCAL)))
    model = downloading(name, lambda: _build(name, pretrained=pretrained, image_size=image_size))
    wanted = {} if image_size is None else {"input_size": (3, image_size, image_size)}
    return model, resolve_data_config(wanted, model=model)


def _check_size(name: str, folder: Path) -> None:
    """Refuse a config that asks for a model without end; where there is none, timm says so."""
    if (folder / "config.json").exists():
        check_layers(name, read_object(folder / "config.json", missing=str(folder)))
        check_weights(folder, _WEIGHTS, lambda: _build(name, pretrained=False, image_size=None))


def _check_published(name: str) -> None:
    """Refuse a model without published weights; a name or tag that is wrong is told first."""
    check_model_name(name)
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # a model that has none at all
        config = None
    if config is None or not config.has_weights:
        near = difflib.get_close_matches(name, timm.list_pretrained(), n=1)
        hint = f", or measure one that has them, such as {near[0]}" if near else ""
        raise InputError(
            f"timm has no published weights for {name}; leave out --pretrained, give your own with --checkpoint{hint}"
        )


def _build(name: str, *, pretrained: bool, image_size: int | None) -> nn.Module:
    from_files = name.startswith(PREFIXES)
    build, raised = (timm.create_model, _OF_FILES) if from_files else (create_model, _OF_MODELS)
    try:
        if image_size is not None:
            try:
                model: nn.Module = build(name, pretrained=pretrained, img_size=image_size)
                return model
            except TypeError as error:
                if "img_size" not in str(error):
                    raise
                # Built of convolutions up to its attention: it takes any size, and has no setting for one.
        model = build(name, pretrained=pretrained)
        return model
    except (InputError, OSError):  # the latter of files and networks
        raise
    except raised as error:
        size = "" if image_size is None else f" for images of {image_size} pixels"
        raise InputError(f"timm cannot build {name}{size}: {one_line(error)}") from error
