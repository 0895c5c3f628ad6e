"""Where models that are probed together come from, so that seeds of one condition can be held together.

A study says of its runs which condition and seed they are. Runs that are named one by one are grouped where they differ
in nothing but LocAt's two parts and the seed: ViT, ViT + GAug, ViT + PRR, LocAt; so are runs of DINO and runs before
training, which have other settings, but the same model and data set. Other models stand alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.commands.frozen import UNTRAINED, run_path
from nearsight.commands.subjects import short_name
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.study.results import read_description, run_folder
from nearsight.train import RunFolder

_NAMES = {(False, False): "ViT", (True, False): "ViT + GAug", (False, True): "ViT + PRR", (True, True): "LocAt"}
"""By gaug and prr, in the words of the LocAt studies."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model comes from."""

    text: str
    """What it is opened by."""
    condition: str | None = None
    seed: int | None = None

    @property
    def label(self) -> str | None:
        """Its name for people, where its condition says more than its folder's name."""
        return None if self.condition is None else f"{self.condition}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Origins:
    """All models that were named."""

    name: str
    """Of the study, or of the models together; a title."""
    folder: str
    """Likewise, as part of a folder's name."""
    models: tuple[Origin, ...]
    scale: str = "full"
    planned: tuple[str, ...] = ()
    """The conditions of the study, done or not."""


def find_origins(texts: Sequence[str]) -> Origins:
    """Every model that was named, a study by its finished runs."""
    studies = [text for text in texts if (Path(text) / "study.json").is_file()]
    if not studies:
        models, folder = _grouped(texts), "-and-".join(map(short_name, texts))[:100]
        conditions = " and ".join(dict.fromkeys(model.condition for model in models if model.condition))
        name = conditions or (folder if len(texts) == 1 else f"{len(texts)} models")
        return Origins(name=name, folder=folder, models=models)
    if len(texts) > 1:
        raise InputError(f"{studies[0]} is a study; name it on its own, or name its runs")
    return _of_study(Path(studies[0]))


def _of_study(folder: Path) -> Origins:
    described = read_description(folder)
    done = []
    for cell in described["cells"]:
        run = run_folder(folder, cell["run"])
        if run.is_complete and run.model.is_file():
            done.append(Origin(text=str(run.path), condition=cell["condition"], seed=cell["seed"]))
    if not done:
        raise InputError(f"{folder} has no finished run with its weights, so there is nothing to probe; run it first")
    planned = tuple(dict.fromkeys(cell["condition"] for cell in described["cells"]))
    return Origins(
        name=described["name"],
        folder=short_name(described["name"]),
        models=tuple(done),
        scale=described["scale"],
        planned=planned,
    )


def _grouped(texts: Sequence[str]) -> tuple[Origin, ...]:
    """With conditions and seeds where all are runs that differ in nothing else, no two of them in one place."""
    alone = tuple(Origin(text=text) for text in texts)
    paths = [path for text in texts if (path := run_path(text)) is not None]
    if not 1 < len(texts) == len(paths):
        return alone
    found, rest, shared = [], [], []
    for text, path in zip(texts, paths, strict=True):
        settings = RunFolder(path).read_settings()
        settings.pop("identity", None)
        config: dict[str, Any] = settings.get("config", {})
        model: dict[str, Any] = config.get("model", {})
        if "seed" not in config or model.get("name") != ModelConfig.name:
            return alone
        # Runs from before LocAt was there do not say that they have none.
        parts = tuple(bool(model.pop(part, False)) for part in ("gaug", "prr"))
        kind = "untrained " if text.startswith(UNTRAINED) else "DINO " if "dino" in settings else ""
        condition = kind + _NAMES[parts[0], parts[1]]
        found.append(Origin(text=text, condition=condition, seed=config.pop("seed")))
        data: dict[str, Any] = config.get("data") or {}
        shared.append((model, data.get("name"), data.get("image_size")))
        rest.append((kind, {"model": model, "data": data} if text.startswith(UNTRAINED) else settings))
    places = [(origin.condition, origin.seed) for origin in found]
    alike = all(dict(rest)[kind] == settings for kind, settings in rest) and all(one == shared[0] for one in shared)
    return tuple(found) if alike and len(set(places)) == len(places) else alone
