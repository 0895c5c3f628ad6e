"""Stacks with LocAt, Jumbo and stochastic depth: right, with fused branches where these fit and without where not."""

from typing import Any

import pytest
import timm
import torch

import nearsight  # noqa: F401  # for the names of its models
from nearsight.randomness import Draws
from nearsight.train.droppath import PathDropping
from nearsight.train.fused.pending import fusing
from nearsight.train.stacked import stack_weights, stacked_forward, weightless

SMALL = {"img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "refinement": ("locat_compact_vit", {"gaug": False}, "am"),
    "local attention": ("locat_compact_vit", {"prr": False}, "m"),
    "both": ("locat_compact_vit", {}, "m"),
    "both, of the mean": ("locat_compact_vit", {"global_pool": "avg"}, "m"),
    "local attention in one block": ("locat_compact_vit", {"depth": 2, "blocks": [1]}, "amm"),
    "another kernel": ("locat_compact_vit", {"kernel": "laplace", "scale": "auto"}, "m"),
    "width from the input": ("locat_compact_vit", {"width": "input"}, "m"),
    "no positions": ("compact_vit", {"pos_embed": "none"}, "am"),
    "Jumbo": ("locat_compact_jumbo_vit", {"num_jumbo": 2}, ""),
}
"""Name, settings, and the branches that are fused."""


@pytest.mark.parametrize("which", MODELS)
def test_models_of_s2(device: torch.device, taken: list[str], check_stack: Any, which: str) -> None:
    name, settings, expected = MODELS[which]
    check_stack(lambda: timm.create_model(name, **SMALL | settings), 8, device)
    assert "".join(taken) == expected


def test_dropped_paths(device: torch.device, near: Any) -> None:
    cells = [timm.create_model("compact_vit", **SMALL | {"depth": 2}) for _ in range(2)]
    skeleton = weightless(cells[0])
    zero = torch.zeros((), dtype=torch.int64)
    draws = Draws(torch.tensor([3, 4]), zero, zero, torch.arange(6).expand(2, -1))
    factors = PathDropping.install(skeleton, [0.8, 0.8], torch.device("cpu"))(draws)
    assert any((factor == 0).any() for factor in factors.values())
    images = torch.randn(2, 6, 3, 8, 8)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], device)
    with fusing(torch.float32):
        outputs = stacked_forward(skeleton, weights | {n: f.to(device) for n, f in factors.items()}, images.to(device))
    exact = {name: weight.double().cpu() for name, weight in weights.items()}
    doubled = {name: factor.double() for name, factor in factors.items()}
    near(outputs.cpu(), stacked_forward(skeleton, exact | doubled, images.double()), torch.float32)
