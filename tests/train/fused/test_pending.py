"""Stacks of vision transformers, also with LocAt, Jumbo, stochastic depth or attention from positions alone: they are
right, with fused branches where these fit and without where not.
"""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight  # noqa: F401  # for the names of its models
from nearsight.models.positional import PositionalAttention
from nearsight.randomness import Draws
from nearsight.train.dropping import PathDropping
from nearsight.train.fused.pending import fusing
from nearsight.train.stacked import stack_weights, stacked_forward, weightless

SMALL = {"img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 1, "num_classes": 5}
TWO_HEADS = SMALL | {"num_heads": 2}
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
    "ReLU": ({"act_layer": "relu"}, "a"),
    "no final norm": ({"final_norm": False}, "am"),
    "norms of the patch embedding": ({"embed_norm": True}, "am"),
    "heads larger than their share of the width": ({"num_heads": 2, "head_size": 24}, "am"),
    "heads smaller than their share of the width": ({"num_heads": 2, "head_size": 5, "qkv_bias": False}, "am"),
    "a reach": ({"img_size": 16, "num_heads": 2, "reach": 1.5}, "am"),
    "a reach of its own in every block": ({"img_size": (12, 20), "depth": 3, "reach": (0, 2.3, None)}, "amamam"),
    "a reach in the tail of the keys": ({"img_size": 32, "reg_tokens": 2, "reach": 2.0}, "am"),
    "a reach among more tokens than attention takes": ({"img_size": 24, "patch_size": 2, "reach": 2.0}, "m"),
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
@pytest.mark.parametrize("reduced", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_cells", [1, 3])
def test_as_the_engine_runs_it(taken: list[str], check_reduced: Any, num_cells: int, reduced: torch.dtype) -> None:
    check_reduced("compact_vit", num_cells, reduced=reduced)
    assert "".join(taken) == "amam"


LOCAL_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "refinement": ("locat_compact_vit", {"gaug": False}, "am"),
    "local attention": ("locat_compact_vit", {"prr": False}, "lm"),
    "both": ("locat_compact_vit", {}, "lm"),
    "both, of the mean": ("locat_compact_vit", {"global_pool": "avg"}, "lm"),
    "local attention in one block": ("locat_compact_vit", {"depth": 2, "blocks": [1]}, "amlm"),
    "three heads": ("locat_compact_vit", {"embed_dim": 48, "num_heads": 3}, "lm"),
    "heads of another size": ("locat_compact_vit", {"head_size": 24, "embed_norm": True}, "lm"),
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
    "local attention with a reach": ("locat_compact_vit", {"img_size": 16, "reach": 1.5}, "m"),
    "no positions": ("compact_vit", {"pos_embed": "none"}, "am"),
    "Jumbo": ("locat_compact_jumbo_vit", {"num_jumbo": 2}, ""),
}
"""Name, settings, and the branches that are fused."""


@pytest.mark.parametrize("which", LOCAL_MODELS)
def test_models_of_s2(device: torch.device, taken: list[str], check_stack: Any, which: str) -> None:
    name, settings, expected = LOCAL_MODELS[which]
    settings = TWO_HEADS | settings
    check_stack(lambda: timm.create_model(name, **settings), settings["img_size"], device)
    assert "".join(taken) == expected


class Unprojected(nn.Module):
    """What local attention gives, at the end of a forward: it is made when the model has its own weights again."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm.create_model("locat_compact_vit", **TWO_HEADS | {"prr": False})
        self.vit.blocks[0].attn.proj = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        block = self.vit.blocks[0]
        attended: Tensor = block.attn(block.norm1(self.vit._pos_embed(self.vit.patch_embed(images))))
        return attended


def test_attention_that_is_made_after_the_forward(device: torch.device, taken: list[str], check_stack: Any) -> None:
    check_stack(Unprojected, 8, device)
    assert not taken


def test_dropped_paths(device: torch.device, near: Any) -> None:
    cells = [timm.create_model("compact_vit", **TWO_HEADS | {"depth": 2}) for _ in range(2)]
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


POSITIONAL_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, "pm"),
    "two blocks": ({"depth": 2}, "pmpm"),
    "no biases": ({"qkv_bias": False, "proj_bias": False}, "pm"),
    "registers": ({"reg_tokens": 3}, "pm"),
    "more tokens than attention takes": ({"img_size": 24, "patch_size": 2}, "pm"),
    "norms of queries and keys": ({"qk_norm": True}, "pm"),
    "a norm of what was attended to": ({"scale_attn_norm": True}, "m"),
    "layer scale": ({"init_values": 0.5}, ""),
    "a reach": ({"img_size": 16, "reach": 1.5}, "m"),
}
"""Settings, and the branches that are fused."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", POSITIONAL_MODELS)
def test_positional_models(device: torch.device, taken: list[str], check_stack: Any, name: str, training: bool) -> None:
    settings, expected = POSITIONAL_MODELS[name]
    settings = TWO_HEADS | settings
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
    check_stack(lambda: timm.create_model("compact_vit_positional", **TWO_HEADS), 8, device, training=True)
    assert "".join(taken) == "pm"


@pytest.mark.gpu
@pytest.mark.parametrize("num_cells", [1, 3])
def test_as_the_engine_runs_positional_models(taken: list[str], check_reduced: Any, num_cells: int) -> None:
    check_reduced("compact_vit_positional", num_cells, training=True, tolerance=0.05)
    assert "".join(taken) == "pmpm"


def test_what_waits_and_is_looked_at_is_made(device: torch.device, taken: list[str]) -> None:
    """Of a model that stops before its projection, nothing is fused, and the numbers are those of the model."""
    cells = [timm.create_model("compact_vit_positional", **TWO_HEADS).train() for _ in range(2)]
    for cell in cells:
        cell.blocks[0].attn.proj = torch.nn.Identity()
    images = torch.randn(2, 3, 3, 8, 8)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], device)
    with fusing(torch.float32):
        outputs = stacked_forward(weightless(cells[0]).train(), weights, images.to(device))
    assert "".join(taken) == "m"
    for k, cell in enumerate(cells):
        torch.testing.assert_close(outputs[k].cpu(), cell(images[k]), rtol=1e-4, atol=1e-4)
