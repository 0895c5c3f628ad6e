"""Model configs: LocAt and its options, built, stacked, saved and loaded."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from nearsight.models import ModelConfig, load_model, save_model
from nearsight.train.stacked import runs_as_one_batch, stack_weights, stacked_forward, verify_stacking, weightless

SMALL = ModelConfig(depth=2, width=32, num_heads=4, mlp_width=48, patch_size=8)
VARIANTS: list[dict[str, Any]] = [
    {"gaug": True},
    {"prr": True},
    {"gaug": True, "prr": True},
    {"positions": False},
    {"pool": "avg"},
    {"gaug": True, "prr": True, "pool": "avg", "positions": False},
    {"gaug": True, "locat_kernel": "laplace"},
    {"gaug": True, "locat_kernel": "inverse", "locat_isotropic": True},
    {"gaug": True, "locat_width": "input"},
    {"gaug": True, "locat_width": 2.0},
    {"gaug": True, "locat_scale": "none"},
    {"gaug": True, "locat_scale": "auto"},
    {"reach": (1.0,)},
    {"reach": (0.0, None)},  # the classifier reads CLS, so that in the last block a mask changes no output
    {"reach": (1.5,), "gaug": True, "prr": True},
    {"reach": (1.5,), "gaug": True, "locat_width": "input"},
    {"reach": (1.0,), "name": "compact_vit_positional"},
    {"reach": (1.0,), "name": "compact_jumbo_vit"},
    {"name": "compact_jumbo_vit", "gaug": True, "prr": True},
    {"qkv_bias": False},
    {"head_size": 24},
    {"embed_norm": True},
    {"final_norm": False},
    {"activation": "relu"},
    {"head_size": 24, "gaug": True, "prr": True, "qkv_bias": False},
    {"head_size": 24, "reach": (1.5,), "embed_norm": True, "pool": "avg", "final_norm": False},
    {"head_size": 24, "qkv_bias": False, "embed_norm": True, "name": "compact_vit_positional"},
    {"head_size": 24, "qkv_bias": False, "embed_norm": True, "name": "compact_jumbo_vit"},
]


def changed(settings: dict[str, Any]) -> ModelConfig:
    return dataclasses.replace(SMALL, **settings)


def built(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return config.build((32, 32), 5).eval()


def perturbed(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """As if trained: what starts at 0 or 1 does not hide anything."""
    model = built(config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_a_saved_model_comes_back_with_its_options(settings: dict[str, Any], tmp_path: Path) -> None:
    config, images = changed(settings), torch.randn(3, 3, 32, 32)
    model = perturbed(config)
    save_model(tmp_path / "m.safetensors", model.state_dict(), config, (32, 32), 5)
    assert torch.equal(load_model(tmp_path / "m.safetensors")(images), model(images))


@torch.no_grad()
def test_every_option_makes_another_model() -> None:
    """With the same weights where names are shared, no two give the same."""
    images = torch.randn(2, 3, 32, 32)
    plain = perturbed(SMALL)
    outputs = [plain(images)]
    for settings in (settings for settings in VARIANTS if not {"name", "head_size"} & settings.keys()):
        model = perturbed(changed(settings), seed=1)
        mine = model.state_dict()
        # Average pooling has its norm after it, under another name.
        shared = {name.replace("fc_norm.", "norm."): name for name in mine}
        known = {shared[name]: weight for name, weight in plain.state_dict().items() if name in shared}
        model.load_state_dict({**mine, **known})
        outputs.append(model(images))
    for number, output in enumerate(outputs):
        assert all(not torch.allclose(output, other, atol=1e-4) for other in outputs[:number])


def test_models_that_differ_in_locat_alone_start_alike() -> None:
    plain, local = built(SMALL), built(changed({"gaug": True, "prr": True}))
    weights = local.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.state_dict().items())
    assert len(weights) == len(plain.state_dict()) + 2 * 4


def test_shapes_tell_apart_what_cannot_be_stacked() -> None:
    shapes = [SMALL.shape, *(changed(settings).shape for settings in VARIANTS)]
    assert len(set(shapes)) == len(shapes)
    assert changed({"init": "pytorch", "position_std": 1.0}).shape == SMALL.shape


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_a_stack_gives_what_its_models_give(settings: dict[str, Any]) -> None:
    """Outputs and gradients, as one batch."""
    cells = [perturbed(changed(settings), seed) for seed in range(2)]
    skeleton = weightless(cells[0])
    verify_stacking(skeleton, cells, (32, 32))
    assert runs_as_one_batch(skeleton)
    skeleton, cells = skeleton.double(), [cell.double() for cell in cells]
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], torch.device("cpu"))
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    images = torch.randn(2, 3, 3, 32, 32, dtype=torch.float64)
    outputs = stacked_forward(skeleton, weights, images)
    # Average pooling does not look at the last block's CLS, so that not every weight has a gradient.
    gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()), allow_unused=True)
    for k, cell in enumerate(cells):
        output = cell(images[k])
        torch.testing.assert_close(outputs[k], output, rtol=1e-9, atol=1e-11)
        expected = torch.autograd.grad(output.square().sum(), list(cell.parameters()), allow_unused=True)
        for name, ours, theirs in zip(weights, gradients, expected, strict=True):
            assert (ours is None) == (theirs is None), name
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours[k], theirs, rtol=1e-8, atol=1e-10)
    if settings.get("gaug") and settings.get("locat_width", "query") == "query":
        heads = [grad for name, grad in zip(weights, gradients, strict=True) if "gaug.log_var.weight" in name]
        assert heads[0] is not None
        assert heads[0].abs().max() > 0
