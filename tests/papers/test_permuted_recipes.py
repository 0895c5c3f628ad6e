"""S3's studies on real images: which networks, which images, and that they run at any size."""

import dataclasses

import pytest
import torch

from nearsight.papers import find_study
from nearsight.train.engine import Stack
from nearsight.train.planning import cell_bytes, plan_stacks
from nearsight.train.runner import load_data


def test_every_network_sees_every_shuffle() -> None:
    study = find_study("permuted-cifar100")()
    found = {
        (cell.levels["model"], cell.levels["tiles"], cell.seed): (model.name, model.patch_size, model.shuffled_tiles)
        for cell in study.cells
        for model in [cell.config.model]
    }
    networks = {
        "ViT": ("compact_vit", 2),
        "Positional ViT": ("compact_vit_positional", 2),
        "ResNet-18": ("compact_resnet18", 4),
    }
    tiles = {"1×1": 1, "4×4": 4, "32×32": 32}
    assert found == {
        (label, name, seed): (*network, num)
        for label, network in networks.items()
        for name, num in tiles.items()
        for seed in range(2)
    }
    assert {cell.config.model.permutation_seed for cell in study.cells} == {0}
    assert len({(cell.config.data, cell.config.protocol, cell.config.precision) for cell in study.cells}) == 1


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "svhn"])
def test_positional_attention_is_all_that_differs(data: str) -> None:
    study = find_study(f"positional-{data}")()
    cells = {(cell.condition, cell.seed): cell.config for cell in study.cells}
    assert cells.keys() == {(condition, seed) for condition in ("ViT", "Positional ViT") for seed in range(5)}
    for (condition, seed), config in cells.items():
        assert config.data.name == data
        assert config.model.name == ("compact_vit" if condition == "ViT" else "compact_vit_positional")
        alike = dataclasses.replace(cells["ViT", seed].model, name=config.model.name)
        assert dataclasses.replace(cells["ViT", seed], model=alike) == config
    augmentations = [augmentation.name for augmentation in study.base.protocol.augment]
    assert augmentations == (["crop", "cutmix"] if data == "svhn" else ["crop", "flip", "autoaugment", "cutmix"])


@pytest.mark.parametrize("name", ["permuted-cifar100", "positional-cifar10", "positional-cifar100", "positional-svhn"])
def test_all_epochs_are_trained(name: str) -> None:
    for cell in find_study(name)().cells:
        assert cell.config.protocol.patience == cell.config.protocol.max_epochs


def test_a_seed_of_any_network_fits_on_a_gpu_many_times() -> None:
    networks = {cell.config.model.name: cell.config for cell in find_study("permuted-cifar100")().cells}
    for config in networks.values():
        assert 2**30 < cell_bytes(config) < 20 * 2**30


def test_small_runs_of_every_network_train() -> None:
    study = find_study("permuted-cifar100")(seeds=1).small()
    configs = [cell.config for cell in study.cells if cell.levels["tiles"] == "32×32"]
    dataset = load_data(configs[0].data)
    for positions in plan_stacks(configs, torch.device("cpu")):
        stack = Stack.start([configs[position] for position in positions], dataset, torch.device("cpu"))
        for result in stack.run_epoch():
            assert 1.5 < result.train_loss < 4.0
