"""Stochastic depth: which branches go, how often, and that a cell's coins are its own."""

import dataclasses

import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.configuration import field_docs
from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.randomness import Draws
from nearsight.train import DataConfig, Protocol, RunConfig, baseline
from nearsight.train.engine import Stack
from nearsight.train.stacked import stack_weights, stacked_forward, vmapped_forward, weightless
from nearsight.train.step import DropPath, PathDropping

CPU = torch.device("cpu")


def model(seed: int = 0, name: str = "compact_vit", depth: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(name, depth=depth, embed_dim=32, num_heads=4, num_classes=5)


def draws(num_cells: int, num_samples: int, seed: int = 0) -> Draws:
    index = torch.arange(num_samples).expand(num_cells, -1)
    seeds = seed + torch.arange(num_cells)
    return Draws(seeds, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), index)


def test_the_rates_are_timms() -> None:
    depth, rate = 5, 0.4
    dropping = PathDropping.install(model(depth=depth), [0.0, rate], CPU)
    theirs = timm.create_model("vit_tiny_patch16_224", depth=depth, drop_path_rate=rate)
    expected = [
        1 - getattr(getattr(block, name), "drop_prob", 0.0)
        for block in theirs.blocks
        for name in ("drop_path1", "drop_path2")
    ]
    torch.testing.assert_close(dropping.keep_Kn, torch.tensor([[1.0] * 2 * depth, expected]))


def test_a_single_block_drops_nothing() -> None:
    """It is the first, as in timm; the protocol says so."""
    assert (PathDropping.install(model(depth=1), [0.5], CPU).keep_Kn == 1).all()
    assert "a model of one block skips nothing" in field_docs(Protocol)["drop_path"]


def test_factors_have_mean_1_and_drop_as_often_as_they_should() -> None:
    num_samples = 20_000
    factors = PathDropping.install(model(), [0.0, 0.6], CPU)(draws(2, num_samples))
    keep = {"blocks.0": 1.0, "blocks.1": 0.7, "blocks.2": 0.4}
    for name, factor_KB in factors.items():
        assert (factor_KB[0] == 1).all()
        kept = keep[name.rpartition(".drop_path")[0]]
        assert all(value in (0.0, pytest.approx(1 / kept)) for value in factor_KB[1].unique().tolist())
        error = 4 * ((1 - kept) / kept / num_samples) ** 0.5
        assert float(factor_KB[1].mean()) == pytest.approx(1, abs=error + 1e-6)
    first, second = (factors[f"blocks.2.drop_path{number}.factor"][1] > 0 for number in (1, 2))
    assert float((first == second).float().mean()) == pytest.approx(0.4**2 + 0.6**2, abs=0.02)  # independent


@pytest.mark.parametrize("name", ["compact_vit", "compact_jumbo_vit"])
@pytest.mark.parametrize("forward", [stacked_forward, vmapped_forward])
def test_a_stack_drops_what_its_models_would_drop(name: str, forward: object) -> None:
    """Against timm's blocks with their branches switched off sample by sample."""
    num_samples = 4
    cells = [model(seed, name).double() for seed in range(2)]
    skeleton = weightless(cells[0])
    dropping = PathDropping.install(skeleton, [0.5, 0.9], CPU)
    factors = {name: factor.double() for name, factor in dropping(draws(2, num_samples)).items()}
    assert any((factor == 0).any() for factor in factors.values())
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], CPU)
    images = torch.randn(2, num_samples, 3, 32, 32, dtype=torch.float64)
    outputs = forward(skeleton, weights | factors, images)
    for k, cell in enumerate(cells):
        for b in range(num_samples):
            handles = []
            for buffer, factor in factors.items():

                def scaled(_module: nn.Module, _inputs: object, branch: Tensor, by: Tensor = factor[k, b]) -> Tensor:
                    return branch * by

                place = cell.get_submodule(buffer.removesuffix(".factor"))
                handles.append(place.register_forward_hook(scaled))
            torch.testing.assert_close(outputs[k, b], cell(images[k, b : b + 1])[0], rtol=1e-9, atol=1e-11)
            for handle in handles:
                handle.remove()


def test_nothing_is_dropped_without_factors() -> None:
    cell = model()
    images = torch.randn(2, 3, 32, 32)
    expected = cell(images)
    PathDropping.install(cell, [0.9], CPU)
    assert isinstance(cell.blocks[0].drop_path1, DropPath)
    assert torch.equal(cell(images), expected)
    assert not any("drop_path" in name for name in cell.state_dict())


def test_a_model_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(InputError, match="drop_path cannot be used: Linear has no blocks"):
        PathDropping.install(nn.Linear(2, 2), [0.1], CPU)


def config(rate: float, seed: int) -> RunConfig:
    protocol = dataclasses.replace(baseline(), batch_size=16, max_epochs=3, warmup_epochs=0, lr=1e-2)
    return RunConfig(
        model=ModelConfig(depth=2, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=100, num_test=20),
        protocol=dataclasses.replace(protocol, drop_path=rate),
        seed=seed,
    )


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=100, num_test=20)


def test_a_cells_coins_do_not_depend_on_its_neighbours(dataset: Dataset) -> None:
    configs = [config(0.2, 0), config(0.6, 1), config(0.6, 2)]
    stack = Stack.start(configs, dataset, CPU)
    stack.run_epoch()
    together = stack.select([0, 2])  # one leaves after an epoch
    results = together.run_epoch()
    for result, position in zip(results, (0, 2), strict=True):
        alone = Stack.start([configs[position]], dataset, CPU)
        alone.run_epoch()
        (expected,) = alone.run_epoch()
        assert result.train_loss == pytest.approx(expected.train_loss, abs=1e-6)
        assert result.val_loss == pytest.approx(expected.val_loss, abs=1e-6)
    without = Stack.start([config(0.0, 0)], dataset, CPU)
    without.run_epoch()
    assert abs(without.run_epoch()[0].train_loss - results[0].train_loss) > 1e-3


def test_runs_with_and_without_it_are_no_stack() -> None:
    """They are different programs, which round differently; so that adding a cell changes no other."""
    assert config(0.2, 0).stack_key == config(0.6, 1).stack_key != config(0.0, 0).stack_key
