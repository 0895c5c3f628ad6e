"""Stacks of vision transformers with fused branches: they are right, and the branches are taken."""

from typing import Any

import pytest
import timm
import torch

import nearsight.models  # noqa: F401  # for compact_vit
from nearsight.train.fused.pending import fusing
from nearsight.train.stacked import stack_weights, stacked_forward, weightless

SMALL = {"img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 1, "num_classes": 5}
VITS: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, "am"),
    "two blocks of two heads": ({"depth": 2, "num_heads": 2}, "amam"),
    "no biases of queries, keys and values": ({"qkv_bias": False}, "am"),
    "no biases": ({"qkv_bias": False, "proj_bias": False}, "am"),
    "registers": ({"reg_tokens": 3}, "am"),
    "average of patches": ({"global_pool": "avg", "class_token": False}, "am"),
    "a norm of the average": ({"global_pool": "avg", "fc_norm": True}, "am"),
    "dropout that is off": ({"proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.1}, "am"),
    "norm before the blocks": ({"pre_norm": True, "depth": 2}, "mam"),
    "more tokens than attention takes": ({"img_size": 24, "patch_size": 2}, "m"),
    "a width there are no tiles for": ({"embed_dim": 40}, ""),
    "hidden units there are no tiles for": ({"mlp_ratio": 1.25}, "a"),
    "another GELU": ({"act_layer": "gelu_tanh"}, "a"),
    "layer scale": ({"init_values": 0.5}, ""),
    "norms of queries and keys": ({"qk_norm": True, "depth": 2}, "mm"),
}
"""Settings, and the branches that are fused."""


@pytest.mark.parametrize("name", VITS)
def test_vision_transformers(device: torch.device, taken: list[str], check_stack: Any, name: str) -> None:
    settings, expected = VITS[name]
    settings = SMALL | settings
    check_stack(lambda: timm.create_model("compact_vit", **settings), settings["img_size"], device)
    assert "".join(taken) == expected


def test_without_gradients(device: torch.device, taken: list[str], near: Any) -> None:
    cells = [timm.create_model("compact_vit", **SMALL) for _ in range(3)]
    images = torch.randn(3, 1, 3, 8, 8)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], device)
    with torch.no_grad(), fusing(torch.float32):
        outputs = stacked_forward(weightless(cells[0]), weights, images.to(device))
    assert "".join(taken) == "am"
    for k, cell in enumerate(cells):
        near(outputs[k].cpu(), cell.double()(images[k].double()), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("num_cells", [1, 3])
def test_as_the_engine_runs_it(taken: list[str], check_reduced: Any, num_cells: int) -> None:
    check_reduced("compact_vit", num_cells)
    assert "".join(taken) == "amam"
