"""A cell's history is its own: the same numbers in a stack of others as alone, up to the order of sums."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor

from nearsight.augment import CutMix
from nearsight.data import Dataset
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig, baseline, modern
from nearsight.train.engine import Stack
from nearsight.train.recipes import demo_run
from nearsight.train.runner import load_data

NUM_STEPS = 200
LARGEST_DIFFERENCE = 1e-6
"""Of a loss, in float32: its own rounding. A difference in the weights would have grown to 0.1 and more by then."""


def cells(model: ModelConfig, data: DataConfig) -> list[RunConfig]:
    protocols = [
        baseline(),
        dataclasses.replace(modern().without("autoaugment"), lr=3e-4, weight_decay=0.3),
        dataclasses.replace(baseline().with_(CutMix(p=1.0)), smoothing=0.2, clip_norm=1.0),
    ]
    short = [dataclasses.replace(protocol, batch_size=8, max_epochs=10, warmup_epochs=1) for protocol in protocols]
    return [RunConfig(model=model, data=data, protocol=protocol, seed=seed) for seed, protocol in enumerate(short)]


def losses(configs: list[RunConfig], dataset: Dataset, device: str) -> Tensor:
    """The loss of every step of every cell: float64 [steps, K]."""
    stack = Stack.start(configs, dataset, torch.device(device))
    sums: list[Tensor] = []
    while len(sums) < NUM_STEPS:
        epoch: list[Tensor] = []
        stack.run_epoch(lambda _, epoch=epoch: epoch.append(stack.losses_so_far.clone()))
        sums += [after - before for before, after in zip([torch.zeros_like(epoch[0]), *epoch], epoch, strict=False)]
    return torch.stack(sums[:NUM_STEPS]).cpu()


def largest_difference(configs: list[RunConfig], dataset: Dataset, device: str) -> float:
    together = losses(configs, dataset, device)
    alone = torch.cat([losses([config], dataset, device) for config in configs], dim=1)
    assert together.std(0).min() > 0.01, "these losses do not move; they would agree whatever happened"
    return float((together - alone).abs().max())


@pytest.mark.parametrize("reach", [(), pytest.param((1.5, 3.0), marks=pytest.mark.slow)])
def test_a_cell_does_not_notice_its_neighbours(reach: tuple[float, ...], request: pytest.FixtureRequest) -> None:
    # How sums are divided among threads depends on how many cells there are.
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    data = DataConfig(name="shapes", num_train=300, num_test=20)
    configs = cells(ModelConfig(depth=2, width=32, num_heads=2, mlp_width=32, reach=reach), data)
    assert largest_difference(configs, load_data(data), "cpu") < LARGEST_DIFFERENCE


@pytest.mark.gpu
def test_a_cell_does_not_notice_its_neighbours_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    data = DataConfig(name="shapes", num_train=2000, num_test=20)
    configs = cells(ModelConfig(), data)
    torch.use_deterministic_algorithms(True)
    try:
        assert largest_difference(configs, load_data(data), "cuda") < LARGEST_DIFFERENCE
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_accuracies_in_bfloat16_differ_no_more_than_seeds_do() -> None:
    together, alone = bfloat16_accuracies(num_seeds=8)
    differences = together - alone
    standard_error = differences.std() / len(differences) ** 0.5
    assert alone.mean() > 0.3, "models that have not learned anything say nothing"
    assert alone.std() > 0.001, "nor do seeds that do not differ"
    assert differences.mean().abs() < max(3 * float(standard_error), 0.25 * float(alone.std()))
    assert differences.abs().mean() < 2 * alone.std()


def bfloat16_accuracies(num_seeds: int) -> tuple[Tensor, Tensor]:
    """Validation accuracies of the demo's model after training on a GPU in one stack, and one by one."""
    config = dataclasses.replace(demo_run(), precision="bf16")
    configs = [dataclasses.replace(config, seed=seed) for seed in range(num_seeds)]
    dataset, num_epochs = load_data(config.data), config.protocol.max_epochs

    def accuracies(cells: list[RunConfig]) -> list[float]:
        stack = Stack.start(cells, dataset, torch.device("cuda"))
        results = [stack.run_epoch() for _ in range(num_epochs)]
        return [result.val_acc for result in results[-1]]

    together = accuracies(configs)
    alone = [accuracy for config in configs for accuracy in accuracies([config])]
    return torch.tensor(together), torch.tensor(alone)
