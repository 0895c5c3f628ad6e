"""Models that timm builds: its registered names, this package's own among them, and its repositories on the hub."""

import difflib
from typing import Any

import timm
from timm.data import resolve_data_config
from torch import nn

from nearsight.errors import InputError
from nearsight.models.factory import check_model_name, create_model
from nearsight.models.sources.base import downloading, one_line

PREFIXES = ("hf-hub:", "hf_hub:", "local-dir:")


def load_timm(name: str, *, pretrained: bool, image_size: int | None) -> tuple[nn.Module, dict[str, Any]]:
    if pretrained and not name.startswith(PREFIXES):
        _check_published(name)
    model = downloading(name, lambda: _build(name, pretrained=pretrained, image_size=image_size))
    wanted = {} if image_size is None else {"input_size": (3, image_size, image_size)}
    return model, resolve_data_config(wanted, model=model)


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
    build = timm.create_model if name.startswith(PREFIXES) else create_model
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
    except InputError:
        raise
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        size = "" if image_size is None else f" for images of {image_size} pixels"
        raise InputError(f"timm cannot build {name}{size}: {one_line(error)}") from error
