"""The ResNet-18 for small images against timm's own, and as a model of a config."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model, save_model

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
        ({"name": "compact_resnet"}, "'compact_resnet' is not a known model of this kind; did you mean"),
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
