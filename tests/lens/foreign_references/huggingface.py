"""How a small model of Hugging Face transformers is made."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from foreign_references.case import Case

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64, "patch_size": 16}
WIDE = {**SMALL, "image_size": (64, 96)}
SQUARE = {**SMALL, "image_size": 64}


def model(name: str, settings: Mapping[str, Any], config: str = "", **case: Any) -> Case:
    """A model class of transformers; its configuration has the same name with another end, unless told."""
    build = partial(_build, name.partition(",")[0], config or _config_of(name), settings)
    return Case("transformers", name, build, **case)


def _config_of(name: str) -> str:
    for end in ("Model", "Backbone", "VisionTransformer"):
        if name.endswith(end):
            return name.removesuffix(end).removesuffix("Vision") + ("VisionConfig" if "Vision" in name else "Config")
    raise ValueError(f"{name} does not say what its configuration is")


def _build(name: str, config: str, settings: Mapping[str, Any]) -> nn.Module:
    import transformers

    built: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
    return built
