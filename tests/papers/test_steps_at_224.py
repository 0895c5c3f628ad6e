"""S2's recipes train: some real steps at 224 pixels with everything on, on images that need no download."""

import dataclasses
import math

import pytest
import torch

from nearsight.data import Dataset, load_dataset
from nearsight.recipes import find_run
from nearsight.train import DataConfig
from nearsight.train.engine import Stack


def enlarged(dataset: Dataset) -> Dataset:
    """From 32 pixels to 224."""
    train, test = (
        dataclasses.replace(part, images_NCHW=part.images_NCHW.repeat_interleave(7, -1).repeat_interleave(7, -2))
        for part in (dataset.train, dataset.test)
    )
    return dataclasses.replace(dataset, image_size=(224, 224), train=train, test=test)


@pytest.mark.parametrize("name", ["vit-imagenet", "vit-cifar100-224"])
def test_some_steps(name: str) -> None:
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
