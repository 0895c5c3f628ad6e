"""Another network in the place of the recipe's, from the command line."""

from typing import Any

import pytest

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.train import RunConfig


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The runs that the command asks for; none is done."""
    configs: list[RunConfig] = []

    def train_run(config: RunConfig, *_others: Any, **_settings: Any) -> None:
        configs.append(config)
        raise InputError("not now")

    monkeypatch.setattr("nearsight.train.train_run", train_run)
    return configs


def model_of(arguments: list[str], asked: list[RunConfig]) -> ModelConfig:
    assert main(["train", "compact-shapes", "--device", "cpu", *arguments]) == 2
    return asked.pop().model


@pytest.mark.parametrize("chosen", [["--model.name", "compact_resnet18"], ["--model.name=compact_resnet18"]])
def test_what_the_recipe_says_of_its_own_network_does_not_bind_another(
    chosen: list[str], asked: list[RunConfig]
) -> None:
    assert model_of(chosen, asked) == ModelConfig(name="compact_resnet18")
    assert model_of(["--model.channels", "4", *chosen], asked) == ModelConfig(name="compact_resnet18", channels=4)


def test_a_network_of_the_same_kind_keeps_the_recipes_settings(asked: list[RunConfig]) -> None:
    model = model_of(["--model.name", "compact_vit_positional", "--model.depth", "1"], asked)
    assert model == ModelConfig(name="compact_vit_positional", depth=1, width=96, num_heads=4, mlp_width=192)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.name", "compact_resnet18", "--model.depth", "3"], "depth is 3, but compact_resnet18 has no such"),
        (["--model.name", "compact_resnet1"], "did you mean 'compact_resnet18'?"),
        (["--model.name"], "--model.name"),
    ],
)
def test_what_does_not_fit_the_network_is_refused(
    options: list[str], said: str, asked: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "compact-shapes", *options]) == 2
    assert said in capsys.readouterr().err
    assert not asked
