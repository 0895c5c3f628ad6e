"""The compact ViT: size, shapes, initialisation, and its life in a file; and the ResNet-18 for small images against
timm's own.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nearsight
from nearsight.errors import InputError
from nearsight.models import ModelConfig, create_model, load_model, save_model


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_it_has_the_papers_number_of_parameters_and_timm_knows_it() -> None:
    assert num_parameters(timm.create_model("compact_vit", num_classes=100)) == 2_417_956
    assert num_parameters(nearsight.create_model("compact_vit")) == 2_417_956


def test_architecture_is_the_papers() -> None:
    model = create_model("compact_vit")
    assert len(model.blocks) == 8
    assert model.blocks[0].attn.num_heads == 8
    assert model.blocks[0].mlp.fc1.out_features == 384
    assert isinstance(model.blocks[0].mlp.act, torch.nn.GELU)
    assert model.pos_embed.shape == (1, 65, 192)
    assert model.global_pool == "token"
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]


@pytest.mark.parametrize(("image_size", "patch"), [((64, 64), 8), ((24, 48), 6), ((32, 32), 2)])
def test_any_grid(image_size: tuple[int, int], patch: int) -> None:
    model = create_model("compact_vit", img_size=image_size, patch_size=patch, depth=1, num_classes=7)
    assert model(torch.randn(2, 3, *image_size)).shape == (2, 7)
    assert model.patch_embed.grid_size == (image_size[0] // patch, image_size[1] // patch)


@torch.no_grad()
def test_initialisations() -> None:
    torch.manual_seed(0)
    trunc = create_model("compact_vit", depth=2)
    assert float(trunc.blocks[0].attn.qkv.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(trunc.patch_embed.proj.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert trunc.blocks[0].attn.qkv.bias.abs().max() == 0
    assert float(trunc.pos_embed.std()) == pytest.approx(0.02, rel=0.05)
    default = create_model("compact_vit", depth=2, init="pytorch", position_std=1.0)
    bound = 192**-0.5  # nn.Linear draws from U(-1/√fan_in, 1/√fan_in)
    weight = default.blocks[0].attn.qkv.weight
    assert weight.abs().max() <= bound
    assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert default.blocks[0].attn.qkv.bias.abs().max() > 0
    assert float(default.pos_embed.std()) == pytest.approx(1.0, rel=0.05)
    assert (default.blocks[0].norm1.weight == 1).all()


def test_the_same_seed_gives_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(ModelConfig(depth=1).build((32, 32), 10).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 5}, "patch size 5 does not divide an image side of 32 pixels"),
        ({"img_size": (32, 30)}, "patch size 4 does not divide an image side of 30"),
        ({"num_heads": 7}, "7 heads do not divide a width of 192"),
        ({"depth": 0}, "depth is 0"),
        ({"init": "xavier"}, "'xavier' is not a known initialisation"),
        ({"position_std": -1.0}, "position_std is -1.0"),
    ],
)
def test_impossible_shapes_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model("compact_vit", **settings)


def test_unknown_models_are_answered_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match="'vit_smal_patch16_224' is not a model timm knows; did you mean 'vit_small_patch16_224'"
    ):
        create_model("vit_smal_patch16_224")
    with pytest.raises(InputError, match="is not a model timm knows"):
        create_model("zzzzzzzz")


def test_a_checkpoint_round_trips_with_its_config(tmp_path: Path) -> None:
    config = ModelConfig(depth=2, width=48, num_heads=4, mlp_width=100, patch_size=8)
    model = config.build((64, 32), 5).eval()
    save_model(tmp_path / "m.safetensors", model.state_dict(), config, (64, 32), 5)
    loaded = load_model(tmp_path / "m.safetensors")
    images = torch.randn(3, 3, 64, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert not loaded.training
    assert loaded.blocks[0].mlp.fc1.out_features == 100


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16)
    path = tmp_path / "m.safetensors"
    save_model(path, config.build((32, 32), 3).state_dict(), config, (32, 32), 3)
    return path


def test_every_kind_of_damage_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], b"\x00" * 64, whole[:-5] + b"\xff" + whole[-4:]):
        saved.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged"):
            load_model(saved)


def test_a_file_of_somebody_else_is_refused(saved: Path) -> None:
    save_file(load_file(saved), saved)
    with pytest.raises(InputError, match="was not written by nearsight"):
        load_model(saved)
    with pytest.raises(InputError, match="does not exist"):
        load_model(saved.with_name("none"))


SMALL = ModelConfig(name="compact_resnet18", channels=4)


def test_it_is_timms_with_another_stem() -> None:
    ours = timm.create_model("compact_resnet18", num_classes=7)
    theirs = timm.create_model("resnet18", num_classes=7)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(3, 3, 20, 20)
    assert torch.equal(ours(images), theirs(images))
    assert torch.equal(ours.eval()(images), theirs.eval()(images))
    assert sum(parameter.numel() for parameter in timm.create_model("compact_resnet18").parameters()) == 11_220_132


def test_its_stem_starts_as_its_other_convolutions_do() -> None:
    torch.manual_seed(0)
    model = timm.create_model("compact_resnet18")
    for conv in (model.conv1, model.layer1[0].conv1):
        assert float(conv.weight.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)  # He, fan out


def test_its_stages_are_where_it_says() -> None:
    model = timm.create_model("compact_resnet18", channels=8, features_only=True)
    shapes = [tuple(features.shape[1:]) for features in model(torch.randn(2, 3, 32, 32))]
    assert shapes == [(8, 32, 32), (8, 32, 32), (16, 16, 16), (32, 8, 8), (64, 4, 4)]
    assert model.feature_info.reduction() == [1, 1, 2, 4, 8]


@torch.no_grad()
def test_a_saved_one_comes_back_with_its_statistics(tmp_path: Path) -> None:
    model = SMALL.build((32, 32), 5)
    for _ in range(3):
        model(torch.randn(8, 3, 32, 32) * 2 + 1)
    save_model(tmp_path / "m.safetensors", model.state_dict(), SMALL, (32, 32), 5)
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(load_model(tmp_path / "m.safetensors")(images), model.eval()(images))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 4}, "depth is 4, but compact_resnet18 has no such setting; leave it out"),
        ({"gaug": True}, "gaug is True, but compact_resnet18 has no such setting"),
        ({"pool": "avg"}, "pool is 'avg', but compact_resnet18"),
        ({"init": "pytorch"}, "init is 'pytorch', but compact_resnet18"),
        ({"name": "compact_vit"}, "channels is 4, but compact_vit has no such setting"),
        ({"name": "compact_resnet"}, "'compact_resnet' is not a model timm knows; did you mean"),
        ({"channels": 0}, "channels is 0, but must be at least 1"),
    ],
)
def test_settings_of_other_models_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **settings)


def test_an_odd_number_of_channels_is_refused() -> None:
    with pytest.raises(InputError, match="channels is 5, but must be even"):
        dataclasses.replace(SMALL, channels=5).build((32, 32), 5)


def test_shapes_tell_resnets_apart() -> None:
    shapes = [config.shape for config in (ModelConfig(), SMALL, dataclasses.replace(SMALL, channels=8))]
    assert len(set(shapes)) == 3
