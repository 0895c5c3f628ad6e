"""What every source gives, and what the sources share."""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.data import DEFAULT_CROP_PCT, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import nn

from nearsight.errors import InputError, check_side

MOST_LAYERS = 1000
"""Of a kind, in a config that comes from a file."""
_NUM_LAYERS = re.compile(r".*(layers?|depths?|blocks?)")
"""Settings that say how many there are."""


OWN, ASSUMED = "as the model's own configuration says", "assumed: the model does not say"
"""Where its mean and deviation are from: they move attention, so nobody should have to guess."""


class ImageSizeError(InputError):
    """A model does not say which images it takes, or fails on those: --image-size may help."""


@dataclass(frozen=True, kw_only=True)
class SourcedModel:
    """A model that is ready to be looked at, and how images have to be prepared for it."""

    label: str
    """Its name for people, with what its weights are."""
    model: nn.Module
    """In eval mode; takes normalised images [B, 3, H, W]."""
    data_config: Mapping[str, Any] = field(default_factory=dict)
    """What `timm.data.create_transform` wants: input_size, mean, std, interpolation, crop_pct, crop_mode."""
    prepared_by: str = OWN
    """Who says so: the model, or nobody, so that it is assumed."""
    notes: tuple[str, ...] = ()
    """What was done or assumed on the way, a sentence each."""

    @property
    def image_size(self) -> tuple[int, int]:
        _, rows, columns = self.data_config["input_size"]
        return int(rows), int(columns)


def preparation(
    image_size: tuple[int, int],
    *,
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN,
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
    interpolation: str = "bicubic",
    resize_to: int | None = None,
    crop_mode: str = "center",
) -> dict[str, Any]:
    """A data config. `resize_to`: the side an image is resized to before `image_size` is cut out of it."""
    # timm divides by the fraction and rounds down: a thousandth of a pixel keeps that from ending one pixel short.
    crop_pct = 1.0 if resize_to is None or resize_to == image_size[0] else image_size[0] / (resize_to + 1e-3)
    return {
        "input_size": (3, *image_size),
        "mean": tuple(mean),
        "std": tuple(std),
        "interpolation": interpolation,
        "crop_pct": crop_pct,
        "crop_mode": crop_mode,
    }


def check_preparation(label: str, config: Mapping[str, Any], *, size_is_asked_for: bool) -> None:
    """Refuse a data config, which may come from a file, by which no image can be prepared."""
    try:
        _, *sides = config["input_size"]
        share = config.get("crop_pct") or DEFAULT_CROP_PCT
        for side in () if size_is_asked_for else sides:
            check_side("the side of its images", side)
            check_side("the side that they are resized to", side / share)
        mean, std = (tuple(map(float, config[name])) for name in ("mean", "std"))
        if not all(len(values) in (1, 3) and all(map(math.isfinite, values)) for values in (mean, std)) or not all(std):
            raise InputError(f"images cannot be normalised by mean {list(mean)} and deviation {list(std)}")
        create_transform(**config, is_training=False)
    except InputError as error:
        raise InputError(f"{label}: {error}") from error
    except (ArithmeticError, AssertionError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{label} does not say how its images are prepared: {one_line(error)}") from error


def check_layers(label: str, settings: Any, name: str = "") -> None:
    """Refuse a config with more layers than any model has: each is built before its weights are looked for."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            check_layers(label, value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            check_layers(label, value, name)
    elif isinstance(settings, int) and settings > MOST_LAYERS and _NUM_LAYERS.fullmatch(name):
        raise InputError(f"{label} has a config with {name} {settings}, but {MOST_LAYERS} are the most")


def check_weights(folder: Path, endings: tuple[str, ...], build: Callable[[], nn.Module]) -> None:
    """Refuse the config of a model that is far larger than the files of weights beside it, which have these endings."""
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in endings)
    try:
        with torch.device("meta"):  # on which weights take no memory
            num_weights = sum(weight.numel() for weight in build().parameters())
    except Exception as error:
        if "meta" in str(error):  # on which not all models can be built
            return
        raise InputError(
            f"{folder / 'config.json'} asks for a model that cannot be built: {one_line(error)}"
        ) from error
    # A byte at least for each; some may be missing, those behind the last attention above all.
    if num_weights > 2 * num_bytes > 0:
        raise InputError(
            f"{folder / 'config.json'} asks for {num_weights} weights, but the files beside it have {num_bytes} bytes"
        )


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of another library's error as part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Libraries that load from the hub log retries and load reports; what matters of them becomes an error or note."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def downloading(name: str, fetch: Callable[[], Any]) -> Any:
    """What `fetch` gives; no network, no such repository and no such file become one line."""
    try:
        with quiet():
            return fetch()
    except OSError as error:  # also the hub's own errors and those of urllib
        raise InputError(
            f"{name} could not be loaded: {one_line(error)}; check the name and the network, or give local weights"
        ) from error


def try_forward(sourced: SourcedModel, device: torch.device) -> None:
    """One image through the model: what its own forward does not take is an error of the caller, and named as one."""
    rows, columns = sourced.image_size
    parameter = next(sourced.model.parameters(), torch.empty(0))
    home, dtype = parameter.device, parameter.dtype
    try:
        with torch.no_grad():
            sourced.model.to(device)(torch.zeros(1, 3, rows, columns, device=device, dtype=dtype))
            sourced.model.to(home)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{sourced.label} does not fit into the memory of {device} with one image of {rows}×{columns} pixels; "
            "use --device cpu or a smaller --image-size"
        ) from error
    except Exception as error:  # the model may raise anything
        raise ImageSizeError(
            f"{sourced.label} fails on an image of {rows}×{columns} pixels: {type(error).__name__}: {one_line(error)}; "
            "if it wants another size, say so with --image-size"
        ) from error
