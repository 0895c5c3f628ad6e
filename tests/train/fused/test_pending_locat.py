"""Stacks with LocAt, Jumbo and stochastic depth: right, with fused branches where these fit and without where not."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight  # noqa: F401  # for the names of its models
from nearsight.randomness import Draws
from nearsight.train.fused.pending import fusing
from nearsight.train.stacked import stack_weights, stacked_forward, weightless
from nearsight.train.step import PathDropping

SMALL = {"img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "refinement": ("locat_compact_vit", {"gaug": False}, "am"),
    "local attention": ("locat_compact_vit", {"prr": False}, "lm"),
    "both": ("locat_compact_vit", {}, "lm"),
    "both, of the mean": ("locat_compact_vit", {"global_pool": "avg"}, "lm"),
    "local attention in one block": ("locat_compact_vit", {"depth": 2, "blocks": [1]}, "amlm"),
    "three heads": ("locat_compact_vit", {"embed_dim": 48, "num_heads": 3}, "lm"),
    "no biases": ("locat_compact_vit", {"qkv_bias": False, "proj_bias": False}, "lm"),
    "registers": ("locat_compact_vit", {"reg_tokens": 4}, "lm"),
    "a grid that is no square": ("locat_compact_vit", {"img_size": (8, 20)}, "lm"),
    "one width": ("locat_compact_vit", {"isotropic": True}, "lm"),
    "one width, no strength": ("locat_compact_vit", {"isotropic": True, "scale": "none"}, "lm"),
    "a fixed width": ("locat_compact_vit", {"width": 0.7}, "lm"),
    "nothing learned": ("locat_compact_vit", {"width": 0.7, "scale": "none"}, "lm"),
    "Laplace's kernel": ("locat_compact_vit", {"kernel": "laplace"}, "lm"),
    "the inverse distance": ("locat_compact_vit", {"kernel": "inverse", "scale": "none"}, "lm"),
    "widths of a smaller grid": ("locat_compact_vit", {"img_size": 16, "initial_grid": (2, 2)}, "lm"),
    "strength by the logits": ("locat_compact_vit", {"kernel": "laplace", "scale": "auto"}, "m"),
    "width from the input": ("locat_compact_vit", {"width": "input"}, "m"),
    "layer scale": ("locat_compact_vit", {"init_values": 0.5}, ""),
    "norms of queries and keys": ("locat_compact_vit", {"qk_norm": True, "depth": 2}, "mm"),
    "no positions": ("compact_vit", {"pos_embed": "none"}, "am"),
    "Jumbo": ("locat_compact_jumbo_vit", {"num_jumbo": 2}, ""),
}
"""Name, settings, and the branches that are fused."""


@pytest.mark.parametrize("which", MODELS)
def test_models_of_s2(device: torch.device, taken: list[str], check_stack: Any, which: str) -> None:
    name, settings, expected = MODELS[which]
    settings = SMALL | settings
    check_stack(lambda: timm.create_model(name, **settings), settings["img_size"], device)
    assert "".join(taken) == expected


class Unprojected(nn.Module):
    """What local attention gives, at the end of a forward: it is made when the model has its own weights again."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm.create_model("locat_compact_vit", **SMALL | {"prr": False})
        self.vit.blocks[0].attn.proj = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        block = self.vit.blocks[0]
        attended: Tensor = block.attn(block.norm1(self.vit._pos_embed(self.vit.patch_embed(images))))
        return attended


def test_attention_that_is_made_after_the_forward(device: torch.device, taken: list[str], check_stack: Any) -> None:
    check_stack(Unprojected, 8, device)
    assert not taken


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
