"""Recipes: what they ask for is what the papers say, and their docstrings say how to run them."""

import dataclasses
import math
import shlex

import pytest
import timm
import torch

from nearsight.augment import CutMix, HorizontalFlip, MixupOrCutMix, RandomErasing, ResizedCrop, TimmRandAugment
from nearsight.commands.train import config_of
from nearsight.data import Dataset, load_dataset
from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.train import PROTOCOLS, DataConfig, RunConfig, modern
from nearsight.train.engine import Stack
from nearsight.train.recipes import RUNS, command_of, demo_run, find_run


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_every_recipe_builds_its_model_and_says_its_command(name: str, protocol: str) -> None:
    recipe = find_run(name)
    config = recipe(protocol)
    side = config.data.image_size or dataset_spec(config.data.name).image_size
    with torch.device("meta"):
        model = config.model.build((side, side), 10)
    # S1 has an 8×8 grid, whatever the image size; S2 a 14×14 one at 224 pixels.
    assert model.patch_embed.grid_size == ((14, 14) if side == 224 else (8, 8))
    assert f"nearsight train {name}" in (recipe.__doc__ or "")


def test_tiny_imagenet_follows_the_paper() -> None:
    config = find_run("compact-tiny-imagenet")("modern")
    names = [augmentation.name for augmentation in config.protocol.augment]
    assert names == ["crop", "flip", "colorjitter", "cutmix"]
    protocol = config.protocol
    assert (protocol.batch_size, protocol.max_epochs, protocol.warmup_epochs, protocol.patience) == (64, 400, 10, 30)
    assert protocol.smoothing == 0.1


@pytest.mark.parametrize(
    ("name", "lr", "epochs", "warmup", "num_train"),
    [
        ("vit-imagenet", 1e-3, 300, 20, 1_281_167),
        ("vit-mini-imagenet", 5e-4, 600, 120, 50_000),
        ("vit-cifar100-224", 5e-4, 600, 120, 50_000),
    ],
)
def test_training_at_224_pixels_follows_the_paper(
    name: str, lr: float, epochs: int, warmup: int, num_train: int
) -> None:
    """S2 §5.1, and the lines of its training script."""
    recipe = find_run(name)
    config = recipe("locat")
    protocol = config.protocol
    assert (protocol.lr, protocol.max_epochs, protocol.warmup_epochs, protocol.schedule) == (
        *(lr, epochs, warmup),
        "triangular",
    )
    assert (protocol.batch_size, protocol.weight_decay, protocol.clip_norm, protocol.drop_path) == (
        1024,
        0.05,
        5.0,
        0.1,
    )
    assert protocol.smoothing == 0.1
    assert protocol.augment == (
        ResizedCrop(),
        HorizontalFlip(),
        TimmRandAugment(num_ops=2, magnitude=9.0, magnitude_std=0.5, increasing=True),
        RandomErasing(p=0.25, noise=1.0),
        MixupOrCutMix(p=1.0, mixup_alpha=0.8, cutmix_alpha=1.0, switch_p=0.5),
    )
    kept = num_train * (1 - config.data.validation_fraction)
    assert f"{epochs} epochs of {int(kept / 500) * 500:,} images of 224 pixels" in (recipe.__doc__ or "")
    with torch.device("meta"):
        model = config.model.build((224, 224), 1000)
        theirs = timm.create_model("vit_tiny_patch16_224")
    shapes = [{name: weight.shape for name, weight in each.state_dict().items()} for each in (model, theirs)]
    assert shapes[0] == shapes[1]


def test_augmentations_of_a_vit_are_the_protocols() -> None:
    config = find_run("vit-cifar100-224")("modern")
    assert config.protocol.augment == modern().augment
    assert (config.protocol.max_epochs, config.protocol.schedule) == (600, "triangular")


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'compact-cifar10'"):
        find_run("compact-cifar11")
    with pytest.raises(InputError, match="did you mean 'baseline'"):
        find_run("compact-cifar10")("basline")


def enlarged(dataset: Dataset) -> Dataset:
    """From 32 pixels to 224."""
    train, test = (
        dataclasses.replace(part, images_NCHW=part.images_NCHW.repeat_interleave(7, -1).repeat_interleave(7, -2))
        for part in (dataset.train, dataset.test)
    )
    return dataclasses.replace(dataset, image_size=(224, 224), train=train, test=test)


@pytest.mark.parametrize("name", ["vit-imagenet", "vit-cifar100-224"])
def test_some_steps(name: str) -> None:
    """Real ones at 224 pixels with everything on, on images that need no download."""
    recipe = find_run(name)("locat")
    data = DataConfig(name="shapes", num_train=20, num_test=10, validation_fraction=0.5)
    config = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, gaug=True, prr=True),
        data=data,
        protocol=dataclasses.replace(recipe.protocol, batch_size=5, warmup_epochs=0),
        precision="fp32",
    )
    stack = Stack.start([config], enlarged(load_dataset("shapes", num_train=20, num_test=10)), torch.device("cpu"))
    before = {name: weight.clone() for name, weight in stack.weights.items()}
    losses: list[float] = []
    (result,) = stack.run_epoch(lambda _: losses.append(float(stack.losses_so_far)))
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(10), abs=0.3)  # ten classes, by chance
    assert math.isfinite(result.train_loss)
    assert result.lr == pytest.approx(config.protocol.lr, rel=0.01)
    still = [name for name, weight in stack.weights.items() if torch.equal(weight, before[name])]
    assert not still, f"{still} did not move"


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_the_command_of_a_recipe_is_short(name: str, protocol: str) -> None:
    assert command_of(find_run(name)(protocol)) == f"nearsight train {name} --protocol {protocol}"


@pytest.mark.parametrize(
    "config",
    [
        demo_run(seed=4),
        RunConfig(model=ModelConfig(positions=False, pool="avg", gaug=True, locat_width=1.5), measure_every=3),
        RunConfig(model=ModelConfig(name="compact_resnet18", channels=32), data=DataConfig(name="cifar10")),
        RunConfig(protocol=dataclasses.replace(modern(), betas=(0.8, 0.95), clip_norm=1.0, teacher="a run")),
        RunConfig(protocol=modern().without("flip").without("cutmix").with_(CutMix(p=1.0, per_sample=True))),
        RunConfig(protocol=dataclasses.replace(PROTOCOLS["locat"](), clip_norm=None, lr=3e-4), precision="bf16"),
    ],
)
def test_the_command_of_a_run_trains_that_run(config: RunConfig) -> None:
    command = command_of(config)
    assert command is not None
    assert config_of(shlex.split(command)[2:]) == config


def test_what_options_cannot_say_has_no_command() -> None:
    protocol = modern()
    assert command_of(RunConfig(protocol=dataclasses.replace(protocol, augment=protocol.augment[::-1]))) is None
