"""Recipes: what they ask for is what the papers say, and their docstrings say how to run them."""

import pytest

from nearsight.errors import InputError
from nearsight.recipes import RUNS, demo_runs, find_run
from nearsight.train import PROTOCOLS


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_every_recipe_builds_its_model_and_says_its_command(name: str, protocol: str) -> None:
    recipe = find_run(name)
    config = recipe(protocol)
    side = {"tiny-imagenet": 64}.get(config.data.name, 32)
    model = config.model.build((side, side), 10)
    assert model.patch_embed.grid_size == (8, 8)  # the grid of S1, whatever the image size
    assert f"nearsight train {name}" in (recipe.__doc__ or "")


def test_tiny_imagenet_follows_the_paper() -> None:
    config = find_run("compact-tiny-imagenet")("modern")
    names = [augmentation.name for augmentation in config.protocol.augment]
    assert names == ["crop", "flip", "colorjitter", "cutmix"]
    protocol = config.protocol
    assert (protocol.batch_size, protocol.max_epochs, protocol.warmup_epochs, protocol.patience) == (64, 400, 10, 30)
    assert protocol.smoothing == 0.1


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'compact-cifar10'"):
        find_run("compact-cifar11")
    with pytest.raises(InputError, match="did you mean 'baseline'"):
        find_run("compact-cifar10")("basline")


def test_the_demos_two_runs_differ_in_cutmix_alone() -> None:
    without, with_cutmix = demo_runs().values()
    assert without.protocol.augmentation("cutmix") is None
    assert with_cutmix.protocol.without("cutmix") == without.protocol
    assert (with_cutmix.model, with_cutmix.data, with_cutmix.seed) == (without.model, without.data, without.seed)
