"""Models of Hugging Face transformers, from the hub or from a folder.

Only safetensors are read, and no code from the repository is run.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.models.sourced import (
    ASSUMED,
    OWN,
    ImageSizeError,
    check_layers,
    check_weights,
    one_line,
    preparation,
    quiet,
)

_TOWERS = ("vision_model", "vision_tower")
"""Where models of images and text keep the image tower."""
_NOT_FOR_ATTENTION = ("pooler", "head", "classifier")
"""Weights behind the last attention: a checkpoint made for another task may lack them."""
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers, which image processors store."""
_USUAL = "bicubic"


def load_hugging_face(name: str, *, image_size: int | None) -> tuple[nn.Module, dict[str, Any], str, tuple[str, ...]]:
    """The model (of two towers the one for images), how its images are prepared, who says so, and notes."""
    transformers = _transformers()
    folder = _local_folder(name)
    with quiet(), _bars_only_on_a_terminal(transformers):
        _check_size(transformers, folder, name)
        whole = _load(transformers, folder or name)
        processor = _processor_settings(transformers, folder, name)
    tower = next((part for part in _TOWERS if isinstance(getattr(whole, part, None), nn.Module)), None)
    model: nn.Module = getattr(whole, tower) if tower else whole
    notes = [f"only the image tower of {type(whole).__name__} is measured"] if tower else []
    accepted = inspect.signature(model.forward).parameters
    if "pixel_values" not in accepted:
        raise InputError(f"hf:{name} is a {type(model).__name__}, which takes no images; name a vision model")
    try:
        config, assumed = _preparation(name, processor, model.config, image_size)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"the image processor of hf:{name} cannot be used: {one_line(error)}") from error
    notes += assumed
    arguments = _CallArguments(model, config["input_size"][-2:])
    if arguments.needed:
        model.register_forward_pre_hook(arguments, with_kwargs=True)
    notes += arguments.notes
    return model, config, ASSUMED if processor is None else OWN, tuple(notes)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError("hf: models need transformers; install it with: pip install 'nearsight[hf]'") from error


def _local_folder(name: str) -> Path | None:
    """The named folder, or None for a name of the hub."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json, so it holds no model that save_pretrained wrote")
        return folder
    if not name or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InputError(f"hf:{name} names no existing folder; write hf:org/name or hf:FOLDER")
    return None


def _check_size(transformers: Any, folder: Path | None, name: str) -> None:
    """Refuse a config that asks for an endless model, which would be built before its weights are checked."""
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder or name), trust_remote_code=False)
    except Exception:  # whatever is wrong with it, loading says so
        return
    check_layers(f"hf:{name}", config.to_dict())
    if folder is not None:
        build = transformers.AutoModel.from_config
        check_weights(folder, (".safetensors",), lambda: build(config, trust_remote_code=False))


def _load(transformers: Any, place: Path | str) -> Any:
    try:
        model, info = transformers.AutoModel.from_pretrained(
            str(place), use_safetensors=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # OSError for the network and missing files, ValueError for unknown kinds, and others
        raise InputError(f"hf:{place} could not be loaded: {one_line(error)}") from error
    towers = tuple(f"{part}." for part in _TOWERS if hasattr(model, part)) or ("",)
    missing = [
        key
        for key in sorted(info["missing_keys"])
        if key.startswith(towers) and not any(part in key for part in _NOT_FOR_ATTENTION)
    ]
    if missing:
        raise InputError(
            f"hf:{place} lacks {len(missing)} weights of {type(model).__name__}, which would be random: "
            f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        )
    return model


@contextlib.contextmanager
def _bars_only_on_a_terminal(transformers: Any) -> Iterator[None]:
    """Show a download's progress to a person who waits for it; in a log the bar would be a page of noise."""
    bars = transformers.utils.logging
    if sys.stderr.isatty() or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def _processor_settings(transformers: Any, folder: Path | None, name: str) -> dict[str, Any] | None:
    """What the image processor's file says, or None where there is none."""
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(str(folder or name), trust_remote_code=False)
        return dict(processor.to_dict())
    except Exception as error:  # also an unknown kind of processor, or one that needs a further library
        if folder is not None and (folder / "preprocessor_config.json").exists():
            raise InputError(f"{folder / 'preprocessor_config.json'} cannot be used: {one_line(error)}") from error
        return None


def _preparation(
    name: str, settings: Mapping[str, Any] | None, config: Any, image_size: int | None
) -> tuple[dict[str, Any], list[str]]:
    made_for = _pair(getattr(config, "image_size", None))
    asked_for = _pair(image_size)
    if settings is None:
        size = asked_for or made_for
        if size is None:
            raise ImageSizeError(f"hf:{name} does not say which images it takes; say so with --image-size")
        note = (
            f"there is no image processor: images are prepared as {size[0]}×{size[1]} pixels with ImageNet's "
            "mean (0.485, 0.456, 0.406) and deviation (0.229, 0.224, 0.225)"
        )
        return preparation(size), [note]
    resized = settings.get("size") if settings.get("do_resize", True) else None
    resized = dict(resized) if resized else {}
    cropped = dict(settings["crop_size"]) if settings.get("do_center_crop") and settings.get("crop_size") else {}
    shortest = resized.get("shortest_edge")
    size = _height_width(cropped) or _height_width(resized) or _pair(shortest) or made_for or asked_for
    if size is None:
        raise ImageSizeError(f"the image processor of hf:{name} does not say the size of images; use --image-size")
    side = asked_for or size
    before_crop = resized.get("height", shortest) if cropped else None
    return preparation(
        side,
        **_normalisation(settings),
        interpolation=_interpolation(settings.get("resample")),
        resize_to=None if before_crop is None else round(before_crop * side[0] / size[0]),
        # Without a shorter side to keep, the processor changes the aspect ratio, and so must we.
        crop_mode="center" if shortest else "squash",
    ), []


def _normalisation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and deviation for pixels in [0, 1], whatever the processor scales them to before it subtracts its mean."""
    if not settings.get("do_normalize", True):
        return {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    largest = 255 * settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 255
    return {
        "mean": tuple(value / largest for value in settings["image_mean"]),
        "std": tuple(value / largest for value in settings["image_std"]),
    }


def _interpolation(number: Any) -> str:
    """Pillow's 0, nearest, is a choice like the others; bicubic where none is made, or an unknown one."""
    return _INTERPOLATIONS.get(int(number), _USUAL) if number is not None else _USUAL


def _pair(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    rows, columns = (size, size) if isinstance(size, int) else size
    return int(rows), int(columns)


def _height_width(size: Mapping[str, Any]) -> tuple[int, int] | None:
    return (int(size["height"]), int(size["width"])) if size.get("height") and size.get("width") else None


class _CallArguments:
    """Turns a call with plain images into the call that shows the model every patch in its place.

    A hook and not a wrapper, so that modules keep the names they have in transformers.
    """

    def __init__(self, model: nn.Module, image_size: tuple[int, int]) -> None:
        accepted = list(inspect.signature(model.forward).parameters)
        config: Any = model.config
        self._by_name = accepted[0] != "pixel_values"
        made_for = _pair(getattr(config, "image_size", None))
        self._interpolate = made_for not in (None, image_size) and "interpolate_pos_encoding" in accepted
        # Masked autoencoders drop most patches and shuffle the rest, by the order of a random number per patch.
        self._masks = hasattr(config, "mask_ratio") and "noise" in accepted
        if self._masks:
            config.mask_ratio = 0.0
            self._patch_size = _pair(config.patch_size)
        self.needed = self._by_name or self._interpolate or self._masks
        self.notes = ["its masking is switched off: it sees every patch, in order"] if self._masks else []

    def __call__(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if len(args) != 1:
            return args, kwargs
        pixels_BCHW: Tensor = args[0]
        kwargs = {"pixel_values": pixels_BCHW, **kwargs}
        if self._interpolate:
            kwargs.setdefault("interpolate_pos_encoding", True)
        if self._masks:
            assert self._patch_size is not None
            rows, columns = (pixels_BCHW.shape[axis] // self._patch_size[axis] for axis in (-2, -1))
            order = torch.arange(rows * columns, dtype=torch.float32, device=pixels_BCHW.device)
            kwargs.setdefault("noise", order.expand(len(pixels_BCHW), -1))
        return (), kwargs
