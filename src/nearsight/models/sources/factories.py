"""Models of the user's own code: `package.module:function`, called without arguments."""

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from timm.data import resolve_data_config
from torch import nn

from nearsight.errors import InputError
from nearsight.models.sources.base import ImageSizeError, one_line


def load_from_factory(text: str, *, image_size: int | None) -> tuple[nn.Module, dict[str, Any]]:
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
    told = {name: value for name, value in config.items() if value is not None}
    # The config is its name's: built for another size than that, the model says so in its patches alone.
    match getattr(getattr(model, "patch_embed", None), "img_size", None):
        case int(side):
            told["input_size"] = (3, side, side)
        case (int(rows), int(columns)):
            told["input_size"] = (3, rows, columns)
    return told


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
