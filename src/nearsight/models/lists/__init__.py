"""Lists of models for `nearsight atlas`: ready ones, which are the TOML files beside this one, and files of your own.

    about = "What these models have in common"

    [[model]]
    model = "vit_tiny_patch16_224"            # as nearsight measure takes it
    checkpoint = "weights/my.safetensors"     # in the folder of the list, or below
    trained_on = "ImageNet-21k"

A list comes from a file, perhaps somebody else's, so nothing in it is run and nothing outside its folder is read.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from nearsight.configuration import decode
from nearsight.errors import InputError, check_side, unknown_name
from nearsight.files import check_file
from nearsight.models.zoo import MODELS

RANDOM = ", random weights"
"""The end of the label of an architecture without training."""
_FOLDER = Path(__file__).parent
_MOST_BYTES = 2**20
_MOST_MODELS = 1000
_MOST_CHARACTERS = 2000
"""Of a text."""
_OWN_WEIGHTS = ("hf:", "hf-hub:", "hf_hub:", "local-dir:")


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """A model of a list: which, with which weights, and what people should know of it."""

    model: str
    """As `nearsight measure` takes it: a name of timm or of the zoo, hf-hub:…, hf:…, torchvision:…, or a run folder."""
    label: str = ""
    """Its name for people; the model's own where there is none."""
    pretrained: bool = False
    """With the published weights of timm or torchvision."""
    checkpoint: str | None = None
    """File with its weights, in the folder of the list or below."""
    image_size: int | None = None
    """Side of the images in pixels, if not the model's own."""
    mean: tuple[float, float, float] | None = None
    """Of the normalisation, per channel, if not the model's own; with `std`."""
    std: tuple[float, float, float] | None = None
    citation: str = ""
    """Who made it, and where that is published."""
    licence: str = ""
    """Of the weights; by default what timm says."""
    trained_on: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
                raise InputError(f"{name} has {len(value)} characters, but {_MOST_CHARACTERS} are the most")
        if not self.model:
            raise InputError("a model is not named; write model = …")
        prefix = self.model.partition(":")[0] + ":"
        if ":" in self.model and prefix not in (*_OWN_WEIGHTS, "torchvision:"):
            raise InputError(
                f"{self.model} names a function, but lists do not run code; use nearsight measure {self.model}"
            )
        if self.pretrained and self.checkpoint is not None:
            raise InputError(f"{self.model} has both pretrained and a checkpoint; choose one")
        if self.image_size is not None:
            check_side(f"image_size of {self.model}", self.image_size)
        if (self.mean is None) != (self.std is None) or (self.std is not None and min(self.std) <= 0):
            raise InputError(f"{self.model} needs both mean and std to be normalised by, and no std of 0 or less")

    @property
    def name(self) -> str:
        return self.label or self.model

    @property
    def is_trained(self) -> bool:
        """Whether it has weights that somebody trained."""
        return (
            self.pretrained
            or self.checkpoint is not None
            or self.model in MODELS
            or self.model.startswith(_OWN_WEIGHTS)
            or Path(self.model).is_dir()
        )

    def untrained(self) -> ListedModel | None:
        """The same architecture with random weights; None where its source has no such thing."""
        if not self.is_trained or self.model.startswith(_OWN_WEIGHTS) or Path(self.model).is_dir():
            return None
        architecture = self.model.partition(".")[0] if self.model in MODELS else self.model
        size = "" if self.image_size is None else f" at {self.image_size} px"
        return replace(
            self,
            model=architecture,
            label=f"{architecture.partition('.')[0]}{size}{RANDOM}",
            pretrained=False,
            checkpoint=None,
            citation="",
            licence="",
            trained_on="",
            note="",
        )


@dataclass(frozen=True, kw_only=True)
class ModelList:
    name: str
    about: str
    models: tuple[ListedModel, ...]
    folder: Path
    """What checkpoints are relative to."""

    def checkpoint_of(self, listed: ListedModel) -> Path | None:
        """The file; an `InputError` if it is not one, or not in the list's folder."""
        if listed.checkpoint is None:
            return None
        path = self.folder / listed.checkpoint
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise InputError(f"checkpoint {listed.checkpoint} of {listed.name} is not in the folder of the list")
        check_file(path)
        if not path.is_file():
            raise InputError(f"checkpoint {path} of {listed.name} is not there")
        return path


@cache
def ready_lists() -> dict[str, str]:
    """Name → what the models of the list have in common."""
    return {path.stem: _read(path).about for path in sorted(_FOLDER.glob("*.toml"))}


def find_list(text: str) -> ModelList:
    """The ready list of this name, or the list in this file."""
    if text in ready_lists():
        return _read(_FOLDER / f"{text}.toml")
    path = Path(text)
    if path.suffix != ".toml" and not path.exists():
        raise unknown_name("list of models, nor a .toml file", text, ready_lists())
    return _read(path)


def _read(path: Path) -> ModelList:
    record = _record_of(path)
    tables = record.pop("model", None)
    about = record.pop("about", "")
    for name in record:
        raise InputError(f"{path} has {name!r}, but a list has about and [[model]]")
    if not isinstance(about, str) or len(about) > _MOST_CHARACTERS:
        raise InputError(f"{path}: about must be a text of at most {_MOST_CHARACTERS} characters")
    if not isinstance(tables, list) or not tables:
        raise InputError(f"{path} names no model; write a [[model]] table for each")
    if len(tables) > _MOST_MODELS:
        raise InputError(f"{path} names {len(tables)} models, but {_MOST_MODELS} are the most")
    try:
        models = tuple(decode(ListedModel, table, f"model {place}") for place, table in enumerate(tables, start=1))
        names = [listed.name for listed in models]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two models are both called {name!r}; give each a label of its own")
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return ModelList(name=path.stem, about=about, models=models, folder=path.parent)


def _record_of(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputError(f"{path} has more than {_MOST_BYTES} bytes, which no list of models needs")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not TOML or not UTF-8; brackets without end
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a TOML file: {error}") from error
