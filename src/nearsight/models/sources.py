"""Where models come from: timm, transformers, torchvision, and the user's own code, each named in one word.

vit_base_patch16_224.augreg_in21k    a name timm knows, with or without a tag; this package's models, too
compact_vit.modern_cifar100          of the zoo (nearsight.models.zoo): its trained weights
hf-hub:org/name, local-dir:FOLDER    a repository on the hub, or a folder, that timm or `nearsight share` wrote
hf:org/name, hf:FOLDER               Hugging Face transformers
torchvision:vit_b_16                 torchvision
package.module:function              a function that returns a torch.nn.Module
"""

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_data_config
from torch import nn
from torchvision.models import VisionTransformer, get_model, get_model_weights, list_models
from torchvision.models.vision_transformer import interpolate_embeddings

from nearsight.errors import InputError, unknown_name
from nearsight.files import read_object
from nearsight.models.checkpoints import load_checkpoint
from nearsight.models.factory import check_model_name, create_model
from nearsight.models.hugging_face import load_hugging_face
from nearsight.models.sourced import (
    ASSUMED,
    OWN,
    ImageSizeError,
    SourcedModel,
    check_layers,
    check_preparation,
    check_weights,
    downloading,
    one_line,
    preparation,
    try_forward,
)
from nearsight.models.zoo import MODELS

__all__ = ["ImageSizeError", "SourcedModel", "has_published_weights", "load_source", "try_forward"]

_HUGGING_FACE, _TORCHVISION = "hf:", "torchvision:"
_LOCAL, _HUB = "local-dir:", ("hf-hub:", "hf_hub:")
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")
_OF_MODELS = (AssertionError, KeyError, RuntimeError, TypeError, ValueError)
_OF_FILES = (Exception,)
"""What building a model raises: of settings that do not fit, and of files, which may be damaged in any way."""
_PREFIXES = (*_HUB, _LOCAL)


def _is_factory(text: str) -> bool:
    return ":" in text and not text.startswith((_HUGGING_FACE, _TORCHVISION, *_PREFIXES))


def has_published_weights(text: str) -> bool:
    """Whether --pretrained chooses between random and published weights of this source."""
    return not text.startswith(_HUGGING_FACE) and not _is_factory(text)


def _is_trained(text: str) -> bool:
    """Whether the name is one of weights: they are loaded without --pretrained, too."""
    return text in MODELS or text.startswith(_PREFIXES)


def load_source(
    text: str, *, pretrained: bool = False, checkpoint: Path | None = None, image_size: int | None = None
) -> SourcedModel:
    """The model that `text` names, in eval mode, and how its images are prepared.

    Args:
        text: one of the forms above.
        pretrained: with the published weights; otherwise random ones, drawn from torch's global generator. Models of
            the zoo, of hubs and folders, of transformers and of the user's own code bring their weights along.
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
        model, config, prepared_by, notes = load_hugging_face(text.removeprefix(_HUGGING_FACE), image_size=image_size)
        folder = Path(text.removeprefix(_HUGGING_FACE))
        check_preparation(text, config, size_is_asked_for=image_size is not None)
        label = f"{_HUGGING_FACE}{folder.resolve().name}" if folder.is_dir() else text
        return SourcedModel(label=label, model=model.eval(), data_config=config, prepared_by=prepared_by, notes=notes)
    if text.startswith(_TORCHVISION):
        name = text.removeprefix(_TORCHVISION)
        model, config, prepared_by = _load_torchvision(name, pretrained=pretrained, image_size=image_size)
    elif _is_factory(text):
        model, config = _load_from_factory(text, image_size=image_size)
        prepared_by = _who_says(model)
    else:
        with_weights = pretrained or (checkpoint is None and _is_trained(text))
        model, config = _load_timm(text, pretrained=with_weights, image_size=image_size)
        prepared_by = _who_says(model)
    check_preparation(text, config, size_is_asked_for=image_size is not None)
    sourced = SourcedModel(label=text, model=model.eval(), data_config=config, prepared_by=prepared_by)
    if checkpoint is not None:
        note = load_checkpoint(model, checkpoint)
        return replace(sourced, label=f"{text} ({checkpoint.name})", notes=(note,))
    if has_published_weights(text) and not _is_trained(text):
        return replace(sourced, label=f"{text} ({'pretrained' if pretrained else 'random weights'})")
    return sourced


def _load_timm(name: str, *, pretrained: bool, image_size: int | None) -> tuple[nn.Module, dict[str, Any]]:
    if pretrained and not name.startswith(_PREFIXES):
        _check_published(name)
    if name.startswith(_LOCAL):
        _check_size(name, Path(name.removeprefix(_LOCAL)))
    if name.startswith(_HUB):
        _check_size(name, downloading(name, lambda: _fetched(name)))
    model = downloading(name, lambda: _built_by_timm(name, pretrained=pretrained, image_size=image_size))
    wanted = {} if image_size is None else {"input_size": (3, image_size, image_size)}
    return model, resolve_data_config(wanted, model=model)


def _check_size(name: str, folder: Path) -> None:
    """Refuse a config that asks for an endless model; where there is no config, timm says so."""
    if (folder / "config.json").exists():
        check_layers(name, read_object(folder / "config.json", missing=str(folder)))
        check_weights(folder, _WEIGHTS, lambda: _built_by_timm(name, pretrained=False, image_size=None))


def _fetched(name: str) -> Path:
    """The folder in the hub's cache that has the config and, where there is one, the file of safetensors."""
    # Here, because timm takes a while to need it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    repository, _, revision = name.partition(":")[2].partition("@")
    try:
        config = hf_hub_download(repository, "config.json", revision=revision or None)
        with contextlib.suppress(EntryNotFoundError):  # other formats are timm's to find
            hf_hub_download(repository, "model.safetensors", revision=revision or None)
    except HFValidationError as error:
        raise InputError(f"{name} names no repository of the hub: {one_line(error)}") from error
    return Path(config).parent


def _check_published(name: str) -> None:
    """Refuse a model without published weights; a wrong name or tag is reported first."""
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


def _built_by_timm(name: str, *, pretrained: bool, image_size: int | None) -> nn.Module:
    from_files = name.startswith(_PREFIXES)
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


def _load_torchvision(name: str, *, pretrained: bool, image_size: int | None) -> tuple[nn.Module, dict[str, Any], str]:
    if name not in list_models():
        raise unknown_name("torchvision model", name, list_models())
    weights = getattr(get_model_weights(name), "DEFAULT", None)
    if weights is None and pretrained:
        raise InputError(f"torchvision has no published weights for {name}; leave out --pretrained")
    config, prepared_by = _prepared_for_torchvision(name, weights, image_size)
    return _built_by_torchvision(name, weights if pretrained else None, config["input_size"][-1]), config, prepared_by


def _prepared_for_torchvision(name: str, weights: Any, image_size: int | None) -> tuple[dict[str, Any], str]:
    """From the weights' entry, whether or not they are loaded: a random model is compared with the trained one."""
    transforms: Any = None if weights is None else weights.transforms()
    if not hasattr(transforms, "crop_size"):
        if image_size is None:
            raise ImageSizeError(f"torchvision does not say which images {name} takes; say so with --image-size")
        return preparation((image_size, image_size)), ASSUMED
    (crop,), (resize,) = transforms.crop_size, transforms.resize_size
    side = crop if image_size is None else image_size
    config = preparation(
        (side, side),
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        interpolation=transforms.interpolation.value,
        resize_to=round(resize * side / crop),
    )
    return config, OWN


def _built_by_torchvision(name: str, weights: Any, image_size: int) -> nn.Module:
    # Only the plain ViT is built for one size. Its default is 224, even where its published weights are for 518.
    is_vit = name.startswith("vit_")
    try:
        model: nn.Module = get_model(name, weights=None, **({"image_size": image_size} if is_vit else {}))
    except Exception as error:
        raise InputError(f"torchvision cannot build {name}: {one_line(error)}") from error
    if weights is not None:
        state = downloading(f"torchvision:{name}", lambda: weights.get_state_dict(progress=False, check_hash=True))
        if isinstance(model, VisionTransformer):
            state = interpolate_embeddings(image_size, model.patch_size, state)
        model.load_state_dict(state)
    return model


def _load_from_factory(text: str, *, image_size: int | None) -> tuple[nn.Module, dict[str, Any]]:
    with _current_folder_importable():
        model = _call(text, _find(text))
    config = _own_config(model)
    if image_size is not None:
        config["input_size"] = (3, image_size, image_size)
    if "input_size" not in config:
        raise ImageSizeError(f"the model of {text} does not say which images it takes; say so with --image-size")
    return model, resolve_data_config(pretrained_cfg=config)


def _own_config(model: nn.Module) -> dict[str, Any]:
    """What a model of timm, or one that follows its custom, says about its images."""
    config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    config = config if isinstance(config, Mapping) else config.to_dict()
    known = {name: value for name, value in config.items() if value is not None}
    # The config is its name's: built for another size than that, the model says so in its patches alone.
    match getattr(getattr(model, "patch_embed", None), "img_size", None):
        case int(side):
            known["input_size"] = (3, side, side)
        case (int(rows), int(columns)):
            known["input_size"] = (3, rows, columns)
    return known


def _who_says(model: nn.Module) -> str:
    """How the images of a model of timm, or of one that follows its custom, are normalised."""
    return OWN if _own_config(model).keys() >= {"mean", "std"} else ASSUMED


OWN_MODELS = "NEARSIGHT_MODELS"
"""Environment variable: models of the user's own code that may be imported, as in "mine:my_vit other:vit"."""


def allow_own(text: str) -> None:
    """Let a name that was typed be imported, here and by the processes that this one starts. One that stands in a file
    is not: to read a run must not be to run code."""
    if _is_factory(text):
        os.environ[OWN_MODELS] = " ".join({*_allowed(), text})


def _allowed() -> list[str]:
    return os.environ.get(OWN_MODELS, "").split()


def check_own(text: str) -> None:
    """Refuse a function of the user's own code that nobody typed, or that is not there."""
    if not _is_factory(text):
        raise InputError(f"{text!r} is not a model timm knows, nor module:function for one of your own")
    if text not in _allowed():
        raise InputError(
            f"{text!r} is code of your own, which is imported only where you name it; if you trust it, write "
            f"{OWN_MODELS}={text} in front of the command"
        )
    with _current_folder_importable():
        if not callable(found := _find(text)):
            raise InputError(f"{text} is {_a(found)}, but a function that returns a model is needed")


def build_own(text: str, **settings: Any) -> nn.Module:
    """What such a function returns; `check_own` has let it pass."""
    with _current_folder_importable():
        return _checked(text, _find(text)(**settings))


def _find(text: str) -> Any:
    """The function that is named, after importing its module."""
    module_name, _, path = text.partition(":")
    if not path or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise InputError(f"{text!r} does not name a function as package.module:function does")
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(f"module {module_name} cannot be imported: {one_line(error)}") from error
        raise InputError(
            f"there is no module {error.name} in the current folder or among the installed packages (for {text})"
        ) from error
    except (Exception, SystemExit) as error:  # whatever the user's code does
        raise InputError(f"module {module_name} cannot be imported: {_named(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            names = [known for known in dir(found) if not known.startswith("_")]
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"module {module_name} has no {path!r}{hint}")
        found = getattr(found, name)
    return found


def _call(text: str, factory: Any) -> nn.Module:
    if isinstance(factory, nn.Module):
        raise InputError(f"{text} is a model; name a function that builds it, so that it is built when it is needed")
    if not callable(factory):
        raise InputError(f"{text} is {_a(factory)}, but a function that returns a model is needed")
    try:
        model = factory()
    except (Exception, SystemExit) as error:
        raise InputError(f"{text}() failed: {_named(error)}; it is called without arguments") from error
    return _checked(text, model)


def _checked(text: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InputError(f"{text}() returned {_a(model)}, but a torch.nn.Module is needed")
    return model


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """As when Python runs a script of this folder; only while the model is built, so that nothing else is shadowed."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have changed the list
            sys.path.remove(folder)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _a(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
