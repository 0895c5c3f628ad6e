"""Stacks whose attention comes from positions alone: right, with a branch of their own where it fits."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import nearsight.models  # noqa: F401  # for compact_vit_positional
from nearsight.models.positional import PositionalAttention
from nearsight.train.fused.pending import fusing
from nearsight.train.stacked import stack_weights, stacked_forward, weightless

SMALL = {"img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, "pm"),
    "two blocks": ({"depth": 2}, "pmpm"),
    "no biases": ({"qkv_bias": False, "proj_bias": False}, "pm"),
    "registers": ({"reg_tokens": 3}, "pm"),
    "more tokens than attention takes": ({"img_size": 24, "patch_size": 2}, "pm"),
    "norms of queries and keys": ({"qk_norm": True}, "pm"),
    "a norm of what was attended to": ({"scale_attn_norm": True}, "m"),
    "layer scale": ({"init_values": 0.5}, ""),
}
"""Settings, and the branches that are fused."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_positional_models(device: torch.device, taken: list[str], check_stack: Any, name: str, training: bool) -> None:
    settings, expected = MODELS[name]
    settings = SMALL | settings
    make = lambda: timm.create_model("compact_vit_positional", **settings)  # noqa: E731
    check_stack(make, settings["img_size"], device, training=training)
    assert "".join(taken) == expected


def test_maps_whose_rows_sum_to_anything(
    device: torch.device, taken: list[str], check_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of values passes unchanged through a softmax; not through these."""

    def weighed(self: PositionalAttention, both_1NC: Tensor, value_BNC: Tensor) -> Tensor:
        query_1NHd, key_1NHd = self._queries_and_keys(both_1NC)
        maps_HNM = torch.matmul(query_1NHd.transpose(1, 2), key_1NHd.transpose(1, 2).transpose(-2, -1))[0]
        value_BMHd = value_BNC.unflatten(-1, (self.num_heads, self.head_dim))
        return torch.einsum("hnm,bmhd->bnhd", maps_HNM, value_BMHd).flatten(2)

    monkeypatch.setattr(PositionalAttention, "_weighed_once", weighed)
    check_stack(lambda: timm.create_model("compact_vit_positional", **SMALL), 8, device, training=True)
    assert "".join(taken) == "pm"


@pytest.mark.gpu
@pytest.mark.parametrize("num_cells", [1, 3])
def test_as_the_engine_runs_positional_models(taken: list[str], check_reduced: Any, num_cells: int) -> None:
    check_reduced("compact_vit_positional", num_cells, training=True, tolerance=0.05)
    assert "".join(taken) == "pmpm"


def test_what_waits_and_is_looked_at_is_made(device: torch.device, taken: list[str]) -> None:
    """Of a model that stops before its projection, nothing is fused, and the numbers are those of the model."""
    cells = [timm.create_model("compact_vit_positional", **SMALL).train() for _ in range(2)]
    for cell in cells:
        cell.blocks[0].attn.proj = torch.nn.Identity()
    images = torch.randn(2, 3, 3, 8, 8)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], device)
    with fusing(torch.float32):
        outputs = stacked_forward(weightless(cells[0]).train(), weights, images.to(device))
    assert "".join(taken) == "m"
    for k, cell in enumerate(cells):
        torch.testing.assert_close(outputs[k].cpu(), cell(images[k]), rtol=1e-4, atol=1e-4)
