"""A family of models measured by the lens, beside what it should find."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from nearsight.lens import HeadTable
from vit_references.dense import Layer, head_numbers, with_shuffled_keys
from vit_references.maps import Recorded, record
from vit_references.mechanisms import Mechanism

# Words of the reasons the lens gives for what it does not measure.
CLASS = "queries are not patches"
CHANNELS = "between channels"
SCORES = "no queries"
TALKING = "not a distribution over the keys"
ONE_TOKEN = "from one token alone"
BATCH = "between the images of a batch"
OTHER_IMAGE = "from another image"
GLOBAL_QUERIES = "all windows share the same queries"


@dataclass(frozen=True)
class Family:
    """One model of an architecture and what is expected of it."""

    variant: str
    image_size: tuple[int, int] = (64, 96)
    layers: Mapping[str, Mechanism] = field(default_factory=dict)
    """Patterns for names of attention modules, and where their tokens are."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Patterns for names of what is not spatial attention, and words of the reason."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """To make the variant small."""
    gain: float = 4.0
    """What queries and keys are multiplied with, so that heads look somewhere."""
    maps_per_head: int = 1
    """Differential attention has two, side by side among the heads of its unfused code and apart in the fused one."""
    slow: bool = False
    note: str = ""
    """How its attention lies on the image, in words."""


@dataclass(frozen=True)
class Found:
    """The expected numbers of one layer: [heads], means over the images."""

    name: str
    layer: Layer
    mad: np.ndarray
    entropy: np.ndarray
    mad_elsewhere: np.ndarray
    """With keys at each other's places."""


def build(family: Family, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The model with weights that make its heads differ, in eval mode, and two images."""
    torch.manual_seed(seed)
    model = timm.create_model(family.variant, **family.settings)
    images = torch.randn(2, 3, *family.image_size)
    unsettle(model, family.gain)
    # Untrained running statistics let activations vanish or explode with depth.
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            model.train()(torch.randn(4, 3, *family.image_size))
    return model.eval(), images


_LOOKING = re.compile(r"(^|[._])(qkvs?|qk|kv|q|k|wq|wk|query|key|[qk]_proj|(query|key)_proj|in_proj|pwise)([._]|$)")
_POSITION = re.compile(r"pos|rel|bias|rope|gating|temperature|logit_scale")


def unsettle(model: nn.Module, gain: float) -> None:
    """Noise where weights begin as zeros or ones, and queries and keys large enough that attention is not even."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and _LOOKING.search(name) and "norm" not in name:
                parameter.mul_(gain)
            elif parameter.dim() <= 1 or _POSITION.search(name):
                parameter.add_(0.5 * torch.randn_like(parameter))


def expect(model: nn.Module, images: Tensor, family: Family) -> list[Found]:
    """What the lens should find, in the order in which the model computes it."""
    pattern = "|".join(f"(?:{layers})" for layers in family.layers)
    return (
        [_expected(found, images, family) for found in record(model, images, pattern, family.maps_per_head)]
        if pattern
        else []
    )


def _expected(found: Recorded, images: Tensor, family: Family) -> Found:
    name = found.name.partition("#")[0]
    mechanism: Callable[..., Layer] = next(
        mechanism for layers, mechanism in family.layers.items() if re.fullmatch(layers, name)
    )
    layer = mechanism(found, family.image_size)
    mad_BH, entropy_BH = head_numbers(found.attention, layer, len(images))
    elsewhere_BH, _ = head_numbers(found.attention, with_shuffled_keys(layer), len(images))
    return Found(found.name, layer, *(values.mean(0).numpy() for values in (mad_BH, entropy_BH, elsewhere_BH)))


def largest_difference(table: HeadTable, expected: list[Found]) -> float:
    """Relative, of distance and entropy, over all layers and heads."""
    assert table.layer_names == tuple(found.name for found in expected)
    largest = 0.0
    for mad, entropy, found in zip(table.mad, table.entropy, expected, strict=True):
        num_heads = len(found.mad)
        assert np.isnan(mad[num_heads:]).all()
        for got, wanted in ((mad[:num_heads], found.mad), (entropy[:num_heads], found.entropy)):
            differences = np.abs(got - wanted) / np.where(wanted == 0, 1.0, wanted)
            assert not np.isnan(differences).any(), found.name
            largest = max(largest, float(differences.max()))
    return largest


def check_that_a_wrong_geometry_would_show(expected: list[Found]) -> None:
    """The comparison means something only if other places give other numbers."""
    for found in expected:
        if found.layer.keys_WM2[..., 0].isfinite().sum() > 4:
            change = np.abs(found.mad_elsewhere - found.mad) / found.mad
            assert change.max() > 1e-3, f"{found.name} looks everywhere alike"
