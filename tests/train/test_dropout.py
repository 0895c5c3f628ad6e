"""Dropout: where timm has it, which numbers go, and that a cell's coins are its own, alone, stacked and resumed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.randomness import Draws
from nearsight.train import (
    DataConfig,
    HistoryRow,
    Listener,
    RunConfig,
    Stop,
    StoppedError,
    baseline,
    train_run,
)
from nearsight.train.dropping import Dropout, NumberDropping
from nearsight.train.engine import Stack
from nearsight.train.fused.pending import fusing
from nearsight.train.stacked import stack_weights, stacked_forward, vmapped_forward, weightless

CPU = torch.device("cpu")
SMALL = {"img_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}


def model(seed: int = 0, name: str = "compact_vit", **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = timm.create_model(name, **SMALL | settings)
    return made


def draws(num_cells: int, num_samples: int, device: torch.device = CPU) -> Draws:
    index = (7 + 3 * torch.arange(num_samples)).expand(num_cells, -1).to(device)
    seeds = (2**40 + 5) * torch.arange(num_cells, device=device)  # whose upper half counts, too
    epochs = torch.arange(num_cells, device=device) + 2
    return Draws(seeds, epochs, torch.zeros((), dtype=torch.int64, device=device), index)


def test_the_places_are_timms() -> None:
    """Those that its rates for the embedding and for projections turn on."""
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, pos_drop_rate=0.1, proj_drop_rate=0.1)
    expected = [path for path, module in theirs.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    found = NumberDropping.install(model(), [0.1], CPU)
    assert list(found.places) == expected
    assert len(expected) == 1 + 3 * 2


@pytest.mark.parametrize("name", ["compact_vit", "locat_compact_vit", "compact_vit_positional", "compact_jumbo_vit"])
@pytest.mark.parametrize("forward", [stacked_forward, vmapped_forward])
def test_a_stack_drops_what_its_models_would_drop(name: str, forward: Any) -> None:
    """Against the models with the tokens at every place multiplied by what `Draws` say, sample by sample."""
    num_samples, rates = 3, [0.5, 0.1]
    cells = [model(seed, name).double() for seed in range(2)]
    skeleton = weightless(cells[0])
    dropping = NumberDropping.install(skeleton, rates, CPU)
    step = draws(2, num_samples)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], CPU)
    images = torch.randn(2, num_samples, 3, 8, 8, dtype=torch.float64)
    outputs = forward(skeleton, weights | dropping(step), images)
    for k, cell in enumerate(cells):
        for number, place in enumerate(dropping.places):

            def dropped(_module: nn.Module, _inputs: object, x: Tensor, k: int = k, number: int = number) -> Tensor:
                coins = step.per_sample(f"dropout.{number}", x[0].numel())[k].view(x.shape)
                return x * (coins < 1 - rates[k]) / (1 - rates[k])

            cell.get_submodule(place).register_forward_hook(dropped)
        torch.testing.assert_close(outputs[k], cell(images[k]), rtol=1e-6, atol=1e-8)


def test_the_kernel_draws_the_same(device: torch.device) -> None:
    """In a fused stack, against float64 and the coins of tensor code."""
    rates = [0.3, 0.6]
    cells = [model(seed) for seed in range(2)]
    images = torch.randn(2, 4, 3, 8, 8)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], device)
    skeleton = weightless(cells[0])
    dropping = NumberDropping.install(skeleton, rates, device)
    with fusing(torch.float32):
        found = stacked_forward(skeleton, weights | dropping(draws(2, 4, device)), images.to(device))
    reference = weightless(cells[0].double())
    on_host = NumberDropping.install(reference, rates, CPU)
    exact = {name: weight.double().cpu() for name, weight in weights.items()}
    expected = vmapped_forward(reference, exact | on_host(draws(2, 4)), images.double())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-5)


def test_factors_have_mean_1_and_differ_between_places_and_samples() -> None:
    cell = model()
    dropping = NumberDropping.install(cell, [0.25], CPU)
    buffers = {name: value[0] for name, value in dropping(draws(1, 200)).items()}
    ones = torch.ones(200, 5, 16)
    found = []
    for place in dropping.places:
        module = cell.get_submodule(place)
        assert isinstance(module, Dropout)
        module.counter, module.keep = buffers[f"{place}.counter"], buffers[f"{place}.keep"]
        found.append(module(ones))
    for factor in found:
        assert set(factor.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
        assert float(factor.mean()) == pytest.approx(1, abs=4 * (1 / 3 / factor.numel()) ** 0.5)
    same = [float((one == other).float().mean()) for one in found for other in found if one is not other]
    assert same == pytest.approx([0.75**2 + 0.25**2] * len(same), abs=0.02)
    assert not torch.equal(found[0][0], found[0][1])
    module.counter = module.keep = None
    assert module(ones) is ones


def config(rate: float, seed: int = 0, **changes: Any) -> RunConfig:
    protocol = dataclasses.replace(baseline(), batch_size=16, max_epochs=3, warmup_epochs=0, lr=1e-2, dropout=rate)
    return RunConfig(
        model=ModelConfig(depth=2, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=100, num_test=20),
        protocol=dataclasses.replace(protocol, **changes),
        seed=seed,
    )


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=100, num_test=20)


def test_a_cells_coins_do_not_depend_on_its_neighbours(dataset: Dataset) -> None:
    configs = [config(0.2), config(0.5, 1), config(0.5, 2, drop_path=0.3), config(0.1, 3)]
    assert configs[0].stack_key == configs[1].stack_key
    assert config(0.0).stack_key != configs[0].stack_key != configs[2].stack_key
    stack = Stack.start(configs[:2], dataset, CPU)
    stack.run_epoch()
    stack.put(0, configs[3], dataset)  # a slot's next cell has coins of its own
    results = stack.run_epoch()
    for result, position, epochs in ((results[0], 3, 1), (results[1], 1, 2)):
        alone = Stack.start([configs[position]], dataset, CPU)
        expected = [alone.run_epoch()[0] for _ in range(epochs)][-1]
        assert result.train_loss == pytest.approx(expected.train_loss, abs=1e-6)
        assert result.val_loss == pytest.approx(expected.val_loss, abs=1e-6)
    without = Stack.start([config(0.0)], dataset, CPU).run_epoch()[0]
    assert abs(without.train_loss - Stack.start([config(0.2)], dataset, CPU).run_epoch()[0].train_loss) > 1e-4
    both = Stack.start([configs[2]], dataset, CPU)
    assert len(both.dropping) == 2
    both.run_epoch()


class StopAfterTheFirstEpoch(Listener):
    def __init__(self) -> None:
        self.stop = Stop()

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        self.stop.request("a test")


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run, listener = config(0.3), StopAfterTheFirstEpoch()
    whole = train_run(run, tmp_path / "whole")
    with pytest.raises(StoppedError, match="after epoch 1"):
        train_run(run, tmp_path / "parts", listener=listener, stop=listener.stop)
    parts = train_run(run, tmp_path / "parts")
    assert parts.read_result()["test_loss"] == whole.read_result()["test_loss"]
    assert (tmp_path / "parts" / "heads.csv").read_bytes() == (tmp_path / "whole" / "heads.csv").read_bytes()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match=r"dropout is 1\.0"):
        config(1.0)
    with pytest.raises(InputError, match="dropout cannot be used: Linear has no places for it"):
        NumberDropping.install(nn.Linear(2, 2), [0.1], CPU)
