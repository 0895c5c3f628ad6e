"""`load_official`: checkpoints with the names that the authors' code gives, of every model of S2's Table 1."""

import re
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.locat import load_official

VIT = {"depth": 2, "img_size": 32, "embed_dim": 24, "num_heads": 2, "num_classes": 5}
SWIN = {"depths": (1, 1), "img_size": 56, "embed_dim": 16, "num_heads": (2, 4), "num_classes": 5}
BACKBONES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT,
    "vit_tiny_patch16_reg4_224": VIT,
    "vit_tiny_patch16_rope_mixed_224": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "jumbo_vit_tiny_patch16_224": {**VIT, "num_jumbo": 3},
}
MODELS = [f"{prefix}{backbone}" for backbone in BACKBONES for prefix in ("", "locat_")]
JUMBO = "locat_jumbo_vit_tiny_patch16_224"

THEIR_JUMBO = {
    *("cls_token", "pos_embed"),
    *(
        f"{module}.{part}"
        for module in ("patch_embed.proj", "norm", "norm_patches", "head", "jumbo_mlp.fc1", "jumbo_mlp.fc2")
        for part in ("weight", "bias")
    ),
    *(
        f"blocks.{i}.{module}.{part}"
        for i in range(2)
        for module in (
            *("norm1", "attn.qkv", "attn.gaug.log_var", "attn.gaug.log_alpha", "attn.proj"),
            *("norm2", "mlp.fc1", "mlp.fc2", "norm3", "jumbo_mlp.fc1", "jumbo_mlp.fc2"),
        )
        for part in ("weight", "bias")
    ),
    *(f"blocks.{i}.ls{j}.gamma" for i in range(2) for j in (1, 2, 3)),
}
"""All names in a checkpoint of their Jumbo with LocAt and two blocks."""


def drawn(name: str, seed: int = 0) -> Any:
    """A model none of whose weights is 0, 1 or equal to another."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **BACKBONES[name.removeprefix("locat_")]).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def theirs(model: Any) -> dict[str, Tensor]:
    """The state dict of their class: all is timm's, but for the heads of GAug, and Jumbo."""
    weights = {}
    for name, weight in model.state_dict().items():
        if name.startswith("jumbo_mlp."):  # an attribute of the model and of each block
            weights |= {f"{owner}{name}": weight for owner in ("", "blocks.0.", "blocks.1.")}
        else:
            name = re.sub(r"^norm\.jumbo\.", "norm.", name)
            weights[re.sub(r"^norm\.patches\.", "norm_patches.", name)] = weight
    return weights


def assert_loads(state_dict: dict[str, Any], model: Any, name: str) -> None:
    other = drawn(name, seed=1)
    images = torch.randn(2, 3, *other.patch_embed.img_size)
    assert not torch.allclose(other(images), model(images))
    other.load_state_dict(load_official(state_dict))
    assert torch.equal(other(images), model(images))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str) -> None:
    model = drawn(name)
    heads = {f"attn.gaug.{head}.{part}" for head in ("log_var", "log_alpha") for part in ("weight", "bias")}
    stored = theirs(model)
    assert {found[0] for found in map(re.compile(r"attn\.gaug\..+").search, stored) if found} == (
        heads if name.startswith("locat_") else set()
    )
    if name == JUMBO:
        assert stored.keys() == THEIR_JUMBO
    assert_loads(stored, model, name)


@torch.no_grad()
@pytest.mark.parametrize("name", ["locat_vit_tiny_patch16_224", JUMBO])
@pytest.mark.parametrize("wrapped", ["timm", "timm without EMA", "DeiT", "compiled and parallel", "DINO"])
def test_what_training_wraps_around_them(wrapped: str, name: str) -> None:
    model = drawn(name)
    weights = theirs(model)
    other = {key: torch.zeros_like(value) for key, value in weights.items()}
    projection = {"head.mlp.0.weight": torch.ones(3, 24), "head.last_layer.weight_v": torch.ones(4, 3)}
    stored: dict[str, Any] = {
        "timm": {"epoch": 3, "arch": "locatvit_tiny", "state_dict": other, "state_dict_ema": weights, "metric": 0.7},
        "timm without EMA": {"state_dict": weights, "state_dict_ema": None},
        "DeiT": {"model": {f"module.{key}": value for key, value in weights.items()}, "optimizer": {"state": {}}},
        "compiled and parallel": {f"module._orig_mod.{key}": value for key, value in weights.items()},
        "DINO": {
            "student": {f"module.backbone.{key}": value for key, value in other.items()},
            "teacher": {f"backbone.{key}": value for key, value in weights.items()} | projection,
            "dino_loss": {"center": torch.ones(1, 4)},
        },
    }[wrapped]
    assert_loads(stored, model, name)


@torch.no_grad()
def test_the_shared_mlp_under_any_of_its_names() -> None:
    """Files without aliases (safetensors) keep one; and our own names are left as they are."""
    model = drawn(JUMBO)
    for owner in ("", "blocks.1."):
        only = {key: w for key, w in theirs(model).items() if "jumbo_mlp" not in key or key.startswith(f"{owner}jumbo")}
        assert_loads(only, model, JUMBO)
    assert_loads(model.state_dict(), model, JUMBO)


def test_blocks_with_mlps_of_their_own() -> None:
    stored = theirs(drawn(JUMBO))
    stored["blocks.1.jumbo_mlp.fc2.bias"] = stored["blocks.1.jumbo_mlp.fc2.bias"] + 1e-3
    with pytest.raises(InputError, match=r"^blocks\.1\.jumbo_mlp\.fc2\.bias is not the jumbo_mlp\.fc2\.bias of the"):
        load_official(stored)


@pytest.mark.parametrize("stored", [{}, {"state_dict": {"conv1.weight": torch.ones(1)}}, {"epoch": 3}], ids=str)
def test_other_checkpoints(stored: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no weights of attentions"):
        load_official(stored)
