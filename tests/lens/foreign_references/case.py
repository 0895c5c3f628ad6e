"""One model of a library: how it is built and called, and what is expected of it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from vit_references.checking import unsettle
from vit_references.mechanisms import Mechanism

Call = str | Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Case:
    """A small model with random weights."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    layers: Mapping[str, Mechanism] = field(default_factory=dict)
    """Patterns for names of attention modules, and where their tokens are."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Patterns for names of what is not spatial attention, and a pattern for the reason the lens should give."""
    unspoken: Collection[str] = ()
    """Those of these patterns of which the lens need not speak: words that look at words, or pooling by scores."""
    image_size: tuple[int, int] = (64, 96)
    inputs: Callable[[], Any] | None = None
    """What is measured on, where that is not two images [2, 3, H, W]."""
    call: Call | None = None
    """How the model takes it, where that is not `model(images)`: the name of an argument, or a function."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else `measure` is told: grid, prefix."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set while the model runs."""
    num_images: int = 2
    """How many images or videos the input has."""
    gain: float = 4.0
    """What queries and keys are multiplied with, so that heads look somewhere."""
    after: str = ""
    """The part of an attention module that has the last word on the weights, where that is not its softmax."""
    used: int | None = None
    """Which softmax of an attention module has the weights that multiply values, where it computes others, too."""
    is_eager: bool = True
    """Whether a model of transformers computes the same without fused attention, which may be all that knows a mask."""
    packing: Literal["", "apart", "together"] = ""
    """Whether the images of a batch are one sequence, which the model cuts again, or keeps together under a mask."""
    is_alone: bool = False
    """Whether images of a batch would look at each other, so that the lens should run each by itself."""
    refused: str | None = None
    """Words of the message, where the lens should refuse the whole model; any will do where they are empty."""
    quick: bool = False
    """Whether it is among those that are checked with every run of the tests."""
    note: str = ""
    """How its attention lies on the image, in words."""


def prepare(case: Case, seed: int = 0) -> tuple[nn.Module, Any]:
    """The model with weights that make its heads differ, in eval mode, and what it is measured on."""
    torch.manual_seed(seed)
    model = case.build()
    inputs = torch.randn(case.num_images, 3, *case.image_size) if case.inputs is None else case.inputs()
    unsettle(model, case.gain)
    _settle_statistics(model, case, inputs)
    return model.eval(), inputs


def _settle_statistics(model: nn.Module, case: Case, inputs: Any) -> None:
    """Untrained running statistics let activations vanish or explode with depth."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    model.eval()
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        run(model, case, inputs)
    model.eval()


def run(model: nn.Module, case: Case, inputs: Any) -> Any:
    """The forward, as a user of the library writes it."""
    if callable(case.call):
        return case.call(model, inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(**{case.call: inputs}) if isinstance(case.call, str) else model(inputs)
