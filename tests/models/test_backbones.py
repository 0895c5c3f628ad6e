"""Jumbo: its forward against plain tensor code, its size, its start, and its life among timm's tools."""

import copy
import math
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import nearsight
from nearsight.errors import InputError
from nearsight.models import JumboViT
from nearsight.train.stacked import stack_weights, stacked_forward, verify_stacking, weightless

SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5, "num_jumbo": 4}


def small(seed: int = 0, **settings: object) -> JumboViT:
    torch.manual_seed(seed)
    model = timm.create_model("compact_jumbo_vit", **{**SMALL, **settings}).eval()
    with torch.no_grad():  # a trained one: nothing is 0, 1 or equal by its start
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def norm(weights: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + eps).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def mlp(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    hidden = linear(weights, f"{name}.fc1", x)
    return linear(weights, f"{name}.fc2", hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))))


def reference(weights: dict[str, Tensor], image: Tensor, *, patch: int, depth: int, heads: int) -> Tensor:
    """Logits of one image, float64, token by token where the model does it at once."""
    width = weights["pos_embed"].shape[-1]
    rows = image.shape[-1] // patch
    kernel = weights["patch_embed.proj.weight"].flatten(1)
    patches = [
        kernel @ image[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].flatten()
        for r in range(rows)
        for c in range(rows)
    ]
    tokens = torch.stack(patches) + weights["patch_embed.proj.bias"] + weights["pos_embed"][0]
    jumbo = weights["cls_token"][0]
    num = len(jumbo)
    x = torch.cat([jumbo, tokens])
    for i in range(depth):
        q, k, v = linear(weights, f"blocks.{i}.attn.qkv", norm(weights, f"blocks.{i}.norm1", x, 1e-6)).split(width, 1)
        attended = []
        for part in torch.arange(width).chunk(heads):
            logits = q[:, part] @ k[:, part].T / math.sqrt(len(part))
            attended.append(logits.softmax(-1) @ v[:, part])
        branch = linear(weights, f"blocks.{i}.attn.proj", torch.cat(attended, 1))
        x = x + weights[f"blocks.{i}.ls1.gamma"] * branch
        wide, tokens = torch.cat(list(x[:num])), x[num:]
        shared = mlp(weights, "jumbo_mlp", norm(weights, f"blocks.{i}.norm3", wide, 1e-5))
        wide = wide + weights[f"blocks.{i}.ls3.gamma"] * shared
        own = mlp(weights, f"blocks.{i}.mlp", norm(weights, f"blocks.{i}.norm2", tokens, 1e-6))
        x = torch.cat([wide.view(num, width), tokens + weights[f"blocks.{i}.ls2.gamma"] * own])
    return linear(weights, "head", norm(weights, "norm.jumbo", torch.cat(list(x[:num])), 1e-5))


@torch.no_grad()
def test_it_is_what_the_papers_say() -> None:
    model = small().double()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    expected = torch.stack([reference(model.state_dict(), image, patch=4, depth=2, heads=3) for image in images])
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "millions"), [("tiny", 17), ("base", 260)])
def test_it_has_the_papers_number_of_parameters(name: str, millions: int) -> None:
    """S2, Table 1; and exactly what its parts add up to."""
    with torch.device("meta"):
        model = timm.create_model(f"jumbo_vit_{name}_patch16_224")
    num = sum(parameter.numel() for parameter in model.parameters())
    assert round(num / 1e6) == millions
    width = {"tiny": 192, "base": 768}[name]
    wide = 6 * width
    block = 12 * width**2 + 13 * width + 2 * width + 3 * wide
    shared = 2 * 4 * wide**2 + 5 * wide
    embedding = 768 * width + width + 196 * width + wide
    assert num == 12 * block + shared + embedding + 2 * wide + 1000 * (wide + 1)


def test_it_starts_at_the_frequencies_of_a_balanced_set() -> None:
    model = timm.create_model("compact_jumbo_vit", **SMALL)
    assert (model.head.weight == 0).all()
    torch.testing.assert_close(model.head.bias, torch.full((5,), -math.log(5)))
    assert all((block.ls3.gamma == 1e-4).all() for block in model.blocks)
    probabilities = model(torch.randn(2, 3, 32, 32)).softmax(-1)
    torch.testing.assert_close(probabilities, torch.full((2, 5), 0.2))
    assert float(model.jumbo_mlp.fc1.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_the_shared_mlp_is_one_in_files_and_in_copies(tmp_path: Path) -> None:
    model = small()
    assert [name for name in model.state_dict() if "jumbo_mlp" in name] == [
        f"jumbo_mlp.{layer}.{part}" for layer in ("fc1", "fc2") for part in ("weight", "bias")
    ]
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    other = copy.deepcopy(small(seed=1))
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(other(images), model(images))
    assert other.blocks[0]._shared[0] is other.jumbo_mlp


def test_its_parts_are_where_timm_has_them() -> None:
    model, images = small(patch_norm=True), torch.randn(2, 3, 32, 32)
    assert model.num_prefix_tokens == 4
    assert isinstance(model.blocks[0].attn, timm.layers.Attention)
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 4 + 64, 24)
    torch.testing.assert_close(model.forward_head(tokens), model(images))
    assert model.forward_head(tokens, pre_logits=True).shape == (2, 4 * 24)
    final, maps = model.forward_intermediates(images, indices=2, return_prefix_tokens=True)
    torch.testing.assert_close(final, tokens)
    assert [(patches.shape, prefix.shape) for patches, prefix in maps] == 2 * [((2, 24, 8, 8), (2, 4, 24))]
    (normal,) = model.forward_intermediates(images, indices=1, norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(normal, tokens[:, 4:])
    features = timm.create_model("compact_jumbo_vit", features_only=True, out_indices=(0, 1), **SMALL)
    assert [map.shape for map in features(images)] == 2 * [(2, 24, 8, 8)]


def test_patches_are_normalised_where_that_is_asked_for() -> None:
    images = torch.randn(2, 3, 32, 32)
    with_norm = timm.create_model("compact_jumbo_vit", patch_norm=True, **SMALL).forward_features(images)[:, 4:]
    torch.testing.assert_close(with_norm, F.layer_norm(with_norm, (24,)), rtol=1e-3, atol=1e-3)
    without = timm.create_model("compact_jumbo_vit", **SMALL).forward_features(images)[:, 4:]
    assert not torch.allclose(without, F.layer_norm(without, (24,)), atol=0.1)


@pytest.mark.parametrize("settings", [{"pos_embed": "none"}, {"global_pool": "avg"}, {"dynamic_img_size": True}])
def test_flags(settings: dict[str, object]) -> None:
    model = small(**settings)
    side = 48 if "dynamic_img_size" in settings else 32
    assert model(torch.randn(2, 3, side, side)).shape == (2, 5)
    assert (model.pos_embed is None) == ("pos_embed" in settings)
    assert model.head.in_features == (24 if "global_pool" in settings else 96)


def test_without_positions_the_order_of_patches_does_not_matter() -> None:
    images = torch.randn(2, 3, 32, 32)
    moved = images.unflatten(3, (8, 4)).roll(3, 3).flatten(3)
    without, with_positions = small(pos_embed="none"), small()
    torch.testing.assert_close(without(moved), without(images), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(with_positions(moved), with_positions(images), atol=1e-3)


def test_another_classifier() -> None:
    model = small()
    model.reset_classifier(7)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    model.reset_classifier(0)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 96)
    with pytest.raises(InputError, match="global_pool 'avg' is chosen when a Jumbo is made"):
        model.reset_classifier(7, "avg")
    model.reset_classifier(0, "")
    assert model(torch.randn(1, 3, 32, 32)).dim() == 3
    with pytest.raises(InputError, match="without pooling use num_classes=0"):
        model.reset_classifier(7)


def test_all_of_it_is_where_and_what_it_is_asked_to_be() -> None:
    model = timm.create_model("compact_jumbo_vit", patch_norm=True, dtype=torch.float64, device="meta", **SMALL)
    model.reset_classifier(7)
    assert {(parameter.dtype, parameter.device.type) for parameter in model.parameters()} == {(torch.float64, "meta")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_jumbo": 0}, "num_jumbo is 0"),
        ({"reg_tokens": 2}, "reg_tokens cannot be chosen"),
        ({"global_pool": "map"}, "global_pool is 'map'"),
        ({"global_pool": ""}, "without pooling use num_classes=0"),
    ],
)
def test_what_it_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**settings)


def test_measure_sees_its_heads() -> None:
    table = nearsight.measure(small(), torch.randn(3, 3, 32, 32))
    assert table.mad.shape == (2, 3)
    assert not table.skipped
    assert ((table.mad > 0) & (table.mad < 0.8)).all()


def test_a_stack_of_them_gives_what_each_gives_alone() -> None:
    cells = [small(seed) for seed in range(3)]
    skeleton = weightless(cells[0])
    verify_stacking(skeleton, cells, (32, 32))
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], torch.device("cpu"))
    images = torch.randn(3, 2, 3, 32, 32)
    outputs = stacked_forward(skeleton, weights, images)
    for cell, image, output in zip(cells, images, outputs, strict=True):
        torch.testing.assert_close(output, cell(image), rtol=1e-4, atol=1e-5)
